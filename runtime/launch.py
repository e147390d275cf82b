"""Joins the processes of one run: by flags, by three environment variables, or by SLURM, Open MPI or Kubernetes.

jax alone waits for five minutes in silence and then aborts, also when process 0 has ended long before. So jax joins in
a thread, while the main thread watches process 0 and can still be interrupted.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import jax

# Only this module tells the address that a launcher has given; tried with jax 0.10.2 and 0.12.0.1.
from jax._src import distributed

from runtime.addresses import host_and_port, to_listen_at
from runtime.exit_codes import ResumableError

PATIENCE_S = 300.0  # for all processes to join
JAX_PATIENCE_S = 400  # longer: jax does not raise an error at its limit, it aborts the process
_QUIET_S = 20.0  # of waiting before a process says so
_GONE_S = 60.0  # in which a process 0 that was reached may be started again
_LOOK_S = 5.0  # each look is a connection to process 0, from every process that waits
_CONNECT_S = 2.0
OPEN_MPI, OPEN_MPI_SIZE = "OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE"  # Open MPI 5 sets only the second
SLURM_STEP = ("SLURM_STEP_NODELIST", "SLURM_PROCID")  # set by srun; sbatch sets only SLURM_NTASKS
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # of an indexed Job or a JobSet
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # where process 0 listens
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")  # for any other launcher


@dataclass(frozen=True, kw_only=True)
class Address:
    """The flags by which a process joins the others: all three are set, or none."""

    coordinator: str | None = None  # HOST:PORT of process 0
    num_processes: int | None = None
    process_id: int | None = None


FROM_ENVIRONMENT = Address()  # use the three variables, or detect the launcher


def join(address: Address) -> None:
    """Joins the other processes, if any. ValueError says which flags or variables are needed.

    Call it before any use of jax's devices.
    """
    coordinator, num_processes, process_id = address.coordinator, address.num_processes, address.process_id
    if address == FROM_ENVIRONMENT:
        if any(name in os.environ for name in VARIABLES[1:]):  # other programs set only the address
            coordinator, num_processes, process_id = _from_variables()
        else:
            if launcher := find_launcher():
                _join_by(launcher)
            return
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError("--coordinator, --num_processes and --process_id belong together; give all three")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"--process_id={process_id} must be from 0 to {num_processes - 1}")
    host_and_port(coordinator)
    if num_processes == 1:
        return  # joined to nobody, its CPU devices would reduce by gloo, over TCP, what they can in memory
    bind_address = _bind_address(coordinator) if process_id == 0 else None
    initialize = partial(
        jax.distributed.initialize,
        coordinator,
        num_processes,
        process_id,
        # else jax would give a process inside a SLURM step one GPU, and query Kubernetes, which may not be permitted
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind_address,
        initialization_timeout=JAX_PATIENCE_S,
    )
    join_in_time(initialize, process_id)


def find_launcher() -> str | None:
    """Returns the launcher that started this process as one of several, by the environment; None if there is none.

    ValueError for Open MPI 5, which jax does not support: each process would train alone, all in one directory.
    """
    if OPEN_MPI in os.environ:
        return "Open MPI"
    if os.environ.get(OPEN_MPI_SIZE, "1") != "1":
        raise ValueError(
            f"{OPEN_MPI_SIZE}={os.environ[OPEN_MPI_SIZE]}, but {OPEN_MPI} is missing (Open MPI 5): jax cannot join the "
            "processes by itself; give --coordinator, --num_processes and --process_id (docs/clusters.md)"
        )
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if tasks != "1":
        if all(name in os.environ for name in SLURM_STEP):
            return "SLURM"
        print(
            f"SLURM_NTASKS={tasks}, but srun did not start this process: it trains on its own; "
            f"`srun python train.py ...` starts {tasks} processes of one run",
            file=sys.stderr,
        )
    return "Kubernetes" if KUBERNETES_INDEX in os.environ else None


def _bind_address(coordinator: str) -> str | None:
    """Returns where jax's service shall listen; None for jax's default: its variable, else all addresses.

    ValueError if that is impossible: jax would crash.
    """
    if at := os.environ.get(BIND_VARIABLE):
        _check_free(*host_and_port(at, BIND_VARIABLE), f"{BIND_VARIABLE}={at}")
        return None
    host, port = host_and_port(coordinator)
    _check_free(to_listen_at(host), port, f"--coordinator={coordinator}")
    return coordinator if to_listen_at(host) else None


def _check_free(host: str, port: int, given: str) -> None:
    """Raises ValueError if `port` is not free for jax's service; gRPC would share it with another run."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run may be in TIME_WAIT
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"{given}: process 0 cannot listen at port {port} of {socket.gethostname()}: "
                f"{error.strerror}; give all processes another port"
            ) from error


