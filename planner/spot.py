"""Replays a run on spot nodes that come and go: hours, dollars, and the useful part of the time.

A trace has the number of nodes over time. The run uses the largest planned world (`--nodes=4,8,16`) that fits, as an
elastic run does; with fewer nodes than the smallest world it waits. Spare nodes leave first. A step takes its predicted
time, a change of the world pauses the run, and a lost node returns it to a snapshot in the nodes' memory, or to the
checkpoint if memory may be lost. Left out: the cost of snapshots and checkpoints in calm times, changing prices, and
the first start.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import floor, isfinite
from pathlib import Path

import jax

from configs.schema import Config, ImageConfig
from planner.clusters import Cluster
from planner.predict import ReplayableStep
from sharding.mesh import inter_part
from sharding.replicas import replica_key
from training.metrics.units import format_count, format_percent, format_seconds

# Seconds without training after an event, on 4 emulated nodes with a model of 6.4 M parameters: medians of
# elastic.jsonl (docs/results/elasticity_measured.md). Most are compilation and imports; a large model's state takes
# longer.
LEFT_S = 20.3  # announced preemption of a node, pause
JOINED_S = 24.0  # a node joins, pause
FROM_CHECKPOINT_S = 37.8  # all nodes killed, from the first kill to the next step
ROUNDING = 1e-6  # steps
FORMAT = "give a CSV with the columns seconds,nodes"


@dataclass(frozen=True)
class CapacityChange:
    """A number of nodes, from `start_s` on."""

    start_s: float
    nodes: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Changes in their order, the first at 0 s. The trace repeats after `length_s`."""

    changes: tuple[CapacityChange, ...]
    length_s: float

    def endless(self) -> Iterator[tuple[float, float, int]]:
        """Yields (start, end, nodes), again and again."""
        ends = [*(change.start_s for change in self.changes[1:]), self.length_s]
        for n in count():
            for change, end_s in zip(self.changes, ends, strict=True):
                yield n * self.length_s + change.start_s, n * self.length_s + end_s, change.nodes


def read_trace(path: Path) -> Trace:
    """Returns the trace of a CSV with the columns seconds and nodes; lines that begin with # are comments.

    The last line ends the trace, and has the nodes of the line before. ValueError says what is wrong.
    """
    try:
        points = _points(path.read_text())
    except OSError as error:
        raise ValueError(f"--spot_trace={path} cannot be read ({error.strerror}); {FORMAT}") from error
    except UnicodeError as error:
        raise ValueError(f"--spot_trace={path} cannot be read (it is not text); {FORMAT}") from error
    except ValueError as error:
        raise ValueError(f"--spot_trace={path}: {error}; {FORMAT}") from error
    changes = [CapacityChange(*points[0])]
    for time_s, nodes in points[1:-1]:
        changes += [CapacityChange(time_s, nodes)] if nodes != changes[-1].nodes else []
    return Trace(changes=tuple(changes), length_s=points[-1][0])


def _points(text: str) -> list[tuple[float, int]]:
    """Returns the seconds and nodes of a CSV's lines. ValueError if they are not a trace."""
    rows = list(csv.reader(line for line in text.splitlines() if line.strip() and not line.startswith("#")))
    if not rows or [cell.strip() for cell in rows[0]] != ["seconds", "nodes"]:
        raise ValueError("the first line is not seconds,nodes")
    points = []
    for row in rows[1:]:
        try:
            seconds, nodes = row
            points.append((float(seconds), int(nodes)))
        except ValueError:
            raise ValueError(f"{','.join(row)!r} is not a line of seconds,nodes") from None
        if not isfinite(points[-1][0]) or points[-1][1] < 0:
            raise ValueError(f"{','.join(row)!r} is not a line of seconds,nodes")
    times = [time_s for time_s, _ in points]
    if len(points) < 2 or times[0] != 0 or any(b <= a for a, b in pairwise(times)):
        raise ValueError("seconds must begin at 0 and increase, in two lines at least")
    if points[-1][1] != points[-2][1]:
        raise ValueError("the last line only ends the trace: it must repeat the number of nodes of the line before")
    return points


