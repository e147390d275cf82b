"""`WORKDIR/rounds.jsonl`: the steps of each worker in each round of asynchronous local SGD.

A line is {"round": 3, "replicas": [0, 1, 2], "steps": [20, 20, 6]}: the replicas that answered at the end of the round,
and the steps of each worker. The first line of a round counts, so that all replicas agree on the round.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.files import json_lines, locks

_LOCK_S = 1.0  # a process stopped while it holds the lock must not block the others for longer


@dataclass(frozen=True, kw_only=True)
class Round:
    """How a round ended."""

    replicas: list[int]  # that answered
    steps: list[int]  # by worker


class RoundRecord:
    """The recorded rounds of a run. Threads that call its methods hold one lock."""

    def __init__(self, file: Path, num_workers: int) -> None:
        self._file, self.num_workers = file, num_workers
        self.rounds: dict[int, Round] = {}  # by number, from 0 on
        self._offset = 0  # where unread lines begin

    def find(self, number: int) -> Round | None:
        """Returns a round; None if it is not recorded. ValueError for a record of other workers, or of no rounds."""
        if number not in self.rounds:
            self._read()
        return self.rounds.get(number)

    def add(self, number: int, ended: Round) -> Round:
        """Records a round unless it is recorded already; returns the recorded one. OSError if that fails."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as opened:
            with contextlib.suppress(BlockingIOError, locks.NoLocksError):
                locks.take(opened.fileno(), wait_s=_LOCK_S)
            if (known := self.find(number)) is None:
                is_torn = os.fstat(opened.fileno()).st_size > self._offset
                opened.write(b"\n" * is_torn + json.dumps({"round": number, **asdict(ended)}).encode() + b"\n")
                opened.flush()
                os.fsync(opened.fileno())
                self._read()  # without the lock another line may be first
                known = self.rounds[number]
        return known

    def _read(self) -> None:
        """Reads the new complete lines, without the torn ones."""
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as opened:
            opened.seek(self._offset)
            whole, end, _ = opened.read().rpartition(b"\n")
            for row in filter(None, map(json_lines.parsed, whole.splitlines())):
                try:
                    number, recorded = int(row["round"]), Round(replicas=[*row["replicas"]], steps=[*row["steps"]])
                except (KeyError, TypeError, ValueError):
                    raise ValueError(f"{self._file} has a line that is no round: {str(row)[:80]}; remove it") from None
                if (count := len(recorded.steps)) != self.num_workers:
                    raise ValueError(
                        f"{self._file} has rounds of {count} workers, not of {self.num_workers}; set "
                        f"sharding.shares={count}, or give another --workdir"
                    )
                self.rounds.setdefault(number, recorded)
            self._offset += len(whole) + len(end)