def _from_variables() -> tuple[str, int, int]:
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing: {', '.join(VARIABLES)} belong together; set all three")
    coordinator, *numbers = (os.environ[name] for name in VARIABLES)
    for name, number in zip(VARIABLES[1:], numbers, strict=True):
        if not number.isdecimal():
            raise ValueError(f"{name}={number!r} must be a number")
    return coordinator, int(numbers[0]), int(numbers[1])


def virtual_devices() -> int:
    """Returns the number of CPU devices that a launcher sets for each process (JAX_NUM_CPU_DEVICES); 0 if unset."""
    wanted = os.environ.get("JAX_NUM_CPU_DEVICES", "0")
    if not wanted.isdecimal():
        raise ValueError(f"JAX_NUM_CPU_DEVICES={wanted!r} must be a number")
    return int(wanted)


def _join_by(launcher: str) -> None:
    try:
        join_in_time(partial(jax.distributed.initialize, initialization_timeout=JAX_PATIENCE_S), None)
    except (jax.errors.JaxRuntimeError, ResumableError):
        raise  # jax knew the address, but could not connect
    except Exception as error:  # any type: from the Kubernetes client, urllib3 or jax
        said = str(error) or type(error).__name__
        raise ValueError(
            f"{launcher} started this process, but does not say how to join the others ({said}); "
            "give --coordinator, --num_processes and --process_id"
        ) from error


def join_in_time(initialize: Callable[[], None], process: int | None) -> None:
    """Calls `initialize`, which joins by jax, and raises what it raises. `process` is None if only jax knows it.

    ResumableError if not all processes have joined after `PATIENCE_S`, or if process 0 is gone before.
    """
    joined: Future[None] = Future()
    threading.Thread(target=_join, args=(initialize, joined), name="joining", daemon=True).start()
    me = "this process" if process is None else f"process {process}"
    started_s, reached_s, said = time.monotonic(), float("inf"), ""  # `reached_s`: when process 0 was there, if it was
    while not wait([joined], _LOOK_S).done:
        is_there, state = _look()
        now_s = time.monotonic()
        reached_s = now_s if is_there else reached_s
        if now_s - reached_s > _GONE_S:
            raise ResumableError(f"{_process_0()} ended before {me} had joined")
        if now_s - started_s > _QUIET_S and state != said:
            said = state
            print(f"{me} waits for the others, up to {PATIENCE_S:g} s: {state}", file=sys.stderr, flush=True)
        if now_s - started_s > PATIENCE_S:
            raise ResumableError(
                f"{me} could not join the others in {PATIENCE_S:g} s: {state}; start all processes, with one "
                f"--coordinator that every node can reach, and the same --num_processes"
            )
    joined.result()


def _join(initialize: Callable[[], None], joined: "Future[None]") -> None:
    try:
        joined.set_result(initialize())
    except BaseException as error:  # SystemExit too: else the processes would seem to have joined
        joined.set_exception(error)


def _process_0() -> str:
    return f"process 0 at {distributed.global_state.coordinator_address}"


def _look() -> tuple[bool, str]:
    """Returns whether jax's service in process 0 can be reached, and that in words."""
    address = distributed.global_state.coordinator_address
    if address is None:
        return False, "the launcher has not said where process 0 is"
    try:
        socket.create_connection(host_and_port(address), timeout=_CONNECT_S).close()
    except OSError as error:
        return False, f"{_process_0()} cannot be reached ({error.strerror or error})"
    return True, f"{_process_0()} is there, but not all the others are"