@dataclass(frozen=True, kw_only=True)
class UsableNodes:
    """A number of nodes that a run can use."""

    nodes: int
    step_s: float
    whole_copies: int  # copies of the state on disjoint nodes: 1 if all nodes are needed for one copy
    snapshot_every: int = 1  # steps; 0 for none

    def survives(self, lost: int) -> bool:
        """Whether the nodes' memory still has the state after any `lost` nodes are lost.

        With several whole copies one must be untouched; with a single copy each node also has its partner's part.
        """
        return lost < self.nodes and lost <= max(1, self.whole_copies - 1)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The length of a run, and its interval of checkpoints."""

    steps: int
    tokens: float  # tokens of all steps
    checkpoint_every: int  # steps; 0 for none


def world_of(step: ReplayableStep, step_s: float, snapshot_every: int) -> UsableNodes:
    """Returns the world of a planned step. Each copy of the state takes the nodes that shard it.

    State that differs between replicas (residuals, local parameters) means a single copy over all nodes.
    """
    layout, nodes = step.experiment.plan.layout, step.machine.nodes
    copies = nodes // layout.shape.size(inter_part(layout.optimizer))
    paths = (path for path, _ in jax.tree.leaves_with_path(step.experiment.state_shapes.chain))
    copies = 1 if any(map(replica_key, paths)) else copies
    return UsableNodes(nodes=nodes, step_s=step_s, whole_copies=copies, snapshot_every=snapshot_every)


def run_of(config: Config) -> PlannedRun:
    """Returns the run of a config. ValueError without tokens."""
    if isinstance(config.model, ImageConfig):
        raise ValueError("--spot_trace counts tokens; give the config of a language model")
    return PlannedRun(
        steps=config.num_steps,
        tokens=float(config.num_steps * config.batch.global_size * config.data.seq_len),
        checkpoint_every=config.checkpoint.every,
    )


@dataclass(frozen=True, kw_only=True)
class SpotCost:
    """The run on spot nodes. The four parts of the time add up to `total_s`. Dollars are None without a price."""

    total_s: float
    useful_s: float  # steps that were kept
    lost_s: float  # repeated and interrupted steps
    restart_s: float
    waiting_s: float  # too few nodes
    node_s: float  # paid: up to the largest world's nodes, whether they train, wait or restart
    losses: int  # times that nodes of the run were lost
    from_checkpoint: int  # losses after which the nodes' memory was incomplete
    tokens: float
    fixed_s: float  # the same run on the largest world with on-demand nodes
    fixed_node_s: float
    usd: float | None
    fixed_usd: float | None

    @property
    def goodput(self) -> float:
        """The useful fraction of the time."""
        return self.useful_s / self.total_s

    @property
    def break_even(self) -> float:
        """The spot price, as a fraction of the on-demand price, below which spot nodes are cheaper."""
        return self.fixed_node_s / self.node_s


def replay_spot(
    trace: Trace,
    worlds: Sequence[UsableNodes],
    run: PlannedRun,
    *,
    spot_usd: float | None = None,
    on_demand_usd: float | None = None,
) -> SpotCost:
    """Returns the cost of a run on the nodes of a trace, at hourly prices. ValueError if it makes no progress."""
    worlds = sorted(worlds, key=lambda world: world.nodes)
    largest = worlds[-1]
    book = _Book(run)
    round_, before = 0, 0.0  # rounds of the trace, and the steps done after the last one
    for start_s, end_s, there in trace.endless():
        if start_s >= (round_ + 1) * trace.length_s:
            if book.done <= before:
                raise ValueError(f"the run makes no progress on this trace: step {book.done:.0f} of {run.steps}")
            round_, before = round_ + 1, book.done
        world = next((world for world in reversed(worlds) if world.nodes <= there), None)
        book.change(there, world)
        used_s = book.spend(start_s, end_s, world)
        book.node_s += used_s * min(there, largest.nodes)
        if book.done >= run.steps:
            break
    fixed_s = run.steps * largest.step_s
    return SpotCost(
        total_s=book.useful_s + book.lost_s + book.restart_s + book.waiting_s,
        useful_s=book.useful_s,
        lost_s=book.lost_s,
        restart_s=book.restart_s,
        waiting_s=book.waiting_s,
        node_s=book.node_s,
        losses=book.losses,
        from_checkpoint=book.from_checkpoint,
        tokens=run.tokens,
        fixed_s=fixed_s,
        fixed_node_s=fixed_s * largest.nodes,
        usd=None if spot_usd is None else spot_usd * book.node_s / 3600,
        fixed_usd=None if on_demand_usd is None else on_demand_usd * fixed_s * largest.nodes / 3600,
    )


def planned_cost(trace: Trace, worlds: Sequence[UsableNodes], config: Config, cluster: Cluster) -> SpotCost:
    """Returns the cost of a config's run in planned worlds."""
    return replay_spot(trace, worlds, run_of(config), spot_usd=cluster.spot, on_demand_usd=cluster.on_demand)


