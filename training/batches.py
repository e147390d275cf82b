"""The geometry of a batch: rows of the global batch on the devices that there are, `[accum, rows, ...]`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import NamedSharding

from configs.schema import BatchConfig
from input_pipeline.rows import RowArray
from sharding.plan import ShardingPlan


def accumulation(config: BatchConfig, num_devices: int) -> int:
    """Returns the micro-steps of a step on `num_devices` data devices. ValueError if micro-batches stay empty."""
    most = -(-config.global_size // num_devices)
    if config.micro_size > most:
        raise ValueError(
            f"batch.micro_size={config.micro_size} on {num_devices} devices is more than batch.global_size="
            f"{config.global_size} has; at most {most} fit"
        )
    return -(-config.global_size // (num_devices * config.micro_size))


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Where the rows of a global batch lie: `accumulation` micro-steps, each with rows for every data device."""

    config: BatchConfig
    plan: ShardingPlan
    row_arrays: Mapping[str, RowArray]  # of one row, by name
    accumulation: int  # micro-steps of a step

    @property
    def global_size(self) -> int:
        """Rows of a step, without those of weight zero that fill up."""
        return self.config.global_size

    @property
    def rows_per_micro_step(self) -> int:
        """Rows of one micro-step over all devices."""
        return self.config.micro_size * self.plan.layout.shape.num_data_devices

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of batch arrays `[accum, rows, ...]`."""
        return NamedSharding(self.plan.mesh, self.plan.batch_spec)

    @cached_property
    def local_rows(self) -> list[int]:
        """Rows of the (padded) global batch that the devices of this process own, in their order."""
        shape = (self.accumulation, self.rows_per_micro_step)
        columns = {
            row
            for _, rows in self.sharding.addressable_devices_indices_map(shape).values()  # pyright: ignore[reportGeneralTypeIssues]
            for row in range(*rows.indices(shape[1]))
        }
        return [a * shape[1] + row for a in range(shape[0]) for row in sorted(columns)]

    @cached_property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch, sharded."""
        rows = (self.accumulation, self.rows_per_micro_step)
        return {
            name: jax.ShapeDtypeStruct(rows + array.shape, array.dtype, sharding=self.sharding)
            for name, array in self.row_arrays.items()
        }

    def to_devices(self, rows: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Puts this process' rows (those of `local_rows`) where they belong: global arrays `[accum, rows, ...]`."""
        return {
            name: jax.make_array_from_process_local_data(
                self.sharding, x.reshape(self.accumulation, -1, *x.shape[1:]), self.shapes[name].shape
            )
            for name, x in rows.items()
        }
