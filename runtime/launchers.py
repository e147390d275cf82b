"""Finds the place of this process in its run: by flags, by three environment variables, or by a launcher's variables.

The launchers are SLURM, Open MPI, Cloud TPU and Kubernetes. `runtime/rendezvous.py` then connects the processes, and
`start_jax` joins them in jax.
"""

import os
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax

# Only these classes know the variables of mpirun, of TPU hosts and of a Job's pods. Tried with jax 0.10.2 and 0.12.0.1.
from jax._src.clusters import ClusterEnv, GceTpuCluster, GkeTpuCluster, K8sCluster, OmpiCluster

from runtime.addresses import host_and_port
from runtime.exit_codes import ResumableError

JAX_PATIENCE_S = 120  # all processes are alive when jax joins them; after this limit jax aborts the process
_CONNECT_S = 60.0
_TRY_S, _RETRY_S = 2.0, 0.1
OPEN_MPI, OPEN_MPI_SIZE = "OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE"  # Open MPI 5 sets only the second
SLURM_STEP = ("SLURM_STEP_NODELIST", "SLURM_PROCID")  # set by srun
SLURM_COUNTS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")  # number of tasks in a step; in a step or a job
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # set for an indexed Job or a JobSet
MULTISLICE = "MEGASCALE_"  # libtpu joins the slices of a run if it sees variables with this prefix
PORT_VARIABLE = "JAX_COORDINATOR_PORT"  # for launchers that set no port
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")  # for any other launcher
# Ports above the range that Linux gives to connections. jax takes the same range.
_FIRST_PORT, _PORTS, _STEP_STRIDE = 61440, 4096, 257


@dataclass(frozen=True, kw_only=True)
class Address:
    """The flags by which a process joins the others. Either all three are set, or none."""

    coordinator: str | None = None  # HOST:PORT of process 0
    num_processes: int | None = None
    process_id: int | None = None


T = TypeVar("T")
FROM_ENVIRONMENT = Address()  # use the three variables, or detect the launcher


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this process among the processes of its run."""

    coordinator: str  # HOST:PORT at which process 0 waits for the others
    count: int
    process: int
    source: str  # source of the port, for messages
    other_port: str = "give all processes another port"  # the remedy if the port is taken
    local_devices: tuple[int, ...] | None = None  # the GPUs of this process; None: all of its node


def find_place(address: Address) -> Place | None:
    """Returns the place of this process, or None if it trains alone.

    ValueError names the missing flags or variables.
    """
    if address == FROM_ENVIRONMENT and not any(name in os.environ for name in VARIABLES[1:]):
        launcher = find_launcher()
        return _PLACES[launcher]() if launcher else None
    coordinator, count, process = address.coordinator, address.num_processes, address.process_id
    source = f"--coordinator={coordinator}"
    if address == FROM_ENVIRONMENT:
        coordinator, count, process = _from_variables()
        source = f"{VARIABLES[0]}={coordinator}"
    if coordinator is None or count is None or process is None:
        raise ValueError("--coordinator, --num_processes and --process_id belong together; give all three")
    if not 0 <= process < count:
        raise ValueError(f"--process_id={process} must be from 0 to {count - 1}")
    host_and_port(coordinator)
    if count == 1:
        return None  # jax would let its CPU devices reduce by gloo over TCP instead of in memory
    return Place(coordinator=coordinator, count=count, process=process, source=source)


def find_launcher() -> str | None:
    """Returns the launcher that started this process as one of several, by the environment, or None.

    ValueError for Open MPI 5, which jax does not support: each process would train alone, all in the same directory.
    """
    if OPEN_MPI in os.environ:
        return "Open MPI"
    if os.environ.get(OPEN_MPI_SIZE, "1") != "1":
        raise ValueError(
            f"{OPEN_MPI_SIZE}={os.environ[OPEN_MPI_SIZE]}, but {OPEN_MPI} is missing (Open MPI 5): jax cannot join the "
            "processes by itself; give --coordinator, --num_processes and --process_id (docs/clusters.md)"
        )
    in_step = all(name in os.environ for name in SLURM_STEP)
    tasks = next((os.environ[name] for name in SLURM_COUNTS if name in os.environ), "" if in_step else "1")
    if not tasks:
        raise ValueError(
            f"srun started this process, but {' and '.join(SLURM_COUNTS)} are missing, so that the number of tasks is "
            "not known; set one of them, or give --coordinator, --num_processes and --process_id"
        )
    if tasks != "1":
        if in_step:
            return "SLURM"
        print(
            f"SLURM_NTASKS={tasks}, but srun did not start this process: it trains on its own; "
            f"`srun python train.py ...` starts {tasks} processes of one run",
            file=sys.stderr,
        )
    if _tpu_cluster():
        return "Cloud TPU"
    return "Kubernetes" if KUBERNETES_INDEX in os.environ else None


def leave_other_slices() -> None:
    """Makes the TPU slice of this process a separate JAX world. Call it before any use of jax's devices.

    ValueError if the metadata of the VM, which libtpu reads too, joins it with other slices.
    """
    for name in [name for name in os.environ if name.startswith(MULTISLICE)]:
        del os.environ[name]
    if _tpu_cluster() is GceTpuCluster and _ask("Cloud TPU", GceTpuCluster._get_num_slices) > 1:
        raise ValueError(
            "this slice was requested together with others (--node-count), so that libtpu joins them; "
            "with sharding.replicas=independent request each slice by itself (docs/tpu.md)"
        )


def virtual_devices() -> int:
    """Returns the number of CPU devices that a launcher sets for each process (JAX_NUM_CPU_DEVICES), 0 if unset."""
    wanted = os.environ.get("JAX_NUM_CPU_DEVICES", "0")
    if not wanted.isdecimal():
        raise ValueError(f"JAX_NUM_CPU_DEVICES={wanted!r} must be a number")
    return int(wanted)


def start_jax(place: Place, address: str, bind_address: str | None) -> None:
    """Joins the processes in jax. Its service in process 0 has address `address` and listens at `bind_address`.

    Call it before any use of jax's devices. ResumableError if jax's service cannot be reached.
    """
    if place.process:
        _await_service(address)
    jax.distributed.initialize(
        address,
        place.count,
        place.process,
        local_device_ids=None if "JAX_LOCAL_DEVICE_IDS" in os.environ else place.local_devices,
        # else jax would give a process inside a SLURM step one GPU, and query Kubernetes, which may be forbidden
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind_address,
        initialization_timeout=JAX_PATIENCE_S,
    )


def _await_service(address: str) -> None:
    """Waits until jax's service can be reached. Without this, jax aborts the process if a firewall blocks the port."""
    until_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            socket.create_connection(host_and_port(address), timeout=_TRY_S).close()
            return
        except OSError as error:
            if time.monotonic() > until_s:
                cannot = f"jax's service in process 0 at {address} cannot be reached ({error.strerror or error})"
                raise ResumableError(f"{cannot}; a firewall?") from error
        time.sleep(_RETRY_S)


