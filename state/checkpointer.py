"""Saves training states through Orbax's AsyncCheckpointer; restores only what verifies.

A save writes into a folder of its own in DIR/unfinished. When the data of all processes is written (Orbax waits for
it), each process hashes its own files. Process 0 writes the manifest, renames the step into DIR, and only then deletes
older steps. A restore verifies all files of a step before it loads any; the processes share that work, too.
"""

import json
import operator
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from configs.schema import CheckpointConfig
from files import atomic, json_objects
from runtime.consensus import Key, broadcast, new_key
from state import check_path, manifest, retention, shared_hashing, tree
from state.quiet import quiet_orbax

_ANNOTATION = re.compile(r" \[\w+(\[\d+\])?='([^'\\]|\\.)*'\]")  # in TensorStore's errors; kilobytes long


class CheckpointError(RuntimeError):
    """A save did not reach the disk. The checkpoints before it are unharmed."""


class Source(StrEnum):
    """Where a state was restored from."""

    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A restored state, with its origin."""

    step: int
    state: Any  # the requested pytree, with arrays in place of shapes
    data: dict[str, Any]  # the position in the data
    config: dict[str, Any]  # the config of the run that saved it
    source: Source = Source.CHECKPOINT
    source_nodes: int = 0  # memory: nodes that held a part of the state
    nodes: int = 0  # memory: nodes of the run

    @property
    def source_text(self) -> str:
        """The source for a message, to follow "from"."""
        if self.source is Source.CHECKPOINT:
            return "its checkpoint"
        return f"memory ({self.source_nodes} of {self.nodes} node{'s' if self.nodes > 1 else ''} had it)"


def print_to_stderr(line: str) -> None:
    """Prints a line to stderr."""
    print(line, file=sys.stderr, flush=True)


class Checkpointer:
    """The checkpoints of one run in one directory that every process can see; a context manager.

    All processes must call the same methods in the same order. Only one run at a time may save into a directory;
    `python -m state` may read it at any time.
    """

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig,
        *,
        report: Callable[[str], None] = print_to_stderr,
        is_same_run: Callable[[dict[str, Any], dict[str, Any]], bool] = operator.eq,
    ) -> None:
        """Opens `directory`, and creates it if necessary. ValueError for a path that Orbax cannot restore from.

        `report` gets a line for each damaged step. `is_same_run(saved, config)` returns whether two configs belong to
        the same run.
        """
        check_path(directory)
        self.directory = Path(directory).absolute()
        self.config = config
        self._report, self._is_same_run = report, is_same_run
        self._has_saved = False
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        quiet_orbax()
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failed:  # must not replace the error that stops the program
            error.add_note(str(failed))
            self._report(str(failed))

    def save(
        self,
        step: int,
        state: Any,
        *,
        data: dict[str, Any],
        config: dict[str, Any],
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Starts saving `state` (a pytree of jax.Array), the data position and the config as `step`.

        Waits for the previous save, and returns as soon as the arrays are copied to the host: then the caller may
        donate or change them. A step that an earlier attempt of this run has saved is not saved again. Raises
        CheckpointError if the previous save failed; ValueError if the step exists and belongs to another run, or if the
        state cannot be saved.
        """
        self.wait()
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"a checkpoint's step must be an integer of at least 0; it is {step!r}")
        arrays, leaves = tree.flatten_arrays(state)
        data, config = _json_copy("data", data), _json_copy("config", config)
        items = ocp.args.Composite(
            state=tree.save_arguments(arrays), data=ocp.args.JsonSave(data), config=ocp.args.JsonSave(config)
        )
        metrics = {name: float(value) for name, value in (metrics or {}).items()}
        folder = self.directory / str(step)
        try:
            is_there = broadcast(new_key("is-there"), folder.exists)
            damage = shared_hashing.damage(folder, new_key("saved")) if is_there else None

            def prepare() -> str | None:
                return None if is_there and self._is_saved(step, damage, data, config) else self._prepare()

            parent = broadcast(new_key("prepare"), prepare)
        except (OSError, RuntimeError) as error:
            raise self._failed(step, error) from error
        if parent is None:
            return
        self._has_saved = True
        unfinished = self.directory / manifest.UNFINISHED / parent / str(step)
        keys = new_key("written"), new_key("hashes"), new_key("commit")
        try:
            writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
            writer.save(unfinished, args=items)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(step, error) from error
        self._thread = threading.Thread(
            target=self._finish, args=(writer, unfinished, keys, step, leaves, metrics), name=f"checkpoint-{step}"
        )
        self._thread.start()

    def restore(self, abstract_state: Any, *, newer_than: int = -1) -> Restored | None:
        """Returns the newest step that verifies, with the shardings of `abstract_state`; None if there is no step.

        With `newer_than` only newer steps are considered, and None means that there is no newer one.

        `abstract_state` is a pytree of jax.ShapeDtypeStruct with shardings, on any mesh: it need not be the one from
        which the state was saved. Damaged steps are reported and moved into DIR/set_aside. Raises ValueError if there
        are steps but none verifies, or if the newest that does is of another model; OSError if a process cannot read a
        file. Then nothing is moved.
        """
        self.wait()
        wanted = tree.flatten_abstract(abstract_state)
        step = self._choose(wanted, newer_than)
        if step is None:
            return None
        folder = self.directory / str(step)
        arrays = tree.load(folder / "state", wanted, manifest.read(folder).tree)
        return Restored(
            step=step,
            state=jax.tree.unflatten(jax.tree.structure(abstract_state), arrays),
            data=json_objects.read(folder / manifest.DATA_FILE, lenient=True),
            config=json_objects.read(folder / manifest.CONFIG_FILE, lenient=True),
        )

    def steps(self) -> list[int]:
        """Returns the steps with a valid manifest, ascending. Their data is not read."""
        return [found.step for found in manifest.committed(self.directory)]

    def latest_step(self) -> int | None:
        """Returns the newest committed step, or None."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Returns when the save in progress is committed. Raises CheckpointError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits for the save in progress. Raises CheckpointError if it failed."""
        self.wait()
        if self._has_saved and jax.process_index() == 0:
            retention.remove_unfinished(self.directory)

    def _prepare(self) -> str:
        """Removes unfinished saves, and returns the name of a new folder in DIR/unfinished (process 0).

        A new one each time, because TensorStore may still be writing into that of a failed save.
        """
        retention.remove_unfinished(self.directory)
        name = secrets.token_hex(8)
        (self.directory / manifest.UNFINISHED / name).mkdir(parents=True)
        return name

    def _is_saved(self, step: int, damage: str | None, data: dict[str, Any], config: dict[str, Any]) -> bool:
        """Whether this run has saved `step` before; a step with `damage` is set aside (process 0).

        ValueError if another run has saved it. An earlier attempt may save a step late: if its process 0 is stopped
        during a commit, and continues.
        """
        folder = self.directory / str(step)
        if not folder.exists():
            return False
        if damage is not None:
            self._set_aside({step: damage}, f"step {step} is saved again")
            return False
        files = (manifest.DATA_FILE, manifest.CONFIG_FILE)
        saved_data, saved_config = (json_objects.read(folder / file, lenient=True) for file in files)
        if saved_data != data or not self._is_same_run(saved_config, config):
            raise ValueError(f"{folder} is a checkpoint of another run; choose another directory")
        self._report(f"{folder} was saved by an earlier attempt of this run and verifies: it stays")
        return True

    def _finish(
        self,
        writer: ocp.AsyncCheckpointer,
        folder: Path,
        keys: tuple[Key, Key, Key],
        step: int,
        leaves: tuple[manifest.Leaf, ...],
        metrics: dict[str, float],
    ) -> None:
        """Waits for the data, commits the step, and deletes old ones. Runs in a thread; `wait` raises its error."""
        written, hashes, commit = keys
        failed: Exception | None = None
        try:
            writer.close()  # when it has finished
        except Exception as error:  # passed on to the other processes
            failed = error

        def check_written() -> None:
            if failed:
                raise failed

        try:
            broadcast(written, check_written)  # Orbax's last renames are made in process 0
            found = shared_hashing.describe(folder, hashes, check_written)
            broadcast(commit, lambda: self._commit(folder, shared_hashing.all_files(found), step, leaves, metrics))
        except Exception as error:
            self._error = self._failed(step, error)
            self._error.__cause__ = error

    def _commit(
        self,
        folder: Path,
        files: tuple[manifest.File, ...],
        step: int,
        leaves: tuple[manifest.Leaf, ...],
        metrics: dict[str, float],
    ) -> None:
        """Writes the manifest, renames the step from DIR/unfinished into DIR, and deletes old steps (process 0)."""
        manifest.write(folder, manifest.build(folder, files, step=step, tree=leaves, metrics=metrics))
        folder.rename(self.directory / str(step))
        atomic.sync(self.directory)
        retention.remove_old(self.directory, self.config)

    def _choose(self, wanted: Mapping[str, tree.Wanted], newer_than: int) -> int | None:
        """Returns the newest step that verifies, the same in every process."""
        steps = broadcast(new_key("steps"), lambda: manifest.step_numbers(self.directory))
        chosen, damaged = None, {}
        for step in reversed([step for step in steps if step > newer_than]):
            damage = shared_hashing.damage(self.directory / str(step), new_key("verified"))
            if damage is None:
                chosen = step
                break
            damaged[step] = damage
        return broadcast(new_key("restore"), lambda: self._settle(chosen, damaged, wanted, newer_than))

    def _settle(
        self, chosen: int | None, damaged: dict[int, str], wanted: Mapping[str, tree.Wanted], newer_than: int
    ) -> int | None:
        """Sets the damaged steps aside and returns `chosen`, a step that verifies, or None (process 0)."""
        if chosen is not None:
            folder = self.directory / str(chosen)
            tree.check_same_model(folder, manifest.read(folder).tree, wanted)
            self._set_aside(damaged, f"step {chosen} is used instead")
        elif newer_than >= 0:
            self._set_aside(damaged, f"step {newer_than} is used instead")
        elif damaged:
            found = "; ".join(f"step {step}: {damage}" for step, damage in damaged.items())
            raise ValueError(
                f"no checkpoint in {self.directory} verifies ({found});"
                " put a good copy back, or start again in an empty directory"
            )
        return chosen

    def _set_aside(self, damaged: dict[int, str], instead: str) -> None:
        for step, damage in damaged.items():
            target = retention.set_aside(self.directory, step)
            self._report(f"checkpoint {self.directory / str(step)} is damaged ({damage}): moved to {target}; {instead}")

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        reason = _ANNOTATION.sub("", " ".join((str(error) or type(error).__name__).split()))
        if len(reason) > 300:  # TensorStore's messages begin with paths and end with the cause
            reason = f"{reason[:100]} ... {reason[-180:]}"
        return CheckpointError(
            f"saving step {step} to {self.directory} failed: {reason}; the checkpoints before it are unharmed"
            f" (newest: {self.latest_step()}); see that the disk has room and can be written, then run again"
        )


def _json_copy(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of `value` as JSON gives it back, so that the caller may change the original."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint's {name} must be JSON (dicts, lists, strings, numbers): {error}") from error
