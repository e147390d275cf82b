"""A run on a real Ray cluster of emulated nodes: it grows, loses a worker, shrinks, and learns the same."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from emulating import EMULATED, ctl, running_with
from running import ROOT, XLA_FLAGS, arguments, finish, losses, start

from runtime.events import EventReader

pytestmark = [
    EMULATED,
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs Ray: make .venv/ray-installed"),
]
WAIT_S = 300
# train.py with a pause after each step; process 1 is killed once, some steps after the run has grown.
PROGRAM = """
import itertools, os, signal, sys, time
import train
steps = itertools.count(1)
def hook(step, state, metrics):
    time.sleep(0.5)
    is_it = {{"--num_processes=3", "--process_id=1"}} <= set(sys.argv)
    if next(steps) >= 8 and is_it and not os.path.exists("{marker}"):
        open("{marker}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    sys.exit(train.main(sys.argv, hooks=[hook]))
"""
CHANGES = {"num_steps": 160, "checkpoint__every": 4, "mesh__devices_per_node": 1, "sharding__partition_size": 1}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run on 2 nodes and a head, on a Ray cluster that is up for it."""
    program = tmp_path / "slow_train.py"
    program.write_text(PROGRAM.format(marker=tmp_path / "killed"))
    train = [sys.executable, str(program), *arguments(tmp_path / "run", **CHANGES, mesh__num_cpu_devices=1)]
    driver = [sys.executable, "-m", "engines.ray", "--min_nodes=2", "--max_nodes=3", "--devices_per_node=1"]
    driver += ["--compile_ahead", "--"]
    emulate = ["lab.emulate", f"--name={name(tmp_path)}", "--nodes=3", "--devices_per_node=1"]
    command = [sys.executable, "-m", *emulate, f"--workdir={tmp_path}/nodes", "--", sys.executable, "-m"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": XLA_FLAGS}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "lab.emulate.ray_nodes", *driver, *train],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
        )
    yield process
    process.kill()
    process.wait()


def name(tmp_path: Path) -> str:
    return f"ray-{os.getpid()}-{tmp_path.name[-12:]}"


def await_line(pattern: str, tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    """Waits until the driver has said something."""
    deadline_s = time.monotonic() + WAIT_S
    while not re.search(pattern, text := (tmp_path / "log").read_text()):
        assert process.poll() is None and time.monotonic() < deadline_s, f"no {pattern!r} in\n{text[-4000:]}"
        time.sleep(0.2)


def test_a_run_grows_shrinks_and_survives(cluster: subprocess.Popen[bytes], tmp_path: Path) -> None:
    await_line(r"attempt 1: step \d+ is done", tmp_path, cluster)
    added = f"added-{name(tmp_path)}"  # only to find it
    assert ctl(f"--name={name(tmp_path)}", "add", "--", sys.executable, "-m", "lab.emulate.ray_nodes", added)[0] == 0
    await_line(r"node3 joined: attempt 2 starts ahead: 3 nodes: node1, node2, node3\n", tmp_path, cluster)
    await_line(r"node3 joined: the program is asked to stop", tmp_path, cluster)
    await_line(r"attempt 1 stopped at step \d+: node\d with 75, node\d with 75\n", tmp_path, cluster)
    await_line(r"attempt 2: 3 nodes: node1, node2, node3; idle: none", tmp_path, cluster)
    await_line(r"node2: the program ended by SIGKILL", tmp_path, cluster)
    await_line(r"attempt 3: step \d+ is done", tmp_path, cluster)
    (launcher,) = running_with(added, "ray_nodes")
    os.kill(launcher, signal.SIGTERM)  # Ray drains the node
    await_line(r"node3 is to go: attempt 4 starts ahead: 2 nodes: node1, node2\n", tmp_path, cluster)
    await_line(r"attempt 4: 2 nodes: node1, node2; idle: none", tmp_path, cluster)
    assert cluster.wait(WAIT_S) == 0, (tmp_path / "log").read_text()
    assert not running_with(str(tmp_path))
    events = [event["event"] for event in EventReader(tmp_path / "run").new()]
    assert (
        events.index("ready") < events.index("attempt_stopping") < events.index("stopped") < events.index("lost_peer")
    )
    assert events.count("attempt_started") == events.count("attempt_ended") == 4 and events[-1] == "attempt_ended"

    [(code, _, err)] = finish(start(arguments(tmp_path / "undisturbed", **CHANGES, mesh__num_cpu_devices=2)))
    assert code == 0, err
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "undisturbed"), rtol=1e-5)