def _from_variables() -> tuple[str, int, int]:
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing: {', '.join(VARIABLES)} belong together; set all three")
    coordinator, *numbers = (os.environ[name] for name in VARIABLES)
    for name, number in zip(VARIABLES[1:], numbers, strict=True):
        if not number.isdecimal():
            raise ValueError(f"{name}={number!r} must be a number")
    return coordinator, int(numbers[0]), int(numbers[1])


def first_host(node_list: str) -> str:
    """Returns the first host of a SLURM node list: rack0n2 of `rack[0-1]n[2-3],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    return re.sub(r"\[([^],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def _slurm_place() -> Place:
    """Returns the place of a task of srun. Each step of a job has another port; step 0 has jax's port."""
    job, step = (int(os.environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = os.environ.get(PORT_VARIABLE) or _FIRST_PORT + (job + _STEP_STRIDE * step) % _PORTS
    return _launched(
        "SLURM",
        f"{first_host(os.environ['SLURM_STEP_NODELIST'])}:{port}",
        int(next(os.environ[name] for name in SLURM_COUNTS if name in os.environ)),
        int(os.environ["SLURM_PROCID"]),
        local_devices=(int(os.environ.get("SLURM_LOCALID", "0")),),
    )


def _open_mpi_place() -> Place:
    host, _, port = OmpiCluster.get_coordinator_address(None, os.environ.get(PORT_VARIABLE)).rpartition(":")
    return _launched(
        "Open MPI",
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        OmpiCluster.get_process_count(),
        OmpiCluster.get_process_id(),
        local_devices=(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")),),
    )


def _kubernetes_place() -> Place:
    def place() -> tuple[str, int, int]:
        if not K8sCluster.is_env_present():
            raise ValueError("no KUBERNETES_SERVICE_HOST, or no package kubernetes: make .venv/kubernetes-installed")
        return _place_by_jax(K8sCluster)

    return _launched("Kubernetes", *_ask("Kubernetes", place))


def _cloud_tpu_place() -> Place | None:
    """Returns the place of a TPU host; None if it is the only one. Process 0 is the first host of the first slice."""
    cluster = _tpu_cluster()
    assert cluster
    place = _launched("Cloud TPU", *_ask("Cloud TPU", lambda: _place_by_jax(cluster)))
    return place if place.count > 1 else None


def _tpu_cluster() -> type[ClusterEnv] | None:
    """Returns jax's class for the hosts of TPU slices, on GKE or on GCE; None if this process uses no TPU."""
    if jax.config.jax_platforms == "cpu":
        return None
    return next((kind for kind in (GkeTpuCluster, GceTpuCluster) if _ask("Cloud TPU", kind.is_env_present)), None)


def _place_by_jax(cluster: type[ClusterEnv]) -> tuple[str, int, int]:
    coordinator = cluster.get_coordinator_address(JAX_PATIENCE_S, os.environ.get(PORT_VARIABLE))
    return coordinator, cluster.get_process_count(), cluster.get_process_id()


def _ask(launcher: str, question: Callable[[], T]) -> T:
    """Returns the answer of jax's class for a launcher. ValueError if it has none."""
    try:
        return question()
    except Exception as error:  # any type: from the Kubernetes client, requests, urllib3 or jax
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{launcher} started this process, but does not say how to join the others ({reason}); "
            "give --coordinator, --num_processes and --process_id"
        ) from error


def _launched(
    launcher: str, coordinator: str, count: int, process: int, local_devices: tuple[int, ...] | None = None
) -> Place:
    coordinator = os.environ.get(VARIABLES[0]) or coordinator
    host_and_port(coordinator, f"the coordinator by {launcher}")
    return Place(
        coordinator=coordinator,
        count=count,
        process=process,
        source=f"{launcher}, coordinator {coordinator}",
        other_port=f"set {PORT_VARIABLE} to a free port for all processes of this run",
        local_devices=local_devices,
    )


_PLACES: dict[str, Callable[[], Place | None]] = {
    "SLURM": _slurm_place,
    "Open MPI": _open_mpi_place,
    "Cloud TPU": _cloud_tpu_place,
    "Kubernetes": _kubernetes_place,
}
