"""Time of a day without training: checkpoints, snapshots, validations, failures and the start.

Everything follows from the bytes of the state, the seconds of the step, the config's intervals and planner/rates.csv.
A checkpoint stops training for the copy to the hosts. It is written while training continues; only if that takes longer
than the interval does the next one wait (elastic/checkpointer.py). Data is read ahead, and delays nothing unless
reading takes longer than a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import jax
import numpy as np

from configs.schema.sections import AUTOMATIC, SNAPSHOT_SHARE
from input_pipeline import row_arrays
from planner.bounds import forward_share
from planner.predict import ReplayableStep
from planner.spot import FROM_CHECKPOINT_S, LEFT_S, world_of
from planner.table import table_rows
from sharding.spec import nbytes
from sharding.state import by_name
from training.metrics.units import format_bytes, format_percent, format_seconds

DAY_S = 86_400.0
STORED = 4  # upper bound of a token's bytes in storage; a pixel takes about one


@dataclass(frozen=True, kw_only=True)
class Downtime:
    """A cause that stops training for `each_s`, several times per day."""

    name: str
    times: float
    each_s: float
    about: str

    @property
    def day_s(self) -> float:
        """Seconds per day."""
        return self.times * self.each_s


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The saved state, and the rates of copying, writing and reading it."""

    state_bytes: float  # size of a checkpoint, including the parts that each replica has separately
    device_bytes: float  # part on one device
    storage_bandwidth: float  # bytes/s of writing or reading, all nodes together
    copy_bandwidth: float  # bytes/s from a device to its host
    base_bytes: float  # size of a frozen base's files in 16 bits, read by all replicas at each start

    @property
    def base_s(self) -> float:
        """Seconds for a start to read the base."""
        return self.base_bytes / self.storage_bandwidth

    @property
    def written_s(self) -> float:
        """Seconds to write a checkpoint during training. A restore reads for the same time."""
        return self.state_bytes / self.storage_bandwidth

    @property
    def copied_s(self) -> float:
        """Seconds for which the copy to the host stops training."""
        return self.device_bytes / self.copy_bandwidth


def kept_of(step: ReplayableStep) -> Kept:
    """Returns the saved state of a planned step. The devices of an emulated cluster share their rates."""
    state, cluster = step.experiment.state_shapes, step.machine.cluster
    frozen = by_name(state.frozen)  # is not saved
    rows = [row for row in table_rows(step.experiment) if row.name not in frozen]
    together, model = step.machine.num_devices if cluster.device.is_shared else 1, step.experiment.model
    return Kept(
        state_bytes=sum(map(nbytes, jax.tree.leaves(state.checkpoint_state))),
        device_bytes=sum(row.device_bytes[0] + row.device_bytes[2] for row in rows),
        storage_bandwidth=cluster.storage_bandwidth,
        copy_bandwidth=cluster.device.copy_bandwidth / together,
        base_bytes=2.0 * (model.num_params - model.num_trained) * step.experiment.plan.layout.num_replicas,
    )


def snapshot_interval(step: ReplayableStep, step_s: float) -> int:
    """Returns the number of steps between two snapshots in memory, 0 for none."""
    every = step.experiment.config.elastic.snapshot_every
    return max(1, ceil(kept_of(step).copied_s / (SNAPSHOT_SHARE * step_s))) if every == AUTOMATIC else every


def losses(step: ReplayableStep, step_s: float) -> tuple[Downtime, ...]:
    """Returns the losses per day of planned steps."""
    config, nodes, kept = step.experiment.config, step.machine.nodes, kept_of(step)
    every, snapshot_every, evaluation = config.checkpoint.every, snapshot_interval(step, step_s), config.eval
    read, *_ = row_arrays(config.data).values()  # targets and weights are derived from it
    data = config.batch.global_size * prod(read.shape) * (STORED if read.dtype == np.int32 else 1)
    forward_s = step_s * forward_share(step.experiment)
    waits_s = max(0.0, kept.written_s - every * step_s)
    written = f"{format_bytes(kept.state_bytes)}, written in {format_seconds(kept.written_s)} beside the steps"
    found = [  # name, interval in steps, seconds of each
        ("checkpoints", every, kept.copied_s + waits_s, written),
        ("snapshots", snapshot_every, kept.copied_s, f"{format_bytes(kept.device_bytes)} of each device, at most"),
        ("validations", evaluation.every, evaluation.num_batches * forward_s, f"{evaluation.num_batches} batches"),
        (
            "data",
            1,
            max(0.0, data / kept.storage_bandwidth - step_s),
            f"about {format_bytes(data)} a step, read ahead",
        ),
    ]
    failure = _failure(step, step_s, snapshot_every, kept)
    failures = step.machine.cluster.failures * nodes
    start_s = FROM_CHECKPOINT_S + kept.base_s
    rest_s = max(0.0, DAY_S - failures * failure.each_s - start_s)
    steps = rest_s / (step_s + sum(each_s / interval for _, interval, each_s, _ in found if interval))
    return (
        *(
            Downtime(
                name=name,
                times=steps / interval if interval else 0.0,
                each_s=each_s,
                about=f"every {interval} steps: {about}" if interval > 1 else about if interval else "none",
            )
            for name, interval, each_s, about in found
        ),
        replace(failure, times=failures),
        Downtime(
            name="the start", times=1.0, each_s=start_s, about=f"imports, compilation: a small model's{_base(kept)}"
        ),
    )


def _base(kept: Kept) -> str:
    return f"; the base: {format_bytes(kept.base_bytes)}" if kept.base_bytes else ""


def _failure(step: ReplayableStep, step_s: float, snapshot_every: int, kept: Kept) -> Downtime:
    """Returns the cost of a failed node: detection, restart, and half an interval's steps again."""
    config = step.experiment.config
    in_memory = snapshot_every > 0 and world_of(step, step_s, snapshot_every).survives(1)
    every = snapshot_every if in_memory else config.checkpoint.every
    repeated_s = every * step_s / 2 if every else DAY_S / 2
    restart_s = kept.base_s + (LEFT_S if in_memory else FROM_CHECKPOINT_S + kept.written_s)
    source = "memory" if in_memory else "a checkpoint" if every else "the first step"
    about = f"silence, restart from {source}, {format_seconds(repeated_s)} of steps again"
    each_s = config.elastic.silence_s + restart_s + repeated_s
    return Downtime(name="failures", times=1.0, each_s=each_s, about=about)


def day_rows(found: Sequence[Downtime]) -> list[Sequence[str]]:
    """Returns the names of the columns, a row for each loss, and a row for the time left for training."""
    rows: list[Sequence[str]] = [("", "about", "times", "each", "a day", "share")]
    for loss in found:
        times = f"{loss.times:,.2g}" if loss.times < 10 else f"{loss.times:,.0f}"
        share = format_percent(loss.day_s / DAY_S)
        rows.append((loss.name, loss.about, times, format_seconds(loss.each_s), format_seconds(loss.day_s), share))
    left_s = max(0.0, DAY_S - sum(loss.day_s for loss in found))
    return [*rows, ("training", "", "", "", format_seconds(left_s), format_percent(left_s / DAY_S))]
