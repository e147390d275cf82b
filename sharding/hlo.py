"""Reads the collectives of a compiled program: kind, mesh axes, bytes, executions per step, inside or between nodes.

XLA's text is the only public source. A module can write replica groups in three ways (`{{0,2},{1,3}}`,
`[4,2]<=[8]T(1,0)`, `mesh['a'=4,'b'=2] {'a'}`). It can put collectives into loops (multiplied here by the trip count),
called computations and asynchronous pairs. For TPUs it puts them into fusions as well, and between slices it writes
`send` and `recv` of the Megascale runtime (sharding/hlo_tpu.py).
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise, permutations
from math import prod

import numpy as np

from sharding.hlo_program import (
    ArrayType,
    Computation,
    Instruction,
    Program,
    Site,
    parse_program,
    tensors,
    trip_count,
)
from sharding.hlo_tpu import KINDS, START, WHOLE, fused_collective, is_reduce_scatter, slice_transfer
from sharding.mesh import MeshShape

# named scopes of the step
LABELS = (
    "gather",
    "group_reduce_scatter",
    "gradient_scope",
    "pipeline",
    "replica_all_reduce",
    "orthogonalise",
    "parameter_scope",
)
LABELS += ("experts", "context")
WARM_UP = "warm_up"  # named scope of the operations that the replica all-reduce runs only in its first steps
CALLS = ("call", "conditional", "custom-call", "call-start", "custom-call-start", "async-start")  # may hold collectives
CONTEXT = ArrayType("u32", ())  # an additional result of a started collective-permute
NOT_REPORTED = ("label", "loop_depth", "num_elements", "array_bytes", "group", "group_nodes")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of the program. Byte counts are per execution and device, averaged over the devices.

    `payload_bytes` is the whole tensor (the gathered result, the operand to be scattered). In a ring over the group's
    order a device sends `(g-1)/g` of the payload, or twice that for an all-reduce. `inter_bytes` and `intra_bytes` are
    these bytes times the fractions of the ring's edges between and inside nodes.
    """

    kind: str
    label: str  # gather, reduce_scatter, ... or "" if unknown
    axes: tuple[str, ...]
    dtype: str
    num_elements: int
    payload_bytes: int
    array_bytes: tuple[int, ...]  # per array of the payload; gloo reduces one array after the other
    inter_bytes: float
    intra_bytes: float
    group: tuple[int, ...]  # devices of the first group, by their numbers in the mesh
    group_nodes: int  # number of nodes of a group
    times: int  # executions per step
    loop_depth: int

    @property
    def group_size(self) -> int:
        """The number of devices per group."""
        return len(self.group)


def read_collectives(hlo_text: str, shape: MeshShape) -> list[Collective]:
    """Returns the collectives of a compiled module (`compiled.as_text()`) whose devices form a mesh of `shape`.

    ValueError names an instruction that cannot be read, or a loop around collectives without a readable trip count.
    """
    return program_collectives(parse_program(hlo_text), shape)


def program_collectives(program: Program, shape: MeshShape) -> list[Collective]:
    """Returns the collectives of a parsed program."""
    return _walk(program, Site(computation=program.entry), shape, times=1, depth=0)


def behind_warm_up(program: Program) -> Program:
    """Returns the program of the steps after a warm-up: conditional branches in the warm-up's scope are emptied."""
    found = (i for computation in program.computations.values() for i in computation.instructions)
    branches = [program.called(name, i) for i in found if i.opcode == "conditional" for name in i.calls]
    of_warm_up = [c.name for c in branches if any(WARM_UP in _scopes(i.op_name) for i in c.instructions)]
    return replace(program, computations=program.computations | {name: Computation(name, ()) for name in of_warm_up})


def bytes_per_step(collectives: Sequence[Collective]) -> dict[str, int]:
    """Returns `collective_inter_bytes` and `collective_intra_bytes` per device per step."""
    return {
        "collective_inter_bytes": round(sum(c.inter_bytes * c.times for c in collectives)),
        "collective_intra_bytes": round(sum(c.intra_bytes * c.times for c in collectives)),
    }


def as_report(collectives: Sequence[Collective]) -> dict[str, object]:
    """Returns the JSON form: equal collectives as one entry, its bytes per device per step, and the totals.

    The `times` of equal collectives are added. The largest traffic comes first.
    """
    times: Counter[Collective] = Counter()
    for c in collectives:
        times[replace(c, times=0, loop_depth=0)] += c.times
    entries = []
    for c, n in sorted(times.items(), key=lambda item: -item[1] * (item[0].inter_bytes + item[0].intra_bytes)):
        entry = asdict(c) | {"times": n, "name": c.label.replace("_", "-"), "axes": list(c.axes)}
        entry |= {"inter_bytes": round(c.inter_bytes * n), "intra_bytes": round(c.intra_bytes * n)}
        entries.append({key: entry[key] for key in entry if key not in NOT_REPORTED})
    totals = bytes_per_step(collectives)
    return {"collectives": entries, **{key.removeprefix("collective_"): sent for key, sent in totals.items()}}


