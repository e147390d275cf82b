"""This process' rows of each step, prefetched in the background: steps in order by Grain, work units in any order."""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import grain
import numpy as np

from input_pipeline.noise import RowData

HostBatch = dict[str, np.ndarray]


class Batches:
    """Yields the arrays of `dataset.row_arrays` by name for each step, with a leading dim of `len(rows)`.

    Row `r` of step `t` is `dataset[t * global_size + r]`, so the rows of all processes together do not depend on the
    number of processes. Rows >= `global_size` are padding: zeros with weight zero.

    `wait_s` is the number of seconds spent waiting for the last batch. `step` is the step that the next call returns.
    `next()` raises the exceptions of the background work and closes the iterator.
    """

    def __init__(
        self,
        dataset: RowData,
        *,
        global_size: int,
        rows: Sequence[int],
        start_step: int,
        prefetch: int,
    ) -> None:
        self.step = start_step
        self.wait_s = 0.0
        self._dataset, self._global_size = dataset, global_size
        self._rows = tuple(int(row) for row in rows)
        options = grain.ReadOptions(num_threads=min(prefetch, dataset.threads), prefetch_buffer_size=prefetch)
        steps = grain.MapDataset.range(start_step, sys.maxsize).map(self._batch)  # the end is not known here
        self._iterator = iter(steps.to_iter_dataset(options))
        self._iterator.start_prefetch()
        self._ready: list[HostBatch] = []  # the next batch, if `await_next` has taken it already

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> HostBatch:
        self.await_next()
        self.step += 1
        return self._ready.pop()

    def await_next(self) -> None:
        """Waits until the next batch is ready. Raises the exceptions that `next()` would raise."""
        if self._ready:
            return
        start = time.perf_counter()
        try:
            self._ready.append(next(self._iterator))
        except BaseException as error:
            error.add_note(f"while preparing the batch of step {self.step}")
            self.close()
            raise
        self.wait_s = time.perf_counter() - start

    def close(self) -> None:
        """Stops the background work; later calls of `next()` raise ValueError."""
        self._ready.clear()
        self._iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batch(self, step: int) -> HostBatch:
        return batch_at(self._dataset, step, global_size=self._global_size, rows=self._rows)


class UnitBatches:
    """The batches of a run whose steps consist of `num_units` work units each, of which a program computes a few.

    A unit is the step `step * num_units + unit` of `batch_at`. After each unit the same unit of the next step is read
    in the background, because a program computes the same units again as long as no other program joins or leaves.
    """

    def __init__(
        self, dataset: RowData, *, num_units: int, global_size: int, rows: Sequence[int], start_step: int, prefetch: int
    ) -> None:
        """`global_size` and `rows` are of a unit. Begins to read the first unit of `start_step`."""
        self._dataset, self._num_units = dataset, num_units
        self._about = {"global_size": global_size, "rows": rows, "threads": min(prefetch, dataset.threads)}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="units")
        self._batches: dict[int, Future[HostBatch]] = {}
        self._first = self._begin_reading(start_step * num_units)

    def await_first(self) -> None:
        """Waits until the first batch is there; raises errors of reading it."""
        self._first.result()

    def get(self, step: int, unit: int) -> HostBatch:
        """Returns the batch of a unit, and begins to read the same unit of the next step."""
        index = step * self._num_units + unit
        batch = self._begin_reading(index)
        self._begin_reading(index + self._num_units)
        self._batches = {at: each for at, each in self._batches.items() if at >= index - self._num_units}
        return batch.result()

    def close(self) -> None:
        """Stops the background work."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _begin_reading(self, index: int) -> "Future[HostBatch]":
        if index not in self._batches:
            self._batches[index] = self._reader.submit(batch_at, self._dataset, index, **self._about)
        return self._batches[index]


def batch_at(
    dataset: RowData,
    step: int,
    *,
    global_size: int,
    rows: Sequence[int],
    end: int = sys.maxsize,
    threads: int = 1,
) -> HostBatch:
    """Returns the arrays of one step, as `Batches` does. Up to `threads` threads read the rows.

    Rows of examples >= `end` are padding too.
    """
    first = step * global_size
    batch = {name: np.zeros((len(rows), *array.shape), array.dtype) for name, array in dataset.row_arrays.items()}

    def read(place: int, row: int) -> None:
        if row < global_size and first + row < end:
            for name, value in dataset[first + row].items():
                batch[name][place] = value

    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(len(rows)), rows))  # raises the exceptions of the threads
    else:
        for place, row in enumerate(rows):
            read(place, row)
    return batch
