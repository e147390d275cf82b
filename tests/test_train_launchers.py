"""How the processes of one run find each other: SLURM, Open MPI, Kubernetes; and the hosts that they are on."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.clusters import cloud_tpu_cluster
from jax.experimental import multihost_utils
from support import emulating
from support.emulating import EMULATED
from support.running import TRAIN, XLA_FLAGS, arguments, finish, free_port, losses, start
from support.tables import every_row

from configs import command_line
from runtime import launchers
from sharding import mesh
from training import groups

INDEPENDENT = [f"--config.sharding.{key}" for key in ("replicas=independent", "strategy=zero3", "partition_size=0")]
SLURM_COUNTS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
CLEARED = (
    *(
        launchers.OPEN_MPI,
        launchers.OPEN_MPI_SIZE,
        launchers.KUBERNETES_INDEX,
        launchers.PORT_VARIABLE,
        *launchers.VARIABLES,
    ),
    *(
        *launchers.SLURM_STEP,
        *SLURM_COUNTS,
        "SLURM_LOCALID",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "KUBERNETES_SERVICE_HOST",
    ),
    *("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_ADDRESSES_PATH"),
    *("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_PORT"),
)
STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "rack[0-1]n[2-3]", "SLURM_PROCID": "1", "SLURM_LOCALID": "3"}
SRUN = {**STEP, "SLURM_NTASKS": "2"}
MPIRUN = {
    "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1,10.1.0.1:1234",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
MPIRUN_IPV6 = MPIRUN | {"OMPI_MCA_orte_hnp_uri": "8192.0;tcp6://[fe80::1,fe80::2]:1234"}
GIVEN = dict(zip(launchers.VARIABLES, ("head:29400", "3", "2")))
# The variables, and the coordinator, number of processes, process and GPUs by them; None for a process that is alone.
PLACES: list[tuple[dict[str, str], Any]] = [
    ({}, None),
    ({"JAX_COORDINATOR_ADDRESS": "head:29400"}, None),  # has no number of processes
    (GIVEN, ("head:29400", 3, 2, None)),
    (GIVEN | SRUN, ("head:29400", 3, 2, None)),
    (GIVEN | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
    (SRUN, ("rack0n2:61517", 2, 1, (3,))),
    (SRUN | {"SLURM_STEP_ID": "0"}, ("rack0n2:61517", 2, 1, (3,))),
    (SRUN | {"SLURM_STEP_ID": "1"}, ("rack0n2:61774", 2, 1, (3,))),  # another step of the job
    (SRUN | {"JAX_COORDINATOR_PORT": "5000"}, ("rack0n2:5000", 2, 1, (3,))),
    (SRUN | {"JAX_COORDINATOR_ADDRESS": "head:29400"}, ("head:29400", 2, 1, (3,))),
    (SRUN | {"SLURM_NTASKS": "1"}, None),
    (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, None),  # one task of a larger job
    (STEP | {"SLURM_STEP_NUM_TASKS": "2"}, ("rack0n2:61517", 2, 1, (3,))),
    (MPIRUN, ("10.0.0.1:61441", 4, 2, (0,))),
    (MPIRUN_IPV6, ("[fe80::1]:61442", 4, 2, (0,))),
    (MPIRUN | SRUN, ("10.0.0.1:61441", 4, 2, (0,))),
    (MPIRUN | {"JAX_COORDINATOR_PORT": "5000"}, ("10.0.0.1:5000", 4, 2, (0,))),
    ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)


def test_the_place_of_a_process_by_its_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    """If the port is taken, a launcher's can be set by jax's variable, and another one can be given by hand."""
    for variables, expected in PLACES:
        with subtests.test(variables=variables), monkeypatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            place = launchers.find_place(launchers.FROM_ENVIRONMENT)
            assert (place and (place.coordinator, place.count, place.process, place.local_devices)) == expected
            remedy = (
                "give all processes another port" if "JAX_NUM_PROCESSES" in variables else "set JAX_COORDINATOR_PORT"
            )
            assert place is None or place.other_port.startswith(remedy)
    assert capsys.readouterr().err == ""


def test_the_first_host_of_a_node_list() -> None:
    lists = {
        "node001": "node001",
        "node001,host2": "node001",
        "node[001-0015],host2": "node001",
        "node[7,9-15]": "node7",
        "rack[0-1]n[0-3]": "rack0n0",
        "rack[12,15]-n[03-04].lab,login": "rack12-n03.lab",
        "a-b-[1-2]": "a-b-1",
    }
    assert {text: launchers.first_host(text) for text in lists} == lists


def test_slurm_batch_script_without_srun_is_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert launchers.find_launcher() is None
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("SLURM_NTASKS=2, but srun did not start this process")


def test_kubernetes_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """By jax, which asks its API; here it answers at once."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    monkeypatch.setattr(launchers.K8sCluster, "is_env_present", lambda: True)
    monkeypatch.setattr(launchers.K8sCluster, "get_coordinator_address", lambda _, port: f"mics-0.mics:{port or 55527}")
    monkeypatch.setattr(launchers.K8sCluster, "get_process_count", lambda: 4)
    place = launchers.find_place(launchers.FROM_ENVIRONMENT)
    assert place and (place.coordinator, place.count, place.process) == ("mics-0.mics:55527", 4, 2)
    assert place.local_devices is None


