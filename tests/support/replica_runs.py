"""Helpers that tests/test_replicas_runs.py shares with other test files."""

import json
import subprocess
from pathlib import Path
from typing import Any

from support.running import (
    arguments,
    finish,
    rows,
    start,
    wait_until,
)

NUM_STEPS, REPLICAS, PAUSE_S = 500, 3, 0.5  # the pauses of all steps outlast the events, on slow machines too
SETTINGS: dict[str, Any] = {
    "num_steps": NUM_STEPS,
    "sharding__replicas": "independent",
    "sharding__strategy": "zero3",
    "sharding__partition_size": 0,
    "mesh__num_cpu_devices": 2,
    "mesh__devices_per_node": 2,
    "checkpoint__every": 15,
    "elastic__silence_s": 2,
    "compression__error_feedback": False,
}
COMPILES_NOTHING = """
from training.independent import Independent
Independent.__call__ = running.compiling_nothing(Independent.__call__)
"""


class Run:
    """A run's replicas; they take long for a step as long as the file `slowly` is there."""

    def __init__(self, workdir: Path, **changes: Any) -> None:
        self.workdir, self.slowly = workdir, workdir.with_suffix(".slowly")
        self._arguments = arguments(workdir, **SETTINGS | changes)
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, group: int, first: str = "") -> None:
        """Starts a replica, which ends where a step compiles anything; `first` is as in `running.start`."""
        pauses = f"parts['hooks'].append(running.pause({PAUSE_S}, while_there={str(self.slowly)!r}))"
        first = f"{pauses}\n{COMPILES_NOTHING}\n{first}"
        self.processes[group] = start([*self._arguments, f"--group={group}"], first=first)

    def folder(self, group: int) -> Path:
        """Returns a replica's own directory."""
        return self.workdir / "replicas" / str(group)

    def until(self, group: int, steps: int) -> None:
        """Waits until a replica has logged so many steps more."""
        steps += self.last(group)
        wait_until(lambda: self.last(group) >= steps, self.processes[group])

    def last(self, group: int) -> int:
        """Returns the last step that a replica has logged."""
        path = self.folder(group) / "metrics.jsonl"
        *lines, _ = path.read_text().split("\n") if path.exists() else [""]  # the last line is still being written
        return json.loads(lines[-1])["step"] if lines else 0

    def stop(self, group: int, number: int, code: int) -> None:
        """Ends a replica by a signal."""
        self.processes[group].send_signal(number)
        (ended,) = finish(self.processes[group])
        assert ended[0] == code, ended

    def losses(self, group: int) -> dict[int, tuple[float | None, float]]:
        """Returns the loss and the gradients' norm of each step that a replica did; delayed, the first has no loss."""
        return {row["step"]: (row.get("loss"), row["grad_norm"]) for row in rows(self.folder(group))}
