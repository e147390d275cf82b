"""`train.py --standby` waits for its turn; tests/test_chaos.py has runs that take it."""

import signal
from pathlib import Path

from running import arguments, finish, start, wait_until

from runtime.events import Event, EventReader


def test_it_is_asked_to_stop_before_its_turn(tmp_path: Path) -> None:
    """It has touched nothing but the events, in which it says that it has compiled."""
    workdir, reader = tmp_path / "run", EventReader(tmp_path / "run")
    waiting = start([*arguments(workdir), "--config.mesh.num_cpu_devices=2", "--standby"])
    try:
        wait_until(lambda: any(event["event"] == Event.READY for event in reader.new()), waiting)
        waiting.send_signal(signal.SIGTERM)
    finally:
        ((code, _, err),) = finish(waiting)
    assert code == 75 and [path.name for path in workdir.iterdir()] == ["events.jsonl"], err