def test_unreachable_kubernetes_is_an_error(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    for host in [None, "127.0.0.1"]:
        with subtests.test(host=host):
            monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
            if host:
                monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
            with pytest.raises(
                ValueError, match=r"^Kubernetes started this process, .*; give --coordinator, --num_proc"
            ):
                launchers.find_place(launchers.FROM_ENVIRONMENT)


# GKE sets the variables of a pod; on GCE the metadata of the VM has them.
POD = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "b-0,b-1,b-2,b-3", "TPU_SKIP_MDS_QUERY": "true"}
SLICE = {"MEGASCALE_COORDINATOR_ADDRESS": "a-0:8080", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}
VM = {"agent-worker-number": "1", "worker-network-endpoints": "x:1:10.0.0.4,x:2:10.0.0.5", "tpu-env": "ZONE: 'z'"}
VM_OF_TWO = VM | {"tpu-env": "".join(f"{name}: '{value}'\n" for name, value in SLICE.items())}


@pytest.fixture
def tpu_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A host with TPUs, by jax; the metadata of the VM, empty at first, without a server."""
    metadata: dict[str, str] = {}
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(
        cloud_tpu_cluster, "get_metadata", lambda key: (metadata.get(key, "Not Found"), 200 if key in metadata else 404)
    )
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.1")
    platforms = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "tpu,cpu")
    yield metadata
    jax.config.update("jax_platforms", platforms)


NOT_SAID, JOINED = "Cloud TPU started this process, but does not say", "this slice was requested together with others"
# The variables, the metadata, and the coordinator, number of processes and process in one world, and as a replica.
TPU_HOSTS: list[tuple[dict[str, str], dict[str, str], Any, Any]] = [
    (POD | SLICE, {}, ("a-0:8482", 8, 5), ("b-0:8482", 4, 1)),
    (POD, {}, ("b-0:8482", 4, 1), ("b-0:8482", 4, 1)),
    (POD | {"JOB_COMPLETION_INDEX": "1"}, {}, ("b-0:8482", 4, 1), ("b-0:8482", 4, 1)),
    (POD | SLICE | {"JAX_COORDINATOR_PORT": "5000"}, {}, ("a-0:5000", 8, 5), ("b-0:5000", 4, 1)),
    (POD | SLICE | GIVEN, {}, ("head:29400", 3, 2), ("head:29400", 3, 2)),
    ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, {}, None, None),  # a slice of one host
    ({}, {}, None, None),
    ({}, VM, ("10.0.0.4:8482", 2, 1), ("10.0.0.4:8482", 2, 1)),
    ({}, VM_OF_TWO, ("a-0:8482", 4, 3), JOINED),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}, NOT_SAID, NOT_SAID),
]


def place_or_error(*before: Callable[[], None]) -> Any:
    """Returns (coordinator, number of processes, process), None for a process that is alone, or an error's start."""
    try:
        for prepare in before:
            prepare()
        place = launchers.find_place(launchers.FROM_ENVIRONMENT)
    except ValueError as error:
        return next((start for start in (NOT_SAID, JOINED) if str(error).startswith(start)), str(error))
    return place and (place.coordinator, place.count, place.process)


