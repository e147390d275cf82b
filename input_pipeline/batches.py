"""This process' rows of each step, prefetched in the background by Grain."""

import sys
import time
from collections.abc import Sequence
from typing import Self

import grain
import numpy as np

from input_pipeline.dataset import Dataset

Batch = dict[str, np.ndarray]


class Batches:
    """Yields for each step the arrays of `dataset.row_arrays` by name, with a leading dim of `len(rows)`.

    Row `r` of step `t` is `dataset[t * global_size + r]`, so the rows of all processes together do not depend on the
    number of processes. Rows >= `global_size` are padding: zeros, with weight zero. The same holds for rows of examples
    >= `end`.

    `wait_s` is the time that was waited for the last batch; `step` is the step that the next call returns. `next()`
    raises exceptions of the background work; the iterator is closed afterwards.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_size: int,
        rows: Sequence[int],
        start_step: int,
        prefetch: int,
        end: int = sys.maxsize,
    ) -> None:
        if global_size < 1:
            raise ValueError(f"global_size is {global_size}: a batch needs at least one row")
        if min(rows, default=0) < 0:
            raise ValueError(f"rows contains {min(rows)}: row numbers start at 0")
        if start_step < 0 or prefetch < 0:
            raise ValueError(f"start_step is {start_step} and prefetch is {prefetch}: neither may be negative")
        self.step = start_step
        self.wait_s = 0.0
        steps = _Steps(dataset, global_size, rows, start_step, end)
        threads = min(prefetch, dataset.threads)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
        self._iterator = iter(grain.MapDataset.source(steps).to_iter_dataset(options))
        self._iterator.start_prefetch()
        self._ready: list[Batch] = []  # the next one, if it was waited for

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        self.await_next()
        self.step += 1
        return self._ready.pop()

    def await_next(self) -> None:
        """Waits until the next batch is there; raises what `next()` would."""
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


class _Steps:
    """A random-access source for Grain: index `n` is the batch of step `start_step + n`."""

    def __init__(self, dataset: Dataset, global_size: int, rows: Sequence[int], start_step: int, end: int) -> None:
        self._dataset, self._global_size, self._start_step, self._end = dataset, global_size, start_step, end
        self._rows = tuple(int(row) for row in rows)

    def __len__(self) -> int:
        return sys.maxsize  # the number of steps is not known here

    def __getitem__(self, index: int) -> Batch:
        first = (self._start_step + index) * self._global_size
        batch = {
            name: np.zeros((len(self._rows), *array.shape), array.dtype)
            for name, array in self._dataset.row_arrays.items()
        }
        for place, row in enumerate(self._rows):
            if row < self._global_size and first + row < self._end:
                for name, value in self._dataset[first + row].items():
                    batch[name][place] = value
        return batch
