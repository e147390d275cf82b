"""Measures CPU time and page faults per step, of one of two processes of a node; contention affects these least.

    python -m benchmarks.step_cpu [--config.sharding.gather=micro_step ...]

The standard workload on 2 devices, mics(2), over gloo on the loopback interface. No link is slow, so this measures
compute, packing and the copies of the network stack. Prints one line per step.
"""

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

import train

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("--config=configs/standard.py", "--config.batch.global_size=8", "--config.num_steps=4")


def main() -> int:
    """Runs the step as two processes of this program; returns the exit code of the one that failed, if one did."""
    if "JAX_PROCESS_ID" in os.environ:
        return measured(sys.argv[1:])
    with socket.create_server(("127.0.0.1", 0)) as free, tempfile.TemporaryDirectory() as workdir:
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "1"}
        command = [sys.executable, "-m", "benchmarks.step_cpu", *FLAGS, f"--workdir={workdir}", *sys.argv[1:]]
        both = [
            subprocess.Popen(command, cwd=ROOT, env={**os.environ, **common, "JAX_PROCESS_ID": str(i)})
            for i in range(2)
        ]
        return max(process.wait() for process in both)


def measured(flags: list[str]) -> int:
    """Runs train.py in this process, with a line for each step of process 0."""
    marks: list[list[float]] = []

    def observe(step: int, state: Any, metrics: Any) -> None:
        jax.block_until_ready((step, state, metrics))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        marks.append([time.perf_counter(), usage.ru_utime, usage.ru_stime, usage.ru_minflt])
        if len(marks) > 1 and os.environ["JAX_PROCESS_ID"] == "0":
            wall_s, user_s, system_s, faults = (new - old for old, new in zip(*marks[-2:], strict=True))
            print(f"wall {wall_s:.2f} s, user {user_s:.2f} s, system {system_s:.2f} s, page faults {faults:.0f}")

    return train.main(["train.py", *flags], hooks=[observe])


if __name__ == "__main__":
    sys.exit(main())
