"""Our decoders in PyTorch, for lab/benchmarks/steps.py and lab/benchmarks/gpu.py: DDP, or FSDP2, full or hybrid.

    python -m launch.emulate --nodes=4 --devices_per_node=2 --processes_per_node=2 --rate=1gbit \
        -- PYTHON_WITH_TORCH lab/benchmarks/pytorch_peer.py ddp|hsdp|zero3 [kept] [dots] \
        [bf16|fp16|fp8|power_sgd] [accum=1] [steps=3] [skipped=1]
    PYTHON_WITH_TORCH lab/benchmarks/pytorch_peer.py zero3 kept '{"layers": 12, "hidden": 768, "heads": 12, ...}'

One process per device, configured by torchrun's variables. Without sizes, on gloo: configs/standard.py's workload (8
layers of 512, f32, AdamW, activation checkpointing, one sequence per device, 4 micro-steps), but no clipping. `hsdp`
all-reduces between nodes at the last micro-step only, like MiCS. With sizes, of configs/gpu_decoder.py: parameters in
f32 and compute in bf16, tied head, fused AdamW, gradients clipped to norm 1, torch.compile on GPUs (on a CPU it runs
uncompiled, to try the program). `kept`: layers stay gathered for the backward pass; `dots`: products with weights are
stored for it; `bf16`, `fp16` and `power_sgd` (rank 4, from step 2 on): DDP's hooks, and for FSDP2 `bf16` is its
`reduce_dtype`; `fp8`: the hook below. AdamW is fused and glibc keeps freed memory, as in train.py. Tokens are random.
Rank 0 prints one line: RESULT and a JSON object.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false, reportReturnType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# PyTorch is only compared with; it is not a dependency and has a separate environment.

import ctypes
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

STANDARD = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 256, "seq_len": 256, "rows": 1, "accum": 4, "steps": 3}
STANDARD |= {"skipped": 1, "low_precision": False}
PRODUCTS = [torch.ops.aten.mm.default]
HOOKS = ("bf16", "fp16", "fp8", "power_sgd")
ONE_BUCKET = ("fp8", "power_sgd")  # with several, callbacks start collectives in different orders, which gloo confuses
FP8 = torch.float8_e4m3fn
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")  # in an emulated node


class PeerBlock(nn.Module):
    """One pre-norm layer."""

    def __init__(self, hidden: int, heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden, bias=bias), nn.LayerNorm(hidden, bias=bias)
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
    """The decoder; returns the mean loss. In f32 its head is not tied and every layer is checkpointed.

    With `stored` no layer is checkpointed. By default (`bias=None`) norms have biases where our norms have them: not in
    low precision.
    """

    def __init__(self, sizes: dict[str, Any], *, dots: bool, stored: bool = False, bias: bool | None = None) -> None:
        super().__init__()
        hidden, vocab, is_low = sizes["hidden"], sizes["vocab"], sizes["low_precision"]
        bias = not is_low if bias is None else bias
        self.token, self.position = nn.Embedding(vocab, hidden), nn.Embedding(sizes["seq_len"], hidden)
        self.blocks = nn.ModuleList(PeerBlock(hidden, sizes["heads"], bias=bias) for _ in range(sizes["layers"]))
        self.norm, self.head = nn.LayerNorm(hidden, bias=bias), nn.Linear(hidden, vocab, bias=False)
        selective = {"context_fn": partial(create_selective_checkpoint_contexts, PRODUCTS)} if dots else {}
        self.run = partial(checkpoint, use_reentrant=False, **selective)
        if is_low or stored:
            self.run = lambda block, x: block(x)
        if is_low:
            self.head.weight = self.token.weight
            for embedding in (self.token, self.position):
                nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self.run(block, x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def shard(model: nn.Module, mode: str, device: torch.device, *, kept: bool, is_low: bool, hook: str = "") -> nn.Module:
    """Returns the model under DDP, with buckets for a hook that `add_hook` adds later, or FSDP2.

    `kept` layers stay gathered for the backward pass. With the hook `bf16` FSDP2 reduces gradients in bfloat16.
    """
    if mode == "ddp":
        bucket_mb = 1000 if hook in ONE_BUCKET else None
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if mode == "hsdp":
        mesh = init_device_mesh(device.type, (world // local, local), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (world,))
    dtype = torch.bfloat16 if is_low else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.bfloat16 if hook == "bf16" else dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not kept)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def add_hook(model: Any, name: str, *, rank: int = 4, start: int = 2) -> None:
    """Makes DDP's gradients travel as the hook `name` sends them, power_sgd from step `start` on; "" for none.

    FSDP2 needs no hook.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return
    if name == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "fp8":
        model.register_comm_hook(None, fp8_hook)
    elif name == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def fp8_encoded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float8 e4m3 codes `[parts, n]` of float32 `[parts, n]`, as bytes, and a scale per part `[parts, 1]`."""
    scales = values.abs().amax(1, keepdim=True).clamp_min(1e-30) / torch.finfo(FP8).max
    return (values / scales).to(FP8).view(torch.uint8), scales


def fp8_decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns float32 `[parts, n]`, decoded from the results of `fp8_encoded`."""
    return codes.view(FP8).float() * scales