# -------------------------------------------------------------------------------------------- the call graph


def _walk(program: Program, site: Site, shape: MeshShape, *, times: int, depth: int) -> list[Collective]:
    """Returns the collectives of a computation that runs `times` times per step, and of all computations that it calls.

    A conditional counts as the branch that sends most, which is an upper bound.
    """
    found: list[Collective] = []
    for instruction in site.computation.instructions:
        collective = collective_of(instruction, site.computation, program, shape)
        if collective:
            found.append(replace(collective, times=times, loop_depth=depth))
        elif instruction.opcode == "while":
            body = program.called(instruction.computation("body"), instruction)
            inside = _walk(
                program, Site(computation=body, caller=instruction, outer=site), shape, times=1, depth=depth + 1
            )
            if inside:
                trips = trip_count(instruction, site, program)
                found += [replace(c, times=c.times * trips * times) for c in inside]
        elif instruction.opcode in CALLS:
            bodies = [program.called(name, instruction) for name in instruction.calls]
            called = [
                _walk(program, Site(computation=body, caller=instruction, outer=site), shape, times=times, depth=depth)
                for body in bodies
            ]
            if instruction.opcode == "conditional" and called:
                called = [max(called, key=lambda branch: tuple(bytes_per_step(branch).values()))]
            found += chain.from_iterable(called)
    return found


# ---------------------------------------------------------------------------------------- one instruction


