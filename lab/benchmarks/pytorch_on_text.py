"""PyTorch's peer of time_to_loss.py: trains our decoder on the batches and from the parameters of a file.

    torchrun --nproc_per_node=4 lab/benchmarks/pytorch_on_text.py '{"data": "data.npz", "out": "FOLDER", ...}'

One process per device, configured by torchrun's variables, on gloo. `mode`: ddp, with its `hook` if one is named; hsdp
(FSDP2, sharded inside a node); local_sgd, which averages the parameters after every `inner_steps` steps, with `half` by
their changes in fp16, and in the first `dense_steps` the gradients of each step (post-local SGD). Fused AdamW with our
defaults, without clipping; with `muon` PyTorch's Muon, with a `momentum`, for the blocks' matrices. The file has
`tokens` [steps, rows, T + 1], `validation` [rows, T + 1], the learning `rates` [steps], times `times_rate`, and the
parameters by their names here. A line of FOLDER/metrics.jsonl is a step's, as train.py's.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# PyTorch is only compared with; it is not a dependency and has a separate environment.

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pytorch_peer import Decoder, add_hook, own_device, sent_bytes, shard  # in this folder
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters

DECAY = 0.1  # of matrices: no norms, no positions


def optimizers_of(model: torch.nn.Module, *, muon: bool, momentum: float) -> list[torch.optim.Optimizer]:
    """Returns AdamW, with `muon` also Muon for the blocks' matrices; norms and positions do not decay."""
    left, found = dict(model.named_parameters()), []
    if muon:
        matrices = [left.pop(name) for name in [*left] if "blocks." in name and left[name].ndim == 2]
        found = [torch.optim.Muon(matrices, weight_decay=DECAY, momentum=momentum)]
    decays = {name: p.ndim > 1 and "position" not in name for name, p in left.items()}
    groups = [
        {"params": [left[name] for name in left if decays[name] == is_decayed], "weight_decay": DECAY * is_decayed}
        for is_decayed in (True, False)
    ]
    return [*found, torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)]


@torch.no_grad()
def average_changes(model: torch.nn.Module, synced: list[torch.Tensor]) -> None:
    """Adds the ranks' mean change since `synced` to `synced` and to the model's parameters; fp16 on the wire."""
    params = list(model.parameters())
    changes = torch.cat([(p - old).flatten() for p, old in zip(params, synced, strict=True)]).half()
    dist.all_reduce(changes)
    means = (changes.float() / dist.get_world_size()).split([p.numel() for p in params])
    for p, old, mean in zip(params, synced, means, strict=True):
        p.copy_(old.add_(mean.view_as(old)))


def main(options: dict[str, Any]) -> None:
    """Trains all steps of the file."""
    dist.init_process_group("gloo")
    rank, world, device = dist.get_rank(), dist.get_world_size(), own_device()
    with np.load(options["data"]) as file:
        data = dict(file)
    tokens, validation, rates = (torch.from_numpy(data.pop(name)) for name in ("tokens", "validation", "rates"))
    rows = tokens.shape[1] // world  # each device's are neighbours, as in ours
    model: Any = Decoder(options["sizes"] | {"low_precision": False}, dots=False, stored=True, bias=False).to(device)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in data.items()})
    mode, inner, dense_steps = options["mode"], options["inner_steps"], options["dense_steps"]
    if mode != "local_sgd":
        model = shard(model, mode, device, kept=False, is_low=False, hook=options["hook"])
        add_hook(model, options["hook"], rank=options["rank"], start=max(2, dense_steps))
    elif dense_steps:
        model = shard(model, "ddp", device, kept=False, is_low=False)
        alone, _ = dist.new_subgroups(1)
        state = post_localSGD_hook.PostLocalSGDState(None, alone, dense_steps, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizers = optimizers_of(model, muon=options["muon"], momentum=options["momentum"])

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        return model(rows[:, :-1].long(), rows[:, 1:].long())

    synced = list[torch.Tensor]()
    out = Path(options["out"]) / "metrics.jsonl"
    last_s, sent = time.perf_counter(), sent_bytes()
    for step in range(1, len(tokens) + 1):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = options["times_rate"] * float(rates[step - 1])
        if options["half"] and step == dense_steps + 1:
            synced = [p.detach().clone() for p in model.parameters()]
        loss = loss_of(tokens[step - 1, rank * rows : (rank + 1) * rows])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if inner and step > dense_steps and step % inner == 0:
            if options["half"]:
                average_changes(model, synced)
            else:
                average_parameters(model.parameters(), dist.group.WORLD)
        row = {"step": step, "loss": loss.item(), "step_time_s": time.perf_counter() - last_s}
        row |= {"wire_tx_bytes": sent_bytes() - sent}
        if options["validate_every"] and step % options["validate_every"] == 0:
            with torch.no_grad():
                mine = validation[rank::world]
                total = torch.stack([loss_of(part) * len(part) for part in mine.split(rows)]).sum()
            dist.all_reduce(total)
            row["validation_loss"] = total.item() / len(validation)
        if rank == 0:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        last_s, sent = time.perf_counter(), sent_bytes()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
