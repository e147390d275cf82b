"""Results of a GPU compared with a CPU: kernels, codecs, steps, replicas that share it (make test-gpu)."""

import signal
from pathlib import Path
from typing import Any

import jax
import pytest
from support import running
from support.replica_runs import Run
from support.running import arguments, arrays, finish, losses, start

TRITON = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"  # by jax 0.11.2
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(TRITON)]

HERE: dict[str, Any] = {  # one device, in a separate process
    "mesh__num_cpu_devices": 0,
    "mesh__devices_per_node": 0,
    "batch__micro_size": 4,
    "sharding__partition_size": 0,
    "checkpoint__every": 0,
}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
FUSED = {"model__compute_dtype": "bfloat16", "data__seq_len": 64}
CASES: dict[str, tuple[dict[str, Any], float]] = {  # keys, and the allowed difference from a CPU's loss
    **{name: ({"sharding__strategy": name}, 1e-5) for name in STRATEGIES},
    "mics": ({"sharding__strategy": "mics", "sharding__partition_size": 1}, 1e-5),
    "no overlap": ({"sharding__strategy": "zero3", "sharding__overlap": "off"}, 1e-5),
    "written out": ({"sharding__strategy": "zero1", "model__remat": "none", "model__unroll": True}, 1e-5),
    "muon": ({"sharding__strategy": "zero3", "optimizer__name": "muon"}, 1e-4),
    "cudnn": ({"sharding__strategy": "zero3"} | FUSED, 2e-3),
    "pallas": ({"sharding__strategy": "zero3", "model__window": 16} | FUSED, 2e-3),
}
REPLICAS, NUM_STEPS = 3, 60


@pytest.fixture(autouse=True)
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes have memory of it, and products of float32 are not rounded to TensorFloat-32."""
    assert jax.default_backend() == "gpu", "run make test-gpu, where there is one"
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setattr(running, "XLA_FLAGS", "")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")


@pytest.mark.parametrize(("changes", "rtol"), CASES.values(), ids=CASES)
def test_losses_are_those_of_a_cpu(changes: dict[str, Any], rtol: float, tmp_path: Path) -> None:
    runs = [
        start(arguments(tmp_path / platforms, num_steps=5, **HERE | changes), JAX_PLATFORMS=platforms)
        for platforms in ("cpu", "cuda,cpu")
    ]
    ended = finish(*runs)
    assert [code for code, _, _ in ended] == [0, 0], ended
    wanted, found = losses(tmp_path / "cpu"), losses(tmp_path / "cuda,cpu")
    assert len(wanted) == 5 and found == pytest.approx(wanted, rel=rtol)


def test_a_run_that_stops_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    """Steps are dispatched ahead of their metrics here: none is lost, or there twice."""
    changes: dict[str, Any] = HERE | {"sharding__strategy": "zero3", "checkpoint__every": 4}
    whole = start(arguments(tmp_path / "whole", **changes), XLA_FLAGS="--xla_gpu_deterministic_ops=true")
    for stop_after, wanted in ((7, 75), (0, 0)):
        part = start(
            arguments(tmp_path / "parts", **changes),
            stop_after=stop_after,
            XLA_FLAGS="--xla_gpu_deterministic_ops=true",
        )
        assert (ended := finish(part))[0][0] == wanted, ended
    assert (ended := finish(whole))[0][0] == 0, ended
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 10


@pytest.mark.parametrize("changes", [{}, {"compression__all_reduce": "int8"}, {"local_sgd__inner_steps": 2}], ids=str)
def test_replicas_that_share_a_gpu_learn_what_one_does(changes: dict[str, Any], tmp_path: Path) -> None:
    """To the last bit, also if one is killed and comes back. Gradients leave the program through callbacks."""
    settings = HERE | changes | {"num_steps": NUM_STEPS, "elastic__silence_s": 10}
    alone, run = (Run(tmp_path / name, **settings) for name in ("alone", "run"))
    alone.start(0)
    run.slowly.touch()
    for group in range(REPLICAS):
        run.start(group)
    try:
        run.until(1, 3)
        run.stop(1, signal.SIGKILL, -signal.SIGKILL)
        run.until(0, 3)
        run.start(1)
        run.until(1, 3)
    finally:
        run.slowly.unlink()
        ended = finish(*run.processes.values(), *alone.processes.values())
    assert [code for code, _, _ in ended] == [0] * (REPLICAS + 1), ended
    wanted = alone.losses(0)
    for group in range(REPLICAS):
        found = run.losses(group)
        assert found[NUM_STEPS] and found == {step: wanted[step] for step in found}
    one, two = (arrays(each.workdir, NUM_STEPS) for each in (alone, run))
    assert one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)
