"""The layout of a batch: the distribution of the rows of the global batch over devices, `[accum, rows, ...]`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
from jax.sharding import NamedSharding

from configs.schema import BatchConfig, Config
from input_pipeline import Batches, row_arrays
from input_pipeline.index import RowArray
from input_pipeline.noise import RowData, noise_arrays
from sharding.plan import ShardingPlan


def accumulation(config: BatchConfig, num_devices: int) -> int:
    """Returns the micro-steps per step on `num_devices` data devices: as few as `micro_size` allows."""
    return -(-config.global_size // (num_devices * config.micro_size))


def padding(config: BatchConfig, num_devices: int) -> list[str]:
    """Returns a line about the rows of weight zero that pad a step on `num_devices` data devices, if any."""
    micro, steps = config.micro_size, accumulation(config, num_devices)
    rows, computed = config.global_size, num_devices * micro * steps
    taken = f"{num_devices:,} devices take {micro} in each of {steps} micro-step{'s' if steps > 1 else ''}"
    about = (
        f"{computed - rows:,} of {computed:,} rows of a step are padding: the batch has {rows:,}, and {taken}; choose "
        f"a micro-batch or a number of nodes that divides them, or in a new run batch.global_size={computed}"
    )
    return [about] if computed > rows else []


def shares_of(batch: BatchConfig, wanted: int, num_devices: int) -> int:
    """Returns the work units of a step for replicas of `num_devices` data devices. `wanted` = 0: one micro-step each.

    ValueError if the rows of a step cannot be divided in this way.
    """
    rows = batch.micro_size * num_devices
    shares = wanted or batch.global_size // rows
    if not shares or batch.global_size % (shares * rows):
        raise ValueError(
            f"batch.global_size={batch.global_size} cannot be divided into {shares or 'whole'} shares of micro-steps "
            f"of {rows} rows ({num_devices} devices with batch.micro_size={batch.micro_size}); choose another "
            f"batch.micro_size or sharding.shares, or in a new run a multiple of {max(shares, 1) * rows} rows"
        )
    return shares


def fitted(config: BatchConfig, num_devices: int, multiple: int = 1) -> BatchConfig:
    """Returns the batch with `micro_size` set to the rows of each of `num_devices` data devices in a micro-step.

    The result is the least multiple of `multiple` that needs no more micro-steps than the given `micro_size`, which
    must also be a multiple. It equals the given `micro_size` if that divides the batch.
    """
    pieces = num_devices * accumulation(config, num_devices) * multiple
    return replace(config, micro_size=multiple * -(-config.global_size // pieces))


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """The rows of a global batch on the devices: `accumulation` micro-steps, each with rows for every data device."""

    config: BatchConfig
    plan: ShardingPlan
    row_arrays: Mapping[str, RowArray]  # arrays of one row, by name

    @property
    def accumulation(self) -> int:
        """Micro-steps per step."""
        return accumulation(self.config, self.plan.layout.shape.num_data_devices)

    @property
    def global_size(self) -> int:
        """Rows per step, without padding rows (of weight zero)."""
        return self.config.global_size

    @property
    def described(self) -> list[str]:
        """Notes about settings that a user may want to change."""
        return padding(self.config, self.plan.layout.shape.num_data_devices)

    @property
    def rows_per_micro_step(self) -> int:
        """Rows per micro-step on all devices together."""
        return self.config.micro_size * self.plan.layout.shape.num_data_devices

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of batch arrays `[accum, rows, ...]`."""
        return NamedSharding(self.plan.mesh, self.plan.batch_spec)

    @cached_property
    def local_rows(self) -> list[int]:
        """The rows of the padded global batch on this process' devices, in ascending order."""
        shape = next(iter(self.shapes.values())).shape
        columns = {
            row
            for _, rows, *_ in self.sharding.addressable_devices_indices_map(shape).values()  # pyright: ignore[reportGeneralTypeIssues]
            for row in range(*rows.indices(shape[1]))
        }
        return [a * shape[1] + row for a in range(shape[0]) for row in sorted(columns)]

    @cached_property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of a batch's arrays."""
        rows = (self.accumulation, self.rows_per_micro_step)
        return {
            name: jax.ShapeDtypeStruct(rows + array.shape, array.dtype, sharding=self.sharding)
            for name, array in self.row_arrays.items()
        }

    def read(self, dataset: RowData, start_step: int, *, prefetch: int) -> Batches:
        """Returns this process' rows of the batches, starting at a step."""
        return Batches(
            dataset,
            global_size=self.global_size,
            rows=self.local_rows,
            start_step=start_step,
            prefetch=prefetch,
        )

    def to_devices(self, rows: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns global arrays `[accum, rows, ...]` from this process' rows (`local_rows`)."""
        return {
            name: jax.make_array_from_process_local_data(
                self.sharding, x.reshape(self.accumulation, -1, *x.shape[1:]), self.shapes[name].shape
            )
            for name, x in rows.items()
        }


def batches_of(config: Config, plan: ShardingPlan) -> tuple[BatchLayout, int]:
    """Returns the layout of a step's batch and 1; with independent replicas a work unit's layout and their number.

    ValueError if the rows of a step cannot be divided into work units, or leave a replica of local SGD without rows.
    """
    batch, num_devices, num_shares = config.batch, plan.layout.shape.num_data_devices, 1
    if config.sharding.replicas == "independent":
        num_shares = shares_of(batch, config.sharding.shares, num_devices)
        batch = replace(batch, global_size=batch.global_size // num_shares)
    batch = fitted(batch, num_devices, config.rows_together)
    found = BatchLayout(config=batch, plan=plan, row_arrays=row_arrays(config.data) | noise_arrays(config))
    if config.local_sgd.inner_steps and num_shares == 1:
        _refuse_idle(found)
    return found, num_shares


def _refuse_idle(batches: BatchLayout) -> None:
    """Raises ValueError if a replica has no rows in any step, because a local SGD sync would still count it."""
    replicas, rows = batches.plan.layout.num_replicas, batches.rows_per_micro_step
    busy = -(-batches.global_size * replicas // rows) if batches.accumulation == 1 else replicas
    if busy < replicas:
        raise ValueError(
            f"batch.global_size={batches.global_size} leaves {replicas - busy} of {replicas} replicas without rows, "
            f"and local_sgd gives each the same weight; choose larger partition groups (sharding.strategy=hsdp, or "
            f"mics with a larger sharding.partition_size) or fewer nodes, or in a new run batch.global_size={rows}"
        )
