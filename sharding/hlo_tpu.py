"""Collectives where XLA for TPUs writes them: in fusions, and between slices as transfers of the Megascale runtime.

An asynchronous collective begins in a fusion, continues during the products of other fusions, and ends in a last one.
Each fusion repeats the collective. Formats of jax 0.10.2 with libtpu 0.0.42.1, and of jax 0.12 with libtpu 0.0.52.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sharding.hlo_program import Computation, Instruction, Program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "REDUCE_SCATTER": "reduce-scatter",
    "ONE_TO_ONE": "collective-permute",
}
WHOLE, START, CARRIED, DONE = "whole", "start", "carried", "done"  # parts of a collective that a fusion runs
SLICE_IDS = 100_000  # the devices of the n-th slice have ids from n times this on


@dataclass(frozen=True, kw_only=True)
class FusedCollective:
    """A collective inside of a fusion."""

    part: str
    kind: str
    instruction: Instruction
    computation: Computation


@dataclass(frozen=True, kw_only=True)
class SliceTransfer:
    """A collective between slices, which a pair of `send` and `recv` starts."""

    kind: str
    received: Instruction
    groups: Sequence[Sequence[int]]  # numbers of the slices


def fused_collective(fusion: Instruction, program: Program) -> FusedCollective | None:
    """Returns the collective that a fusion runs a part of, or None."""
    if fusion.opcode != "fusion" or not fusion.calls:
        return None
    called = program.called(fusion.calls[0], fusion)
    inside = next((i for i in called.instructions if i.opcode in KINDS), None)
    if inside is None:
        return None
    part, kind = WHOLE, inside.opcode
    targets = {i.attributes.get("custom_call_target") for i in called.instructions if i.opcode == "custom-call"}
    if '"AsyncCollectiveStart"' in targets:
        part = START
    elif '"AsyncCollectiveDone"' in targets:
        part = DONE
    elif "async_collective_fusion_config" in inside.written_attributes:
        part = CARRIED
    elif is_reduce_scatter(inside, called, program):
        kind = "reduce-scatter"
    return FusedCollective(part=part, kind=kind, instruction=inside, computation=called)


def is_reduce_scatter(all_reduce: Instruction, computation: Computation, program: Program) -> bool:
    """Whether XLA has made an all-reduce of a reduce-scatter over a whole slice: each user cuts the device's part out.

    The cut has no name of jax.
    """

    def cuts(user: Instruction) -> bool:
        inside = program.called(user.calls[0], user).instructions if user.opcode == "fusion" else (user,)
        return any(i.opcode == "dynamic-slice" and not i.op_name for i in inside)

    users = computation.users.get(all_reduce.name, ())
    return all_reduce.opcode == "all-reduce" and bool(users) and all(map(cuts, users))


def slice_transfer(send: Instruction, computation: Computation) -> SliceTransfer | None:
    """Returns the collective that a `send` starts, or None for another transfer. ValueError if it cannot be read."""
    if "_xla_megascale_transfer_type" not in send.written_attributes:
        return None
    kind = TRANSFERS.get(_attribute("transfer_type", send))
    received = next((i for i in computation.instructions if i.opcode == "recv" and _pair(i) == _pair(send)), None)
    if kind is None or received is None:
        raise ValueError(f"{send} cannot be read: its transfer between slices is of an unknown kind, or has no recv")
    target = _attribute("target", send)
    listed = re.findall(r"\{([\d,:]+)\}x", target)  # {1,2}x{0:15}: slices, and devices of each
    if listed:
        groups = [[number - 1 for number in _numbers(text)] for text in listed]
    else:  # {{100000,200000},{100001,200001}}: devices
        of_devices = [_numbers(text) for text in re.findall(r"\{([\d,]+)\}", target)]
        groups = [*{tuple(number // SLICE_IDS - 1 for number in group): None for group in of_devices}]
    if not groups:
        raise ValueError(f"{send} has a target that cannot be read: {target[:120]}")
    return SliceTransfer(kind=kind, received=received, groups=groups)


def send_of(done: Instruction, computation: Computation) -> Instruction | None:
    """Returns the `send` that a `recv-done` waits for, if the computation has it."""
    received = computation.by_name.get(done.operands[0])
    sends = (i for i in computation.instructions if i.opcode == "send")
    return next((send for send in sends if received and _pair(send) == _pair(received)), None)


def _pair(instruction: Instruction) -> str:
    """Returns the name that a `send` and its `recv` share."""
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.written_attributes)
    return found[1] if found else instruction.name


def _attribute(name: str, send: Instruction) -> str:
    """Returns an attribute of the Megascale runtime."""
    found = re.search(rf'_xla_megascale_{name}=("[^"]*"|\{{.*?\}}\}})', send.written_attributes)
    return found[1].strip('"') if found else ""


def _numbers(text: str) -> list[int]:
    """Returns the numbers of `1,2,5:8`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found