def fp8_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in float8 on the wire: an all-to-all of parts, means in float32, an all-gather of these."""
    world, values = dist.get_world_size(), bucket.buffer()
    parts = F.pad(values, (0, -len(values) % world)).view(world, -1)
    codes, scales = fp8_encoded(parts)
    mine, my_scales = torch.empty_like(codes), torch.empty_like(scales)
    dist.all_to_all_single(mine, codes)
    dist.all_to_all_single(my_scales, scales)
    code, scale = fp8_encoded(fp8_decoded(mine, my_scales).mean(0, keepdim=True))
    gathered, all_scales = torch.empty_like(codes), torch.empty_like(scales)
    dist.all_gather(list(gathered.split(1)), code)
    dist.all_gather(list(all_scales.split(1)), scale)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(fp8_decoded(gathered, all_scales).view(-1)[: len(values)])
    return done


def sent_bytes() -> int:
    """Returns the bytes that this node has sent so far; 0 outside an emulated cluster."""
    return int(SENT.read_text()) if SENT.exists() else 0


class Trainer:
    """A model with its optimizer and random tokens, on this process's device."""

    def __init__(self, mode: str, sizes: dict[str, Any], *, kept: bool, dots: bool, hook: str = "") -> None:
        self.mode, self.sizes, self.is_low, self.device = mode, sizes, sizes["low_precision"], own_device()
        model: Any = Decoder(sizes, dots=dots).to(self.device)
        self.model_bytes = 4 * sum(p.numel() for p in model.parameters())
        if dist.is_initialized():
            model = shard(model, mode, self.device, kept=kept, is_low=self.is_low, hook=hook)
            add_hook(model, hook)
        options = {"betas": (0.9, 0.95), "weight_decay": 0.1} if self.is_low else {}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, **options)
        self.model = model
        self.run = torch.compile(model) if self.device.type == "cuda" else model
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.generator = torch.Generator().manual_seed(rank)

    def step(self) -> float:
        """Runs the micro-steps and the optimizer; returns the mean loss of this rank."""
        total, accum = 0.0, self.sizes["accum"]
        for micro in range(accum):
            if dist.is_initialized() and self.mode == "ddp":
                self.model.require_backward_grad_sync = micro == accum - 1
            elif dist.is_initialized() and self.mode == "hsdp":
                self.model.set_requires_all_reduce(micro == accum - 1)
            shape = (self.sizes["rows"], self.sizes["seq_len"] + 1)
            rows = torch.randint(0, self.sizes["vocab"], shape, generator=self.generator).to(self.device)
            with torch.autocast(self.device.type, dtype=torch.bfloat16) if self.is_low else nullcontext():
                loss = self.run(rows[:, :-1], rows[:, 1:]) / accum
            loss.backward()
            total += loss.item()
        if self.is_low:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def own_device() -> torch.device:
    """Returns the device of this process: a GPU, or the CPU with one thread if there are several processes.

    From then on glibc keeps freed memory, with the values of training/devices.py.
    """
    for option, value in ((-4, 0), (-1, -1), (-8, 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX
        ctypes.CDLL(None).mallopt(option, value)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.set_float32_matmul_precision("high")
        return torch.device("cuda", torch.cuda.current_device())
    if dist.is_initialized():
        torch.set_num_threads(1)
    return torch.device("cpu")


def finished() -> None:
    """Returns when this process's GPU, or on CPUs every rank, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif dist.is_initialized():
        dist.barrier()


def main(mode: str, sizes: dict[str, Any], words: list[str]) -> None:
    """Trains a few steps and prints the median time of one."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    hook = next((word for word in words if word in HOOKS), "")
    trainer = Trainer(mode, sizes, kept="kept" in words, dots="dots" in words, hook=hook)
    times, sent, losses = [], [], []
    for _ in range(sizes["steps"]):
        finished()
        started_s, before = time.perf_counter(), sent_bytes()
        losses.append(trainer.step())
        finished()
        times.append(time.perf_counter() - started_s)
        sent.append(sent_bytes() - before)
    timed = times[sizes["skipped"] :]
    if not dist.is_initialized() or dist.get_rank() == 0:
        result = {"step_time_s": statistics.median(timed), "step_times_s": timed, "losses": losses}
        result |= {"wire_tx_bytes": statistics.median(sent[sizes["skipped"] :]), "model_bytes": trainer.model_bytes}
        print("RESULT " + json.dumps(result | {"accum": sizes["accum"], "torch": torch.__version__}), flush=True)
    finished()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    given = [json.loads(word) for word in sys.argv[2:] if word.startswith("{")]
    counts = {
        name: int(value)
        for name, equal, value in (word.partition("=") for word in sys.argv[2:])
        if equal == "=" and name in ("accum", "steps", "skipped")
    }
    main(sys.argv[1], (given[0] if given else STANDARD) | counts, sys.argv[2:])
