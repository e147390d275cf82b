"""`train.py --standby`: it compiles beside a run that trains, and goes on where that stopped."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import arguments, finish, losses, start, start_together, steps_logged, wait_until

from runtime.events import Event, EventReader

Process = subprocess.Popen[str]


@pytest.fixture
def started() -> Iterator[Callable[[Process], Process]]:
    """Notes processes, which end with the test."""
    noted: list[Process] = []

    def note(process: Process) -> Process:
        noted.append(process)
        return process

    yield note
    for process in noted:
        process.kill()
        process.communicate()


def await_ready(process: Process, workdir: Path) -> None:
    reader = EventReader(workdir)
    wait_until(lambda: any(event["event"] == Event.READY for event in reader.new()), process)


@pytest.mark.slow
def test_it_goes_on_where_the_last_one_stopped(tmp_path: Path, started: Callable[[Process], Process]) -> None:
    """Two processes wait beside one that trains, and have touched nothing when it stops."""
    (tmp_path / "memory").mkdir(mode=0o700)
    memory = {"elastic__snapshot_every": 1, "elastic__memory_dir": tmp_path / "memory"}
    args = arguments(tmp_path / "run", num_steps=100000, checkpoint__every=0, **memory)
    old = started(start([*args, "--config.mesh.num_cpu_devices=2"], pause_s=0.1))
    wait_until(lambda: steps_logged(tmp_path / "run") > 0, old)
    coming = [*map(started, start_together([*args, "--standby"], 2, devices=1, pause_s=0.05))]
    await_ready(coming[0], tmp_path / "run")
    assert len(began_at(tmp_path)) == 1
    before = steps_logged(tmp_path / "run")
    wait_until(lambda: steps_logged(tmp_path / "run") > before, old)
    old.send_signal(signal.SIGTERM)
    ((code, _, err),) = finish(old)
    assert code == 75, err
    stopped_at = steps_logged(tmp_path / "run")
    assert len(began_at(tmp_path)) == 1
    coming[0].send_signal(signal.SIGUSR1)
    wait_until(lambda: steps_logged(tmp_path / "run") > stopped_at + 2, coming[0])
    coming[1].send_signal(signal.SIGTERM)
    outcomes = finish(*coming)
    assert [code for code, _, _ in outcomes] == [75, 75], outcomes
    assert f"resumed at step {stopped_at} of " in outcomes[0][1] and began_at(tmp_path) == [0, stopped_at]
    assert len(losses(tmp_path / "run")) > stopped_at


def test_it_is_asked_to_stop_before_its_turn(tmp_path: Path, started: Callable[[Process], Process]) -> None:
    waiting = started(start([*arguments(tmp_path / "run"), "--config.mesh.num_cpu_devices=2", "--standby"]))
    await_ready(waiting, tmp_path / "run")
    waiting.send_signal(signal.SIGTERM)
    ((code, _, err),) = finish(waiting)
    assert code == 75 and [path.name for path in (tmp_path / "run").iterdir()] == ["events.jsonl"], err


def began_at(folder: Path) -> list[int]:
    return json.loads((folder / "run" / "attempts.json").read_text())["began_at"]
