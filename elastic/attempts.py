"""The attempts of a run: the id that marks its snapshots, and the step at which each attempt began.

Only process 0 reads and writes `WORKDIR/attempts.json`. It contains no times, so it does not depend on clocks.
"""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from elastic import manifest
from runtime.consensus import broadcast, new_key
from runtime.files import atomic, json_objects, run_directory
from runtime.files.json_objects import JsonMapping, JsonObject

RUN_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The step at which a run was given more steps (`--extend`), and its `num_steps` before and after."""

    step: int
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """The content of `attempts.json`."""

    run_id: str
    folder: int  # inode of the work directory: a copy of the directory is another run
    began_at: tuple[int, ...] = ()  # the first step of each attempt
    saved: int = 0  # the newest checkpoint at the time of writing
    extended: tuple[Extension, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for values that no attempt writes: the id names a folder that is deleted at the end."""
        if not isinstance(self.run_id, str) or not RUN_ID.fullmatch(self.run_id):
            raise ValueError(f"run_id is {self.run_id!r}")
        if not all(isinstance(number, int) for number in (self.folder, self.saved, *self.began_at)):
            raise ValueError(f"numbers are {self.folder!r}, {self.saved!r}, {self.began_at!r}")
        if not all(isinstance(number, int) for one in self.extended for number in asdict(one).values()):
            raise ValueError(f"extended is {self.extended!r}")

    def has_discarded(self, history: tuple[int, ...], step: int) -> bool:
        """Whether `step`, saved by an earlier attempt, is not in the run's past any more.

        `history` is the `began_at` of that attempt. The run discarded the step if a later attempt began before it, or
        if an older copy replaced the run's directory.
        """
        began_after = self.began_at[len(history) :]
        return history != self.began_at[: len(history)] or any(began < step for began in began_after)


def read_attempts(workdir: Path, report: Callable[[str], None]) -> Attempts:
    """Returns the attempts so far, the same in every process. For a new run, returns an id without attempts."""

    def answer() -> JsonObject:
        workdir.mkdir(parents=True, exist_ok=True)
        file, folder = workdir / run_directory.ATTEMPTS, workdir.stat().st_ino
        new = Attempts(run_id=secrets.token_hex(8), folder=folder)
        if not file.exists():
            return asdict(new)
        try:
            found = _from_json(json_objects.parse(json_objects.read_bytes(file), "it"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}); remove it: the checkpoints do not need it") from error
        if found.folder != folder:
            report(
                f"{workdir} is a copy of another run's directory: it does not use that run's snapshots in memory (or "
                "its file system gives it another inode at each mount, as gcsfuse may: elastic.snapshot_every=0 there)"
            )
            return asdict(new)
        return asdict(found)

    return _from_json(broadcast(new_key("attempts"), answer))


def write_attempts(workdir: Path, attempts: Attempts) -> Attempts:
    """Writes the attempts and the newest checkpoint to disk (in process 0), and returns them."""

    def answer() -> int:
        now = replace(attempts, saved=newest_checkpoint(workdir))
        # Durable: if this attempt were lost, its snapshots would belong to an unknown history.
        atomic.replace(workdir / run_directory.ATTEMPTS, json.dumps(asdict(now)) + "\n", durable=True)
        return now.saved

    return replace(attempts, saved=broadcast(new_key("attempt"), answer))


def newest_checkpoint(workdir: Path) -> int:
    """Returns the newest step with a checkpoint, except steps that were set aside; 0 without checkpoints."""
    return max([0, *manifest.step_numbers(workdir / run_directory.CHECKPOINTS)])


def newest_set_aside(workdir: Path) -> int:
    """Returns the newest step that was set aside, or 0."""
    aside = workdir / run_directory.CHECKPOINTS / manifest.SET_ASIDE
    steps = [entry.name.split("-")[0] for entry in aside.glob("*")]
    return max([0, *(int(step) for step in steps if step.isdecimal())])


def _from_json(content: JsonMapping) -> Attempts:
    began_at = content["began_at"]
    if not isinstance(began_at, list | tuple):
        raise ValueError(f"began_at is {began_at!r}")
    extended = tuple(Extension(**one) for one in content.get("extended", ()))
    return Attempts(**{**content, "began_at": tuple(began_at), "extended": extended})
