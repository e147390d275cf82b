"""Batches: the same rows for any number of processes and across restarts; errors surface; padding weighs nothing."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support.waiting import until

from configs.schema import DataConfig
from input_pipeline import Batches, Dataset, load
from input_pipeline.batches import batch_at

GLOBAL_SIZE = 10


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load(DataConfig(source="synthetic", seq_len=8, objective="masked", mask_rate=0.3), "train", seed=4)


def steps_of(dataset, rows, start, count, prefetch=2, global_size=GLOBAL_SIZE):
    with Batches(dataset, global_size=global_size, rows=rows, start_step=start, prefetch=prefetch) as batches:
        return [next(batches) for _ in range(count)]


def assert_rows(batch, rows, step, dataset, global_size=GLOBAL_SIZE):
    """Compares with the rule written out: row r of step t is dataset[t * G + r]."""
    for name in ("tokens", "targets", "weights"):
        expected = np.stack([dataset[step * global_size + row][name] for row in rows])
        np.testing.assert_array_equal(batch[name], expected)
        assert batch[name].dtype == expected.dtype


def test_rows_are_independent_of_processes_and_restarts(dataset):
    for processes, prefetch, start in ((1, 3, 0), (1, 3, 5), (3, 0, 5), (4, 1, 0), (4, 1, 5)):
        for process in range(processes):
            rows = list(range(process, GLOBAL_SIZE, processes))  # any split of the rows
            for step, batch in enumerate(steps_of(dataset, rows, start, 4, prefetch), start=start):
                assert_rows(batch, rows, step, dataset)


def test_rows_are_in_the_requested_order_and_continue_into_the_next_epoch(dataset):
    """Those beyond the global batch are zero."""
    batch = steps_of(dataset, [7, 2, 2, 10, 11], 2, 1)[0]
    assert_rows({name: value[:3] for name, value in batch.items()}, [7, 2, 2], 2, dataset)
    assert all(value.shape == (5, 8) and not value[3:].any() for value in batch.values())
    step = len(dataset) // GLOBAL_SIZE  # this batch lies across the end
    assert len(dataset) % GLOBAL_SIZE
    for offset, batch in enumerate(steps_of(dataset, range(GLOBAL_SIZE), step - 1, 3)):
        assert_rows(batch, range(GLOBAL_SIZE), step - 1 + offset, dataset)


def test_several_threads_read_the_rows_of_a_batch(dataset):
    """As here, where each row waits for another; padding is none of the data set's."""
    together = threading.Barrier(2, timeout=120)

    class Waiting:
        row_arrays = dataset.row_arrays

        def __getitem__(self, i: int):
            together.wait()
            return dataset[i]

    batch = batch_at(Waiting(), 1, global_size=GLOBAL_SIZE, rows=[7, 2, 9, 5, 3, 10], end=18, threads=3)  # pyright: ignore
    places, rows = [0, 1, 3, 4], [7, 2, 5, 3]
    assert_rows({name: value[places] for name, value in batch.items()}, rows, 1, dataset)
    assert not any(value[[2, 5]].any() for value in batch.values())


class Failing:
    """A data set whose example 7 cannot be read."""

    threads = 1

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.row_arrays = dataset, dataset.row_arrays

    def __getitem__(self, i: int):
        if i == 7:
            raise ValueError("disk on fire")
        return self.dataset[i]


def test_background_error_is_raised_by_next(dataset):
    for prefetch in (0, 3):
        with Batches(Failing(dataset), global_size=3, rows=range(3), start_step=0, prefetch=prefetch) as batches:  # pyright: ignore
            next(batches)
            next(batches)
            with pytest.raises(ValueError, match="disk on fire") as caught:
                next(batches)
            assert caught.value.__notes__[-1:] == ["while preparing the batch of step 2"]
            with pytest.raises(ValueError, match="closed"):  # no batch is skipped silently
                next(batches)


@pytest.mark.slow  # waits for a thread
def test_prefetch_prepares_at_most_the_requested_batches(dataset):
    read = []

    class Recording:
        row_arrays, threads = dataset.row_arrays, 1

        def __getitem__(self, i):
            read.append((i, threading.current_thread() is threading.main_thread()))
            return dataset[i]

    with Batches(Recording(), global_size=1, rows=[0], start_step=6, prefetch=3) as batches:  # pyright: ignore
        until(lambda: len(read) == 3)  # before the first next()
        next(batches)
        until(lambda: len(read) == 4)
        time.sleep(0.05)
        assert sorted(read) == [(6, False), (7, False), (8, False), (9, False)]


def test_wait_time_is_that_of_the_last_next(dataset, monkeypatch):
    clock = iter([10.0, 13.0, 20.0, 20.5])
    monkeypatch.setattr("input_pipeline.batches.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with Batches(dataset, global_size=1, rows=[0], start_step=0, prefetch=1) as batches:
        for step, wait_s in ((1, 3.0), (2, 0.5)):
            next(batches)
            assert (batches.step, batches.wait_s) == (step, wait_s)


@pytest.mark.slow  # waits for a thread
def test_close_ends_the_background_thread(dataset):
    before = set(threading.enumerate())
    batches = Batches(dataset, global_size=2, rows=[0, 1], start_step=0, prefetch=2)
    next(batches)
    ours = set(threading.enumerate()) - before
    assert ours
    batches.close()
    batches.close()
    until(lambda: not any(thread.is_alive() for thread in ours))
    with pytest.raises(ValueError, match="closed"):
        next(batches)