def collective_of(
    instruction: Instruction, computation: Computation, program: Program, shape: MeshShape
) -> Collective | None:
    """Returns the collective that an instruction of `computation` runs or starts, once; None for other instructions."""
    if instruction.opcode == "send":
        return _between_slices(instruction, computation, shape)
    if fused := fused_collective(instruction, program):
        inside = fused.instruction
        groups = _groups(inside, inside.opcode, shape.num_devices)
        name = inside.op_name or instruction.op_name or _name_of_parts(instruction, computation, program)
        chunks = len(groups[0]) if inside.opcode == "reduce-scatter" else 1
        found = _collective(fused.kind, name, tensors(inside.result), chunks, groups, shape)
        return found if fused.part in (START, WHOLE) else None
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    arrays = tensors(instruction.result)
    # (operands, results, context); an all-reduce's start has its operands from jax 0.12 on
    if kind != instruction.opcode and (kind != "all-reduce" or len(arrays) > len(instruction.operands)):
        real = [array for array in arrays if array != CONTEXT] or arrays
        arrays = real[len(real) // 2 :]
    groups = _groups(instruction, kind, shape.num_devices)
    name = instruction.op_name or _name_of_parts(instruction, computation, program)
    if not name and is_reduce_scatter(instruction, computation, program):
        name = "group_reduce_scatter"
    return _collective(kind, name, arrays, len(groups[0]) if kind == "reduce-scatter" else 1, groups, shape)


def _between_slices(send: Instruction, computation: Computation, shape: MeshShape) -> Collective | None:
    """Returns the collective that a `send` starts, if any. XLA loses its name, and its axes decide its label."""
    transfer, devices = slice_transfer(send, computation), range(shape.devices_per_node)
    if transfer is None:
        return None
    groups = [[node * len(devices) + i for node in nodes] for nodes in transfer.groups for i in devices]
    chunks = len(groups[0]) if transfer.kind == "reduce-scatter" else 1
    found = _collective(transfer.kind, "", tensors(transfer.received.result)[:1], chunks, groups, shape)
    return replace(found, label="replica_all_reduce" if found.axes == ("replica_inter",) else "")


def _collective(
    kind: str, name: str, arrays: Sequence[ArrayType], chunks: int, groups: Sequence[Sequence[int]], shape: MeshShape
) -> Collective:
    """Returns a collective whose payload is `chunks` times these arrays."""
    payload = chunks * sum(array.num_bytes for array in arrays)
    inter, intra = _sent(kind, payload, groups, shape)
    return Collective(
        kind=kind,
        label=_label(name),
        axes=_axes(groups, shape),
        dtype=max(arrays, key=lambda array: array.num_elements).dtype if arrays else "",
        num_elements=chunks * sum(array.num_elements for array in arrays),
        payload_bytes=round(payload),
        array_bytes=tuple(round(chunks * array.num_bytes) for array in arrays),
        inter_bytes=inter,
        intra_bytes=intra,
        group=tuple(groups[0]),
        group_nodes=max(len({device // shape.devices_per_node for device in group}) for group in groups),
        times=1,
        loop_depth=0,
    )


def _name_of_parts(instruction: Instruction, computation: Computation, program: Program) -> str:
    """Returns the name of collectives that XLA has combined, which the slices of the combined result still have."""
    users = computation.users
    done = [user for user in users.get(instruction.name, ()) if user.opcode.endswith("-done")] or [instruction]
    for user in (user for whole in done for user in users.get(whole.name, ()) if user.op_name):
        root = program.called(user.calls[0], user).root if user.opcode == "fusion" else user
        if root and root.opcode == "slice":
            return user.op_name
    return ""


def _label(op_name: str) -> str:
    """Returns the innermost of LABELS in the name that jax gave the operation."""
    return next((scope for scope in reversed(_scopes(op_name)) if scope in LABELS), "")


def _scopes(op_name: str) -> list[str]:
    """Returns the named scopes in the name that jax gave an operation, the outermost first."""
    return re.split(r"[/()]", op_name)


def _groups(instruction: Instruction, kind: str, num_devices: int) -> list[list[int]]:
    """Returns the replica groups as lists of device numbers, in the order in which XLA writes them."""
    if kind == "collective-permute":
        pairs = instruction.attributes.get("source_target_pairs", "")
        numbers = [int(n) for n in re.findall(r"\d+", pairs)]
        if not numbers:
            raise ValueError(f"{instruction} has no source_target_pairs")
        return [list(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
    text = instruction.attributes.get("replica_groups", "{}")
    explicit = re.fullmatch(r"\{(\{[\d,{}]*\})\}", text)
    if explicit:
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", explicit.group(1))]
    iota = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        return _iota(iota.group(2), iota.group(3)).reshape(_ints(iota.group(1))).tolist()
    ids = instruction.attributes.get("device_ids")
    named = re.fullmatch(
        r"(?:@?mesh)?\[?([^\]]*'=\d+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}",
        text if ids is None else f"{text}, device_ids={ids}",
    )
    if named:
        return _mesh_groups(*named.groups())
    if text != "{}":
        raise ValueError(f"{instruction} has replica groups that cannot be read: {text[:120]}")
    return [list(range(num_devices))]  # replica_groups={}: all devices


def _mesh_groups(axes: str, dims: str | None, transpose: str | None, grouped: str) -> list[list[int]]:
    """Reads `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`. A part of an axis is written `'b':(1)2`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = _iota(dims, transpose) if dims else np.arange(prod(sizes.values()))
    shape: list[int] = []
    wanted: dict[tuple[str, int], int] = {}
    parts = [
        (name, int(pre or 1), int(size or 0))
        for name, pre, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped)
    ]
    for name, size in sizes.items():
        cuts = sorted(
            {1, size} | {cut for n, pre, part in parts if n == name for cut in (pre, pre * (part or size // pre))}
        )
        for start, end in pairwise(cuts):
            wanted[name, start] = len(shape)
            shape.append(end // start)
    order = [wanted[name, pre] for name, pre, size in parts if (name, pre) in wanted and sizes[name] > 1]
    rest = [i for i in range(len(shape)) if i not in order]
    group_size = prod(shape[i] for i in order)
    return ids.reshape(shape).transpose(*rest, *order).reshape(-1, group_size).tolist()


def _iota(dims: str, transpose: str | None) -> np.ndarray:
    ids = np.arange(prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(transpose)) if transpose else ids


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _axes(groups: Sequence[Sequence[int]], shape: MeshShape) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of a group differ, outermost first."""
    sizes = tuple(shape.sizes.values())
    coordinates = [np.unravel_index(group, sizes) for group in groups]
    return tuple(axis for i, axis in enumerate(shape.sizes) if any(np.ptp(c[i]) for c in coordinates))


def _sent(kind: str, payload: float, groups: Sequence[Sequence[int]], shape: MeshShape) -> tuple[float, float]:
    """Returns the bytes that a device sends between nodes and inside its node, averaged over all devices.

    A program for several TPU slices lists its slice's groups only.
    """
    inter = intra = 0.0
    per_node = shape.devices_per_node
    devices = per_node * len({device // per_node for group in groups for device in group})
    for group in groups:
        size = len(group)
        if kind == "collective-permute":
            edges, per_edge = [group], payload
        elif kind.endswith("all-to-all"):
            edges, per_edge = permutations(group, 2), payload / size
        else:  # a ring over the group in its order
            edges = zip(group, [*group[1:], group[0]], strict=True)
            per_edge = payload * (size - 1) / size * (2 if kind == "all-reduce" else 1)
        crosses = [a // per_node != b // per_node for a, b in edges if a != b]
        inter += sum(crosses) * per_edge
        intra += (len(crosses) - sum(crosses)) * per_edge
    return inter / devices, intra / devices
