"""The same run on other devices and under other strategies: the same losses."""

from pathlib import Path

import numpy as np
import pytest
from support.running import arguments, finish, losses, run_here, start, stop_after

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


@pytest.mark.slow
def test_run_resumes_with_another_strategy(tmp_path: Path, on_eight: Path) -> None:
    assert run_here(*arguments(tmp_path), hooks=[stop_after(5)]) == 75
    zero3 = {"sharding__strategy": "zero3", "sharding__partition_size": 0}
    assert run_here(*arguments(tmp_path, **zero3)) == 0
    np.testing.assert_allclose(losses(tmp_path), losses(on_eight), **SAME)
