"""How the processes of one run find each other: SLURM, Open MPI, Kubernetes; and the hosts that they are on."""

import json
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import emulating
import jax
import numpy as np
import pytest
from emulating import EMULATED
from jax.experimental import multihost_utils
from running import TRAIN, XLA_FLAGS, arguments, finish, free_port, losses, run_here, start, start_together

from runtime import launch
from sharding import mesh

NAMES = (
    launch.OPEN_MPI,
    launch.OPEN_MPI_SIZE,
    launch.KUBERNETES_INDEX,
    *launch.SLURM_STEP,
    "SLURM_NTASKS",
    "SLURM_LOCALID",
)
SRUN = {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "a,b", "SLURM_PROCID": "0"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "KUBERNETES_SERVICE_HOST", *launch.VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, None),
        (SRUN, "SLURM"),
        (SRUN | {"SLURM_NTASKS": "1"}, None),
        ({"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:1234"}, "Open MPI"),
        ({"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:1234", "SLURM_NTASKS": "2"}, "Open MPI"),
        ({"JOB_COMPLETION_INDEX": "0"}, "Kubernetes"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"JAX_COORDINATOR_ADDRESS": "localhost:1234"}, None),  # does not say how many, and which one
    ],
)
def test_launcher_is_recognised_from_its_variables(
    variables: dict[str, str],
    launcher: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.find_launcher() == launcher
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("missing", launch.SLURM_STEP)
def test_slurm_batch_script_without_srun_is_one_process(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SRUN.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    assert launch.find_launcher() is None
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("SLURM_NTASKS=2, but srun did not start this process")


def test_open_mpi_5_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # and no OMPI_MCA_orte_hnp_uri, which Open MPI 4 sets
    assert run_here(*arguments(tmp_path / "run")) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: OMPI_COMM_WORLD_SIZE=2, but") and err.count("\n") == 1
    assert "--coordinator, --num_processes and --process_id" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_unreachable_kubernetes_is_an_error(
    host: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    if host:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)  # as in a new process
    assert run_here(*arguments(tmp_path)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: Kubernetes started this process, but does not say how to join the others (")
    assert err.endswith("give --coordinator, --num_processes and --process_id\n") and err.count("\n") == 1


def check_joined(workdir: Path, outcomes: list[tuple[int, str, str]]) -> None:
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    assert json.loads((workdir / "environment.json").read_text())["processes"] == 2
    assert len(losses(workdir)) == 10


def test_hosts_are_distinguished_by_full_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["plumless", "buckeroo", "plumless"]  # the first two have the same CRC-32
    monkeypatch.setattr(jax, "process_count", lambda: len(names))
    gathered: list[Any] = []

    def gather(x: np.ndarray) -> np.ndarray:
        gathered.append(x)
        return np.stack(gathered)

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    for name in names:
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        hosts = mesh._host_of_process()
    assert [host.rstrip(b"\0").decode() for host in hosts] == names


SLURM = "SLURM_JOB_ID=77 SLURM_STEP_NODELIST='node[0-1]' SLURM_NTASKS=2 SLURM_PROCID=$RANK SLURM_LOCALID=0"
OPEN_MPI = (
    "OMPI_MCA_orte_hnp_uri='1.0;tcp://10.77.0.1:1234' "
    "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$RANK OMPI_COMM_WORLD_LOCAL_RANK=0"
)


@EMULATED
@pytest.mark.slow
@pytest.mark.parametrize(
    "variables", [SLURM, pytest.param(f"{OPEN_MPI} OMPI_COMM_WORLD_LOCAL_RANK=0", marks=pytest.mark.slow)]
)
def test_launchers_give_ranks_on_two_hosts(variables: str, tmp_path: Path) -> None:
    """By the variables that srun, and mpirun of Open MPI 4, set; the nodes are told apart by the names of the hosts.

    SLURM's coordinator is the first of the node list, Open MPI's the first address; jax chooses the port from the job.
    """
    train = shlex.join([sys.executable, str(TRAIN), *arguments(tmp_path / "run", mesh__devices_per_node=0)])
    program = f"unset {' '.join(launch.VARIABLES)}; export {variables} XLA_FLAGS={shlex.quote(XLA_FLAGS)}; {train}"
    outcome = emulating.finish(emulating.emulate(tmp_path, ["sh", "-c", program, str(tmp_path)]))
    check_joined(tmp_path / "run", [outcome, outcome])
    mesh_sizes = json.loads((tmp_path / "run" / "environment.json").read_text())["mesh"]
    assert mesh_sizes["replica_inter"] * mesh_sizes["shard_inter"] == 2


@pytest.mark.slow
def test_jax_variables_replace_the_launcher_flags(tmp_path: Path) -> None:
    """The three flags' variables join, the number of devices replaces the config's 8, and nobody's name is asked.

    Around it a SLURM step has one task a node, as that of `ray start` has: jax would give each process GPU 0 alone.
    """
    first = "import atexit, jax, runtime.rendezvous; del runtime.rendezvous.own_address\n"
    first += "atexit.register(lambda: print('GPUs:', jax.config.values['jax_cuda_visible_devices']))"
    coordinator = f"127.0.0.1:{free_port()}"
    common = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "1"}
    common |= SRUN | {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    outcomes = finish(*[start(arguments(tmp_path), first=first, **common, JAX_PROCESS_ID=i) for i in ("0", "1")])
    check_joined(tmp_path, outcomes)
    assert all(out.endswith("GPUs: all\n") for _, out, _ in outcomes)


NO_WAY = """
from runtime import rendezvous
rendezvous.connect, rendezvous._ACCEPT_S = lambda *_: time.sleep(1000), 2.0
"""


def test_processes_that_cannot_connect_exit_with_75(tmp_path: Path) -> None:
    """A lost node, no mistake in the config; and nobody waits for it at exit, as jax would for minutes."""
    two = start_together(arguments(tmp_path), 2, devices=1, first=NO_WAY)
    try:
        code, _, err = finish(two[0])[0]
    finally:
        two[1].kill()
        finish(two[1])
    assert (code, err) == (75, "error: process 1 did not connect to process 0 for heartbeats; a firewall?\n")


TOGETHER = f"{', '.join(launch.VARIABLES)} belong together; set all three"
RIGHT = {"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"JAX_NUM_PROCESSES": "1"}, f"JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID missing: {TOGETHER}"),
        ({"JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "1"}, f"JAX_NUM_PROCESSES missing: {TOGETHER}"),
        (RIGHT | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' must be a number"),
        (RIGHT | {"JAX_PROCESS_ID": "two"}, "JAX_PROCESS_ID='two' must be a number"),
        (RIGHT | {"JAX_NUM_CPU_DEVICES": "two"}, "JAX_NUM_CPU_DEVICES='two' must be a number"),
    ],
)
def test_variables_that_cannot_join_are_rejected(
    variables: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The processes would all train alone, in one directory."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run_here(*arguments(tmp_path)) == 2
    assert capsys.readouterr().err == f"error: {said}\n"
