"""The same run on other devices, under other strategies and with batches that do not divide: the same losses."""

from pathlib import Path

import numpy as np
import pytest
from running import arguments, finish, losses, run_here, start, stop_after

SAME = {"rtol": 1e-5}


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("on_eight")
    assert run_here(*arguments(workdir)) == 0
    return workdir


@pytest.mark.slow
def test_run_resumes_on_fewer_devices(tmp_path: Path, on_eight: Path) -> None:
    assert run_here(*arguments(tmp_path), hooks=[stop_after(4)]) == 75
    code, _, err = finish(start(arguments(tmp_path, mesh__num_cpu_devices=2)))[0]
    assert code == 0, err
    np.testing.assert_allclose(losses(tmp_path), losses(on_eight), **SAME)


def test_run_resumes_with_another_strategy(tmp_path: Path, on_eight: Path) -> None:
    assert run_here(*arguments(tmp_path), hooks=[stop_after(5)]) == 75
    zero3 = {"sharding__strategy": "zero3", "sharding__partition_size": 0}
    assert run_here(*arguments(tmp_path, **zero3)) == 0
    np.testing.assert_allclose(losses(tmp_path), losses(on_eight), **SAME)


@pytest.mark.slow
def test_losses_are_equal_with_an_indivisible_batch(tmp_path: Path) -> None:
    odd = {"batch__global_size": 34, "batch__micro_size": 4, "eval__every": 5}  # 2 micro-steps of 3 rows; 9 of 4
    eight, one = tmp_path / "eight", tmp_path / "one"
    alone = {"mesh__num_cpu_devices": 1, "mesh__devices_per_node": 1, "sharding__partition_size": 1}
    process = start(arguments(one, **odd, **alone))
    assert run_here(*arguments(eight, **odd)) == 0
    code, _, err = finish(process)[0]
    assert code == 0, err
    np.testing.assert_allclose(losses(eight), losses(one), **SAME)
