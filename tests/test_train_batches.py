"""The batches that training gets, gathered from all devices of all processes: each row once, in order, padding last."""

import math
from pathlib import Path
from typing import Any

import pytest
from support.batch_files import RESUMABLE, check_batches, writes_batches
from support.running import arguments, finish, run_here, start_together
from support.tables import check_rows

from configs.schema import BatchConfig
from training.batches import accumulation, fitted


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
    first = f"from support.batch_files import writes_batches\nparts['make'] = writes_batches({str(tmp_path)!r})"
    outcomes = finish(*start_together(args, count, devices=2, first=first))
    assert [code for code, _, _ in outcomes] == [RESUMABLE] * count, outcomes
    check_batches(tmp_path, count, changes.get("batch__global_size", 16))
