"""Starts a real Ray cluster on emulated nodes: a Ray node on each, and a program on the head node.

    python -m launch.emulate --nodes=5 --devices_per_node=2 --rate=200mbit -- \\
      python -m launch.emulate.ray_nodes python -m launch.ray --min_nodes=1 --max_nodes=4 -- python train.py ...

Node 0 runs Ray's head and the program, but provides none of Ray's CPUs, so that it does not train. To add a node, run
`python -m launch.emulate ctl add -- python -m launch.emulate.ray_nodes`. These Ray settings detect a dead node within
seconds, use little memory, and start no dashboard.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PORT = 6379
# `ray start` requires a token if ~/.ray/auth_token exists, and any ray.init() of the user creates that file. A client
# that connects by address does not send the token. No other user can reach these nodes.
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
SETTINGS = {
    **NO_TOKEN,
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",  # by default 15, which train.py would inherit
}
QUIET = ("--object-store-memory=80000000", "--disable-usage-stats", "--include-log-monitor=false", "--block")
OF_THE_EMULATOR = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
LEAVE_S = 40.0  # `ray start --block` drains its node for up to 30 s
ANSWER_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Runs a Ray node until the head ends.

    Node 0 also runs the head and the program, and returns the program's exit code.
    """
    head = os.environ["MASTER_ADDR"]
    if os.environ.get("JAX_PROCESS_ID") == "0":
        with ray_node(["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]) as node:
            while answers(head) is not True:
                if node.poll() is not None:
                    said = f"error: Ray's head ended with exit code {node.returncode}; is port {PORT} in use?"
                    print(said, file=sys.stderr)
                    return 1
                time.sleep(0.1)
            return run_program(argv[1:], head)
    while answers(head) is not True:
        time.sleep(0.1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves the context below, which drains the node
    while answers(head) is not False:  # a node that Ray has declared dead after a network failure joins again
        with ray_node([f"--address={head}:{PORT}", "--num-cpus=1"]) as node:
            while node.poll() is None and answers(head) is not False:
                time.sleep(1.0)
    return 0


@contextlib.contextmanager
def ray_node(options: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a Ray node at the address of this host while the context is open."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_THE_EMULATOR} | SETTINGS
    here = socket.gethostbyname(socket.gethostname())
    ray = str(Path(sys.executable).with_name("ray"))
    node = subprocess.Popen(
        [ray, "start", f"--node-ip-address={here}", *options, *QUIET], env=environment, stdout=subprocess.DEVNULL
    )
    try:
        yield node
    finally:
        node.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(LEAVE_S)
        node.kill()


def run_program(command: Sequence[str], head: str) -> int:
    """Runs the program, forwards signals to it, and returns its exit code as a shell does."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_THE_EMULATOR}
    process = subprocess.Popen(command, env=environment | NO_TOKEN | {"RAY_ADDRESS": f"{head}:{PORT}"})
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    return code if code >= 0 else 128 - code


def answers(head: str) -> bool | None:
    """Returns whether Ray's head listens: False if its host refuses the connection, None without an answer."""
    try:
        socket.create_connection((head, PORT), ANSWER_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv))
