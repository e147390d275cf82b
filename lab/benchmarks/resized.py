"""A compiled step for another number of replicas: the same program, but for who takes part in its collectives.

With partition groups of a fixed size nothing that a device holds or computes depends on how many groups there are. What
does is rewritten in the program's text: the replica groups, and how many micro-steps a step has. The replayed step is
that of a program compiled for as many (tests/test_paper_full_scale.py, up to 1e-6). Temporaries stay as they were, with
the copies of the larger batch of fewer replicas.
"""

import re
from dataclasses import replace

from planner.compile import CompiledStep
from sharding.mesh import MeshShape

_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[(\d+)(,[\d,]+\]T\([\d,]+\)\)))?")


def resized(step: CompiledStep, *, replicas: int, accumulation: tuple[int, int], batch_bytes: float) -> CompiledStep:
    """Returns the step for `replicas` partition groups of whole nodes, with `accumulation` (before, after) micro-steps.

    `batch_bytes` are those of the step's batch on a device. ValueError if the program cannot be rewritten: it has one
    group, groups inside nodes, or, if their number changes, not exactly one loop over the micro-steps.
    """
    old, (before, after) = step.shape, accumulation
    if old.replica_inter < 2 or old.replica_intra > 1:
        raise ValueError("only a program with several partition groups of whole nodes can be resized")
    text = step.text if before == after else _with_micro_steps(step.text, before, after)
    text = _GROUPS.sub(lambda found: f"replica_groups={{{_regrouped(found[1], old, replicas)}}}", text)
    text = _NAMED.sub(lambda found: _renamed(found, old, replicas), text)
    return replace(
        step,
        text=text,
        shape=replace(old, replica_inter=replicas),
        argument_bytes=step.argument_bytes + round(batch_bytes * (after / before - 1)),
    )


def _with_micro_steps(text: str, before: int, after: int) -> str:
    """Returns a program with another number of rounds of the loop over the micro-steps."""
    for peeled in (1, 0):  # the first micro-step may stand before the loop
        loop = f'"known_trip_count":{{"n":"{before - peeled}"}}'
        if text.count(loop) == 1:
            return text.replace(loop, loop.replace(str(before - peeled), str(after - peeled)))
    raise ValueError(f"not one loop of {before - 1} or {before} rounds: which one goes over the micro-steps?")


def _regrouped(text: str, old: MeshShape, replicas: int) -> str:
    """Returns replica groups, `{0,8},{1,9},...`, for another number of partition groups."""
    groups = [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]
    size = old.num_devices // old.replica_inter  # devices are numbered partition group by partition group
    heads = [[n for n in group if n < size] for group in groups if group[0] < size]

    def rebuilt(count: int, across: bool) -> list[list[int]]:
        if across:
            return [[r * size + n for r in range(count) for n in head] for head in heads]
        return [[r * size + n for n in head] for r in range(count) for head in heads]

    across = any(group[-1] >= size for group in groups if group[0] < size)
    if sorted(rebuilt(old.replica_inter, across)) != sorted(groups):
        raise ValueError(f"replica groups of a kind that is not known: {text[:80]}")
    return ",".join("{" + ",".join(map(str, group)) + "}" for group in rebuilt(replicas, across))


def _renamed(found: re.Match[str], old: MeshShape, replicas: int) -> str:
    """Returns replica groups by names of axes, `mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0))`."""
    axes, first, rest = found.groups()
    sizes = [int(n) for n in re.findall(r"=(\d+)", axes)]
    changed = {old.num_devices: old.num_devices // old.replica_inter * replicas, old.replica_inter: replicas}
    which = next((n for n in changed if n in sizes and (n == old.num_devices or first is not None)), None)
    if which is None or (first is not None and int(first) != old.replica_inter):
        raise ValueError(f"replica groups of a kind that is not known: {found[0][:80]}")
    at = len(sizes) - 1 - sizes[::-1].index(which)  # replicas come last
    sizes[at] = changed[which]
    names = re.findall(r"'([^']+)'", axes)
    mesh = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    ids = f", device_ids=([{replicas}{rest}" if first is not None else ""
    return f"replica_groups=mesh[{mesh}]{ids}"