class _Book:
    """Steps done and time spent. Unsaved steps are stored with their seconds."""

    def __init__(self, run: PlannedRun) -> None:
        self.done = 0.0  # steps
        self.useful_s = self.lost_s = self.restart_s = self.waiting_s = self.node_s = 0.0
        self.losses = self.from_checkpoint = 0
        self._run = run
        self._there = 0
        self._world: UsableNodes | None = None  # now
        self._last: UsableNodes | None = None  # the last world that trained
        self._in_memory = False  # whether the present nodes have the state
        self._pause_s = 0.0
        self._pieces: list[tuple[float, float, float]] = []  # (first step, last step, seconds of each)

    def change(self, there: int, world: UsableNodes | None) -> None:
        """Records the current number of nodes, and that the run continues in `world`, or waits."""
        old, last, fewer = self._world, self._last, there < self._there
        self._there, self._world = there, world
        if fewer and old and there < old.nodes:
            self.losses += 1
        if fewer and last and self._in_memory and there < last.nodes:
            self._in_memory = last.snapshot_every > 0 and last.survives(last.nodes - there)
            self.from_checkpoint += not self._in_memory
            every = last.snapshot_every if self._in_memory else self._run.checkpoint_every
            if old or not self._in_memory:
                self._back(floor(self.done + ROUNDING) // every * every if every else 0)
        if world and last and world != old:
            shrinks = old and world.nodes < old.nodes
            self._pause_s = (LEFT_S if shrinks else JOINED_S) if self._in_memory else FROM_CHECKPOINT_S

    def spend(self, start_s: float, end_s: float, world: UsableNodes | None) -> float:
        """Lets the time pass until `end_s` or until the run is done; returns the seconds."""
        left_s = end_s - start_s
        if not world:
            self.waiting_s += left_s
            return left_s
        pause_s = min(self._pause_s, left_s)
        self._pause_s -= pause_s
        self.restart_s += pause_s
        last = min(self.done + (left_s - pause_s) / world.step_s, self._run.steps)
        if last > self.done:
            train_s = (last - self.done) * world.step_s
            self._in_memory, self._last = True, world
            self._pieces.append((self.done, last, world.step_s))
            self.done, self.useful_s = last, self.useful_s + train_s
            return pause_s + train_s
        return pause_s

    def _back(self, to: float) -> None:
        """Takes the run back to a step: the seconds of the later ones were lost."""
        while self._pieces and self._pieces[-1][1] > to:
            first, last, step_s = self._pieces.pop()
            kept = max(first, to)
            self.useful_s -= (last - kept) * step_s
            self.lost_s += (last - kept) * step_s
            if kept > first:
                self._pieces.append((first, kept, step_s))
        self.done = to


# ------------------------------------------------------------------------------------------------ text


def spot_text(cost: SpotCost, source: str) -> str:
    """Returns the printed text about a run on spot nodes."""
    parts = {"useful": cost.useful_s, "lost work": cost.lost_s, "restarts": cost.restart_s, "waiting": cost.waiting_s}
    spent = ", ".join(f"{name} {format_seconds(s)} ({format_percent(s / cost.total_s)})" for name, s in parts.items())
    total = f"{format_count(cost.tokens)} tokens in {format_seconds(cost.total_s)}"
    lines = [
        f"on spot nodes, {source}: {total}{_dollars(cost.usd, cost)}",
        f"  goodput {format_percent(cost.goodput)}: {spent}",
        f"  losses of the run's nodes: {cost.losses}, back to a checkpoint: {cost.from_checkpoint}",
        f"on demand, never interrupted: {format_seconds(cost.fixed_s)}{_dollars(cost.fixed_usd, cost)}",
        f"spot nodes are cheaper below {format_percent(cost.break_even)} of the price on demand",
    ]
    return "\n".join(lines)


def other_strategies(steps: Sequence[ReplayableStep]) -> str:
    """Returns a line if the planned strategies differ between worlds, which is impossible within a run, else ""."""
    names = {step.machine.nodes: step.candidate.name for step in steps}
    if len({*names.values()}) == 1:
        return ""
    each = ", ".join(f"{name} on {nodes}" for nodes, name in names.items())
    return f"\nthe worlds differ by strategy ({each} nodes), which no run changes when it restarts; give one --strategy"


def _dollars(usd: float | None, cost: SpotCost) -> str:
    return "" if usd is None else f", {usd:,.0f} $ ({usd / cost.tokens * 1e9:,.0f} $/Gtoken)"
