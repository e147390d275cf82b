"""The batches that training gets, gathered from all devices of all processes: each row once, in order, padding last."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from running import arguments, finish, run_here, start_together
from tables import check_rows

from configs.schema import BatchConfig, Config, DataConfig
from input_pipeline import load
from runtime.consensus import barrier
from runtime.exit_codes import ResumableError
from training.batches import accumulation, fitted
from training.datasets import load_datasets
from training.experiment import Experiment, make_experiment

RESUMABLE = 75
TIMES = ((0, 0), (0, 1), (1, 1))  # first step of the run (after a restart: 1), step


def writes_batches(out: str) -> Callable[[Config], Experiment]:
    """Returns a maker that ends the run: it writes this process' shards of the batches of `TIMES` into `out`."""

    def write_shards(config: Config) -> Experiment:
        ex, found = make_experiment(config), {}
        for first in (0, 1):
            with ex.batches.read(
                load_datasets(ex, Path(out), ExitStack().enter_context).train, first, prefetch=1
            ) as batches:
                for step in range(first, 2):
                    for name, x in ex.batches.to_devices(next(batches)).items():
                        for number, shard in enumerate(x.addressable_shards):
                            place = [cut.indices(size)[:2] for cut, size in zip(shard.index, x.shape, strict=True)]
                            key = f"{first} {step} {name} {number}"
                            found |= {f"{key} data": np.asarray(shard.data), f"{key} place": np.array(place)}
                            found[f"{first} {step} {name} shape"] = np.array(x.shape)
        np.savez(f"{out}/{jax.process_index()}.npz", **found)
        barrier("written")
        raise ResumableError("the batches are written")

    return write_shards


def check_batches(out: Path, num_processes: int, global_size: int, rows_wanted: Sequence[Any] = ()) -> None:
    """Checks that the shards of all processes are, together, the rows of the data set, or those given."""
    files = [dict(np.load(out / f"{i}.npz")) for i in range(num_processes)]
    config = {"source": "synthetic", "path": "", "tokenizer": "bytes", "tokenizer_path": "", "seq_len": 32}
    config |= {"image_size": 8, "channels": 1, "augment": "none"}
    dataset = rows_wanted or load(DataConfig(**config, objective="causal", mask_rate=0.15, prefetch=4), "train", 0)
    for first, step in TIMES:
        for name in dataset[0]:
            prefix = f"{first} {step} {name}"
            whole = np.full(files[0][f"{prefix} shape"], -1.0)
            for file in files:
                for key in [key for key in file if key.startswith(prefix) and key.endswith("data")]:
                    place = tuple(slice(*cut) for cut in file[key.replace("data", "place")])
                    assert ((whole[place] == -1) | (whole[place] == file[key])).all()  # copies are the same
                    whole[place] = file[key]
            rows = whole.reshape(-1, whole.shape[-1])
            wanted = np.stack([dataset[step * global_size + r][name] for r in range(global_size)])
            np.testing.assert_array_equal(rows[:global_size], wanted)
            assert (rows[global_size:] == 0).all()


def test_few_rows_are_padding_on_any_number_of_nodes() -> None:
    """Less than a row (a ghost batch) of each device and micro-step, and none where micro-batches divide the batch."""

    def check(micro_size: int, multiple: int) -> None:
        batch, of_device = BatchConfig(global_size=4096, micro_size=micro_size), []
        for devices in range(8, 8 * 65 + 1, 8):
            found = fitted(batch, devices, multiple)
            steps, rows = accumulation(found, devices), found.micro_size
            assert steps == math.ceil(4096 / (devices * micro_size))
            assert rows <= micro_size and rows % multiple == 0
            assert 0 <= steps * rows * devices - 4096 < steps * multiple * devices
            assert found == batch or 4096 % (devices * micro_size)
            of_device.append(steps * rows)
        assert of_device == sorted(of_device, reverse=True), "a node more makes no step longer"
        if micro_size == 8:  # two micro-steps of 8 rows on 32 nodes, of 5 on 63, one of 8 on 64 and 65
            assert [of_device[nodes - 1] for nodes in (32, 63, 64, 65)] == [16, 10, 8, 8]

    check_rows([(1, 1), (8, 1), (64, 32)], check)


def test_batch_layout_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    def check(changes: dict[str, Any]) -> None:
        tmp_path = tmp_path_factory.mktemp("row")
        assert run_here(*arguments(tmp_path / "run", **changes), make=writes_batches(str(tmp_path))) == RESUMABLE
        check_batches(tmp_path, 1, changes.get("batch__global_size", 16))

    check_rows(
        [
            (changes,)
            for changes in [
                {},
                {"batch__global_size": 34, "batch__micro_size": 4},  # two micro-steps of 3 rows
                {"batch__global_size": 5, "batch__micro_size": 4},  # fewer rows than devices
                {"batch__global_size": 30, "mesh__tensor": 2, "sharding__partition_size": 4},
            ]
        ],
        check,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (2, {"batch__global_size": 30}),
        (4, {"batch__global_size": 30, "mesh__tensor": 2}),
    ],
)
def test_batch_layout_of_several_processes(count: int, changes: dict[str, Any], tmp_path: Path) -> None:
    args = arguments(tmp_path / "run", **changes)
    first = f"import test_train_batches\nparts['make'] = test_train_batches.writes_batches({str(tmp_path)!r})"
    outcomes = finish(*start_together(args, count, devices=2, first=first))
    assert [code for code, _, _ in outcomes] == [RESUMABLE] * count, outcomes
    check_batches(tmp_path, count, changes.get("batch__global_size", 16))