@every_row(("variables", "metadata", "world", "replica"), TPU_HOSTS)
def test_the_place_of_a_tpu_host(
    variables: dict[str, str],
    metadata: dict[str, str],
    world: Any,
    replica: Any,
    tpu_host: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one world over all slices; and of an independent replica, whose slice libtpu must not join with others."""
    tpu_host.clear()
    tpu_host.update(metadata)
    with monkeypatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        assert place_or_error() == world
        assert place_or_error(launchers.leave_other_slices) == replica
        assert not [name for name in os.environ if name.startswith("MEGASCALE")]


def test_virtual_devices_on_a_tpu_host_are_one_process(
    tpu_host: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tpu_host.update(VM)
    assert launchers.find_launcher() == "Cloud TPU"
    jax.config.update("jax_platforms", "cpu")
    assert launchers.find_launcher() is None


def test_a_slice_among_several_has_a_replica_number(monkeypatch: pytest.MonkeyPatch) -> None:
    independent = command_line.parse(["train.py", "--config=configs/quickstart.py", *INDEPENDENT])
    with pytest.raises(ValueError, match=r"^no --group: .* a TPU slice among several has one\)$"):
        groups.number(independent, None)
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "3")
    assert groups.number(independent, None) == 3 and groups.number(independent, 7) == 7


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
@pytest.mark.parametrize("variables", [SLURM, pytest.param(OPEN_MPI, marks=pytest.mark.slow)])
def test_launchers_give_ranks_on_two_hosts(variables: str, tmp_path: Path) -> None:
    """By the variables that srun, and mpirun of Open MPI 4, set; the nodes are told apart by the names of the hosts.

    SLURM's coordinator is the first of the node list, Open MPI's the first address; the port follows from the job.
    """
    train = shlex.join([sys.executable, str(TRAIN), *arguments(tmp_path / "run", mesh__devices_per_node=0)])
    program = f"unset {' '.join(launchers.VARIABLES)}; export {variables} XLA_FLAGS={shlex.quote(XLA_FLAGS)}; {train}"
    outcome = emulating.finish(emulating.emulate(tmp_path, ["sh", "-c", program, str(tmp_path)]))
    check_joined(tmp_path / "run", [outcome, outcome])
    mesh_sizes = json.loads((tmp_path / "run" / "environment.json").read_text())["mesh"]
    assert mesh_sizes["replica_inter"] * mesh_sizes["shard_inter"] == 2


@pytest.mark.slow
def test_jax_variables_replace_the_launcher_flags(tmp_path: Path) -> None:
    """The three flags' variables join, and the number of devices replaces the config's 8.

    Around it a SLURM step has one task a node, as that of `ray start` has: jax would give each process GPU 0 alone.
    """
    first = "import atexit, jax\n"
    first += "atexit.register(lambda: print('GPUs:', jax.config.values['jax_cuda_visible_devices']))"
    coordinator = f"127.0.0.1:{free_port()}"
    common = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "1"}
    common |= SRUN | {"SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    outcomes = finish(*[start(arguments(tmp_path), first=first, **common, JAX_PROCESS_ID=i) for i in ("0", "1")])
    check_joined(tmp_path, outcomes)
    assert all(out.endswith("GPUs: all\n") for _, out, _ in outcomes)


TOGETHER = f"{', '.join(launchers.VARIABLES)} belong together; set all three"
RIGHT = {"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}


def test_variables_that_cannot_join_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes would all train alone, in one directory."""
    cases = [
        ({"JAX_NUM_PROCESSES": "1"}, f"JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID missing: {TOGETHER}"),
        ({"JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "1"}, f"JAX_NUM_PROCESSES missing: {TOGETHER}"),
        (RIGHT | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' must be a number"),
        (RIGHT | {"JAX_PROCESS_ID": "two"}, "JAX_PROCESS_ID='two' must be a number"),
        (RIGHT | {"JAX_NUM_CPU_DEVICES": "two"}, "JAX_NUM_CPU_DEVICES='two' must be a number"),
        (STEP, "srun started this process, but SLURM_STEP_NUM_TASKS and SLURM_NTASKS are missing"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2, but OMPI_MCA_orte_hnp_uri is missing"),
    ]
    for variables, said in cases:
        with monkeypatch.context() as environment, pytest.raises(ValueError) as caught:
            for name, value in variables.items():
                environment.setenv(name, value)
            launchers.virtual_devices()
            launchers.find_place(launchers.FROM_ENVIRONMENT)
        assert str(caught.value).startswith(said)
