"""The decoders of configs/gpu_decoder.py in PyTorch, for benchmarks/gpu.py: torch.compile, bf16, fused AdamW.

    PYTHON_WITH_TORCH benchmarks/pytorch_gpu.py '{"layers": 12, "hidden": 768, "heads": 12, "vocab": 50304, ...}'

Parameters in f32 and compute in bf16, attention by scaled_dot_product_attention, tied head, gradients clipped to norm
1: what ours does. Under torchrun on several GPUs the state is cut over all of them (FSDP2). Without a GPU it runs on
the CPU, uncompiled, to try the program. Rank 0 prints one line: RESULT and a JSON object.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# PyTorch is the peer, no dependency: it is in an environment of its own.

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden, bias=False), nn.LayerNorm(hidden, bias=False)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            y.view(batch, length, self.heads, -1).transpose(1, 2) for y in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Decoder(nn.Module):
    """The decoder; returns the mean loss."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        hidden = sizes["hidden"]
        self.token, self.position = nn.Embedding(sizes["vocab"], hidden), nn.Embedding(sizes["seq_len"], hidden)
        self.blocks = nn.ModuleList(Block(hidden, sizes["heads"]) for _ in range(sizes["layers"]))
        self.norm = nn.LayerNorm(hidden, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def cut(model: Decoder) -> nn.Module:
    """Cuts the state over all ranks, a layer at a time; what is gathered for the forward pass is kept."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mp_policy=policy, reshard_after_forward=False)


def main(sizes: dict[str, Any]) -> None:
    """Trains and prints the median of the tokens per second, over all ranks."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if world > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    model: Any = Decoder(sizes).to(device)
    if world > 1:
        model = cut(model)
    run = torch.compile(model) if on_gpu else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)
    generator = torch.Generator().manual_seed(rank)
    shape = (sizes["rows"], sizes["seq_len"] + 1)
    speeds: list[float] = []
    loss = torch.zeros(())
    for step in range(sizes["steps"]):
        started_s = time.perf_counter()
        rows = torch.randint(0, sizes["vocab"], shape, generator=generator).to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = run(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        if step >= sizes["skipped"]:
            speeds.append(world * sizes["rows"] * sizes["seq_len"] / (time.perf_counter() - started_s))
    if rank == 0:
        result = {"tokens_per_s": statistics.median(speeds), "loss": loss.item(), "torch": torch.__version__}
        print("RESULT " + json.dumps(result), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
