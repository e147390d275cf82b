"""The standard workload in PyTorch, for benchmarks/strategies.py: DDP, or FSDP2 with full or hybrid sharding, on gloo.

    python -m cluster.emulate --nodes=4 --devices_per_node=2 --processes_per_node=2 --rate=1gbit \
        -- PYTHON_WITH_TORCH benchmarks/pytorch_peer.py ddp|hsdp|zero3 [kept] [dots]

One process per device, configured by torchrun's variables. The workload is configs/standard.py's (8 layers of 512,
f32, AdamW, activation checkpointing, one sequence per device, 4 micro-steps), but with random tokens and no clipping.
`hsdp` all-reduces between nodes at the last micro-step only, like MiCS. `kept`: layers stay gathered for the backward
pass; `dots`: products with weights are stored for it. Rank 0 prints one line: RESULT and a JSON object.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# PyTorch is no dependency of ours; it is installed in a separate environment.

import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

LAYERS, HIDDEN, HEADS, MLP, VOCAB, SEQ = 8, 512, 8, 2048, 256, 256
PRODUCTS = [torch.ops.aten.mm.default]
ACCUM, STEPS = 4, 3  # the first of the steps is not timed


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, MLP, bias=False), nn.Linear(MLP, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            y.view(batch, length, HEADS, -1).transpose(1, 2) for y in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Decoder(nn.Module):
    """The decoder, every layer checkpointed; with `dots`, products with weights are stored for the backward pass."""

    def __init__(self, *, dots: bool) -> None:
        super().__init__()
        self.selective = {"context_fn": partial(create_selective_checkpoint_contexts, PRODUCTS)} if dots else {}
        self.token, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.selective)
        return self.head(self.norm(x))


def shard(model: nn.Module, mode: str, *, kept: bool) -> nn.Module:
    """Returns the model under DDP or FSDP2; `kept` layers stay gathered for the backward pass."""
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    world = dist.get_world_size()
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (world // local, local), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not kept)
    return fully_shard(model, mesh=mesh)


def sent_bytes() -> int:
    """Returns the bytes that this node has sent so far."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, mode: str, step: int) -> float:
    """Runs the micro-steps and the optimizer; returns the mean loss of this rank."""
    total = 0.0
    for micro in range(ACCUM):
        last = micro == ACCUM - 1
        if mode == "ddp":
            model.require_backward_grad_sync = last
        elif mode == "hsdp":
            model.set_requires_all_reduce(last)
        generator = torch.Generator().manual_seed((step * ACCUM + micro) * 1000 + dist.get_rank())
        rows = torch.randint(0, VOCAB, (1, SEQ + 1), generator=generator)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / ACCUM
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def main(mode: str, *, kept: bool, dots: bool) -> None:
    """Trains a few steps and prints the median time of one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Decoder(dots=dots)
    model_bytes = 4 * sum(p.numel() for p in model.parameters())
    model = shard(model, mode, kept=kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    times, sent, losses = [], [], []
    for step in range(STEPS):
        dist.barrier()
        started_s, before = time.perf_counter(), sent_bytes()
        losses.append(train_step(model, optimizer, mode, step))
        dist.barrier()
        times.append(time.perf_counter() - started_s)
        sent.append(sent_bytes() - before)
    if dist.get_rank() == 0:
        result = {"step_time_s": statistics.median(times[1:]), "step_times_s": times[1:], "losses": losses}
        result |= {"wire_tx_bytes": statistics.median(sent[1:]), "model_bytes": model_bytes, "accum": ACCUM}
        print("RESULT " + json.dumps(result | {"torch": torch.__version__}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], kept="kept" in sys.argv, dots="dots" in sys.argv)
