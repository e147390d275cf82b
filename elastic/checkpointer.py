"""Saves training states through Orbax's AsyncCheckpointer; restores only states that verify.

Each save writes into a separate folder in DIR/unfinished. When the data of all processes is written (Orbax waits for
it), each process hashes the files that it wrote; process 0 also hashes the files that Orbax wrote for all processes.
Process 0 writes the manifest, renames the step into DIR, and only then deletes older steps. A restore verifies all
files of a step before it loads any: each process about the same number of bytes.

Independent replicas share a directory, and one of them saves. For a moment two may save, or one replica may read a step
while another deletes it. So a failed save counts as done if this step or a newer one has been saved, and a failed
restore has to be repeated.
"""

import itertools
import json
import operator
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from configs.schema import CheckpointConfig
from elastic import check_path, manifest, tree
from elastic.quiet import quiet_orbax
from elastic.tree import Restored
from runtime.command_line import print_to_stderr, printable
from runtime.consensus import TIMEOUT_S, AgreementKey, all_gather, barrier, broadcast, gather, new_key
from runtime.exit_codes import ResumableError
from runtime.files import atomic, json_objects
from runtime.files.json_objects import JsonObject
from sharding.trees import PyTree

_ANNOTATION = re.compile(r" \[\w+(\[\d+\])?='([^'\\]|\\.)*'\]")  # in TensorStore's errors; kilobytes long


class CheckpointError(RuntimeError):
    """A save did not reach the disk. The checkpoints before it are unharmed."""


class Checkpointer:
    """The checkpoints of one run in one directory that every process can see; a context manager.

    All processes must call the same methods in the same order. Only one run at a time may save into a directory, from
    one program or from independent replicas; `python -m elastic` may read it at any time.
    """

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig,
        *,
        report: Callable[[str], None] = print_to_stderr,
        is_same_run: Callable[[JsonObject, JsonObject], bool] = operator.eq,
        replica: int | None = None,
    ) -> None:
        """Opens `directory`, creates it if necessary, and removes unfinished saves.

        ValueError for a path that Orbax cannot restore from.

        `report` gets a line for each damaged step, and for each save that failed without loss. `is_same_run(saved,
        config)` returns whether two configs belong to the same run. `replica`: the number of this program among the
        replicas of the run, which may save the same steps.
        """
        check_path(directory)
        self.directory = Path(directory).absolute()
        self.config = config
        self._report = lambda line: report(printable(line))
        self._is_same_run, self._replica = is_same_run, replica
        self._begun: set[int] = set()  # steps that the restore in progress has begun to read
        self._own = "" if replica is None else f"{replica}-"  # how its folders' names in DIR/unfinished begin
        self._has_saved = False
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[None]] | None = None  # the step of the save in progress
        quiet_orbax()
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished(blocks=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failed:  # must not replace the error that stops the program
            error.add_note(str(failed))
            self._report(str(failed))

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data: JsonObject,
        config: JsonObject,
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Starts saving `state` (a pytree of jax.Array), the data position and the config as `step`.

        Waits for the previous save, and returns as soon as the arrays are copied to the host: then the caller may
        donate or change them. If the previous save failed, waits for this one too. A step that an earlier attempt of
        this run has saved is not saved again. Raises CheckpointError if this save failed; in a replica ResumableError,
        if this or the previous one did; ValueError if the step exists and belongs to another run, or if the state
        cannot be saved.
        """
        has_failed = False
        try:
            self.wait()
        except CheckpointError as error:  # the disk may have room by now, and this may be the last chance
            has_failed = True
            if jax.process_index() == 0:
                self._report(f"{error}; step {step} is tried first")
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
            found = damage(folder, new_key("saved")) if is_there else None

            def prepare() -> str | None:
                return None if is_there and self._is_saved(step, found, data, config) else self._prepare()

            parent = broadcast(new_key("prepare"), prepare)
        except (OSError, RuntimeError) as error:  # the same in every process; raised as one in the background
            failed: Future[None] = Future()
            failed.set_exception(error)
            self._saving, parent = (step, failed), None
        if parent is None:
            if has_failed:
                self.wait()
            return
        self._has_saved = True
        unfinished = self.directory / manifest.UNFINISHED / parent / str(step)
        keys = new_key("cut"), new_key("hashes"), new_key("commit")
        topics = iter(("orbax-written", "orbax-merged"))
        meet = lambda **_: barrier(next(topics))
        options = ocp.AsyncOptions(timeout_secs=TIMEOUT_S, barrier_sync_fn=meet)
        writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options)
        try:
            writer.save(unfinished, args=items)
        except (OSError, ValueError, RuntimeError) as error:
            writer.close()
            if jax.process_index() == 0:
                self._discard(unfinished.parent)
            self._failed(step, error)
            return
        described = {"step": step, "tree": leaves, "metrics": metrics}
        padded = {leaf.path: leaf.shape for leaf in leaves if leaf.shape != arrays[leaf.path].shape}
        self._saving = step, self._executor.submit(self._finish, writer, topics, unfinished, keys, described, padded)
        if has_failed:
            self.wait()

    def restore(self, abstract_state: PyTree, *, newer_than: int = -1) -> Restored | None:
        """Returns the newest step that verifies, with the shardings of `abstract_state`; None without any step.

        With `newer_than` only newer steps are considered, and None means that no step is newer.

        `abstract_state` is a pytree of jax.ShapeDtypeStruct with shardings, on any mesh: it may differ from
        the mesh of the save. Damaged steps are reported and moved into DIR/set_aside. Raises ValueError if no step
        verifies, or if the newest step that verifies belongs to another model; OSError if a process cannot read a file
        (nothing is moved then); ResumableError if another replica has moved or deleted a step meanwhile.
        """
        self.wait()
        self._begun.clear()
        try:
            return self._restore(abstract_state, newer_than)
        except Exception as error:
            there: list[int] = []  # none if the file system is gone
            with suppress(OSError):
                there = manifest.step_numbers(self.directory)
            if self._replica is not None and there and (gone := self._begun.difference(there)):
                raise ResumableError(
                    f"another replica moved or deleted step {max(gone)} in {self.directory} while it was read: run the "
                    "same command again, with a larger checkpoint.every or checkpoint.keep_last if this comes again"
                ) from error
            raise

    def _restore(self, abstract_state: PyTree, newer_than: int) -> Restored | None:
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

    def _newest_now(self) -> int | None:
        """Returns `latest_step()`, or None if the file system is gone."""
        with suppress(OSError):
            return self.latest_step()
        return None

    def wait(self) -> None:
        """Returns when the save in progress is committed. If the save failed, raises the errors of `_failed`."""
        if self._saving is None:
            return
        (step, saving), self._saving = self._saving, None
        try:
            saving.result()
        except Exception as error:
            self._failed(step, error)

    def close(self) -> None:
        """Waits for the save in progress. Raises CheckpointError if it failed."""
        self.wait()
        if self._has_saved and jax.process_index() == 0:
            self._remove_unfinished()

    def _prepare(self) -> str:
        """Removes unfinished saves, and returns the name of a new folder in DIR/unfinished (process 0).

        Each save has a new folder, because TensorStore may still be writing into the folder of a failed save.
        """
        self._remove_unfinished()
        name = f"{self._own}{secrets.token_hex(8)}"
        (self.directory / manifest.UNFINISHED / name).mkdir(parents=True)
        return name

    def _remove_unfinished(self, *, blocks: bool = False) -> None:
        """Deletes the files of killed and failed saves; the next call deletes files that cannot be deleted now.

        A replica deletes its own files. The other replicas' saves may be in progress, so only their obsolete ones are
        deleted. `blocks`: also delete the files that `_discard` put in their place.
        """
        unfinished, newest = self.directory / manifest.UNFINISHED, self._newest_now()
        with suppress(OSError):
            for save in [*unfinished.iterdir()]:
                is_own = save.name.startswith(self._own)
                if save.is_dir() and (is_own or (newest is not None and _least_step(save) <= newest)):
                    shutil.rmtree(save, ignore_errors=True)
                elif is_own and blocks:
                    with suppress(OSError):
                        save.unlink()
        if self._replica is None:
            with suppress(OSError):
                unfinished.rmdir()

    def _discard(self, save: Path) -> None:
        """Deletes a failed save, and puts an empty file in its place (process 0).

        TensorStore and Orbax may continue to write to this path and would create the folder again. A file in its
        place prevents that.
        """
        for attempt in range(10):
            leaving = save.with_name(f"{save.name}-{attempt}")
            with suppress(OSError):
                save.rename(leaving)  # at once, so that nothing is added to it while it is deleted
            shutil.rmtree(leaving, ignore_errors=True)
            with suppress(OSError):
                save.touch(exist_ok=False)
                return

    def _is_saved(self, step: int, damaged: str | None, data: JsonObject, config: JsonObject) -> bool:
        """Whether this run has saved `step` before; a damaged step is set aside (process 0).

        ValueError if another run has saved it. An earlier attempt may save a step late: if its process 0 is stopped
        during a commit, and continues. Another replica may have saved it, too.
        """
        if damaged is not None:
            self._set_aside({step: damaged}, f"step {step} is saved again")
            return False
        folder, files = self.directory / str(step), (manifest.DATA_FILE, manifest.CONFIG_FILE)
        saved_data, saved_config = (json_objects.read(folder / file, lenient=True) for file in files)
        if saved_data != data or not self._is_same_run(saved_config, config):
            raise ValueError(f"{folder} is a checkpoint of another run; choose another directory")
        self._report(f"{folder} was saved by an earlier attempt or another replica of this run and verifies: it stays")
        return True

    def _finish(
        self,
        writer: ocp.AsyncCheckpointer,
        topics: Iterator[str],
        folder: Path,
        keys: tuple[AgreementKey, AgreementKey, AgreementKey],
        described: JsonObject,
        padded: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Waits for the data, and commits the step that is `described`. Runs in a thread; `wait` raises its error.

        `topics` name the coming barriers, at which the writer threads of the processes wait for each other. `padded`
        has the true shapes of the padded arrays.
        """
        cut, hashes, commit = keys
        count = jax.process_count()
        whose = f"process {jax.process_index()} on {socket.gethostname()}: " if count > 1 else ""

        def result(act: Callable[[], object]) -> JsonObject:
            try:
                return {"found": act()}
            except Exception as error:  # passed on to the other processes
                return {"error": f"{whose}{str(error) or type(error).__name__}"}

        def unpadded() -> None:
            if "error" not in closed:
                tree.cut_padding(folder / "state", padded)

        def hashed() -> list[JsonObject]:
            return [asdict(file) for file in manifest.describe(folder, jax.process_index(), count)]

        closed = result(writer.close)  # when it has finished, and process 0 has made the last renames
        for topic in topics:  # it has failed: the others need not wait for it
            barrier(topic)
        if padded:  # process 0 changes files that any process may hash
            was_cut = result(lambda: broadcast(cut, unpadded))
            closed = closed if "error" in closed else was_cut
        by_process = gather(hashes, closed if "error" in closed else result(hashed))
        broadcast(commit, lambda: self._commit(folder, by_process, described))

    def _commit(self, folder: Path, by_process: list[JsonObject], described: JsonObject) -> None:
        """Writes the manifest, renames the step from DIR/unfinished into DIR, and deletes old steps (process 0).

        If this or another process fails, the written files are deleted to free the space for metrics and other runs.
        """
        try:
            files = [manifest.File(**file) for files in _found(by_process) for file in files]
            manifest.write(folder, manifest.build(folder, files, **described))
            folder.rename(self.directory / folder.name)
        except Exception:
            self._discard(folder.parent)
            raise
        with suppress(OSError):
            folder.parent.rmdir()
        atomic.sync(self.directory)
        self._remove_old()

    def _remove_old(self) -> None:
        """Deletes the steps that are not to be kept. Those without a valid manifest are neither counted nor deleted.

        A step that cannot be deleted now, such as a step with a file that another host has open over NFS, is left for
        the next save.
        """
        manifests = manifest.committed(self.directory)
        for step in {found.step for found in manifests} - kept_steps(manifests, self.config):
            # renamed first, so that an interrupted deletion leaves no partial step
            leaving = self.directory / manifest.UNFINISHED / "deleted" / str(step)
            try:
                leaving.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(leaving, ignore_errors=True)
                (self.directory / str(step)).rename(leaving)
                shutil.rmtree(leaving)
            except FileNotFoundError:  # another replica was faster
                pass
            except OSError as error:
                self._report(f"checkpoint {self.directory / str(step)} is not deleted yet: {error}")

    def _choose(self, wanted: Mapping[str, tree.Wanted], newer_than: int) -> int | None:
        """Returns the newest step that verifies, the same in every process."""
        steps = broadcast(new_key("steps"), lambda: manifest.step_numbers(self.directory))
        chosen, damaged = None, {}
        for step in reversed([step for step in steps if step > newer_than]):
            self._begun.add(step)
            found = damage(self.directory / str(step), new_key("verified"))
            if found is None:
                chosen = step
                break
            damaged[step] = found
        return broadcast(new_key("restore"), lambda: self._settle(chosen, damaged, wanted, newer_than))

    def _settle(
        self, chosen: int | None, damaged: dict[int, str], wanted: Mapping[str, tree.Wanted], newer_than: int
    ) -> int | None:
        """Sets the damaged steps aside and returns `chosen`, a step that verifies, or None (process 0)."""
        if chosen is not None:
            folder = self.directory / str(chosen)
            if difference := tree.difference(folder, manifest.read(folder).tree, wanted):
                raise ValueError(difference)
            self._set_aside(damaged, f"step {chosen} is used instead")
        elif newer_than >= 0:
            self._set_aside(damaged, f"step {newer_than} is used instead")
        elif damaged:
            found = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
            raise ValueError(
                f"no checkpoint in {self.directory} verifies ({found});"
                " put a good copy back, or start again in an empty directory"
            )
        return chosen

    def _set_aside(self, damaged: dict[int, str], instead: str) -> None:
        """Moves each damaged step into DIR/set_aside, under the first free name STEP-1, STEP-2, ..."""
        aside = self.directory / manifest.SET_ASIDE
        for step, found in damaged.items():
            aside.mkdir(exist_ok=True)
            target = next(name for i in itertools.count(1) if not (name := aside / f"{step}-{i}").exists())
            (self.directory / str(step)).rename(target)
            self._begun.discard(step)
            self._report(f"checkpoint {self.directory / str(step)} is damaged ({found}): moved to {target}; {instead}")

    def _failed(self, step: int, error: Exception) -> None:
        """Raises CheckpointError, in a replica ResumableError: the others save the next step, and it starts again.

        Raises nothing if another replica has saved this step or a newer one. A group of several processes raises
        ResumableError even then, because perhaps only this process has failed.
        """
        reason = _ANNOTATION.sub("", " ".join((str(error) or type(error).__name__).split()))
        if len(reason) > 300:  # TensorStore's messages begin with paths and end with the cause
            reason = f"{reason[:100]} ... {reason[-180:]}"
        failed, newest = f"saving step {step} to {self.directory} failed: {reason}", self._newest_now()
        if not (self._replica is not None and newest is not None and newest >= step):
            kind = CheckpointError if self._replica is None else ResumableError
            raise kind(
                f"{failed}; the checkpoints before it are unharmed (newest: {newest}); see that the disk has room and "
                "can be written, then run again"
            ) from error
        done = f"{failed}; another replica has saved step {newest}"
        if jax.process_count() > 1:
            raise ResumableError(f"{done}: run the same command again") from error
        self._report(done)


def _json_copy(name: str, value: JsonObject) -> JsonObject:
    """Returns a copy of `value` as JSON gives it back, so that the caller may change the original."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint's {name} must be JSON (dicts, lists, strings, numbers): {error}") from error


def _least_step(save: Path) -> float:
    """Returns the least step in a folder of DIR/unfinished: STEP, or STEP.orbax-checkpoint-tmp; infinity for none."""
    with suppress(OSError):  # another replica may finish it meanwhile
        names = [entry.name.partition(".")[0] for entry in save.iterdir()]
        return min((int(name) for name in names if name.isdecimal()), default=inf)
    return inf


def kept_steps(manifests: Sequence[manifest.Manifest], config: CheckpointConfig) -> set[int]:
    """Returns the steps to keep: the newest `keep_last`, multiples of `keep_every`, the `keep_best` lowest losses.

    If losses are equal, the newer step is better. A step without a loss, or with NaN, is never among the best.
    """
    steps = sorted(found.step for found in manifests)
    losses = [(found.metrics.get("validation_loss", nan), -found.step) for found in manifests]
    best = [-step for _, step in sorted(pair for pair in losses if not isnan(pair[0]))[: config.keep_best]]
    every = [step for step in steps if config.keep_every and step % config.keep_every == 0]
    return {*steps[-config.keep_last :], *every, *best}


def damage(folder: Path, key: AgreementKey) -> str | None:
    """Returns the damage of the step in `folder` as text, None if it verifies; the same in every process.

    Every process must call it. If one process raises UnreadableError or UnknownFormatError, all do. So a process that
    cannot read a file, because its network mount is gone, does not make the others discard the step.
    """
    me, count, problem = jax.process_index(), jax.process_count(), None
    who = f"process {me} on {socket.gethostname()}"
    try:
        manifest.verify(folder, share=(me, count))
    except manifest.UnreadableError as error:
        problem = ["unreadable", f"{who}: {error}"]
    except (manifest.DamagedError, manifest.UnknownFormatError) as error:
        kind = "damaged" if isinstance(error, manifest.DamagedError) else "unknown"
        problem = [kind, f"{error} ({who})" if count > 1 else str(error)]
    first = dict(reversed([told for told in all_gather(key, problem) if told]))  # per kind
    if "unreadable" in first:
        raise manifest.UnreadableError(first["unreadable"])
    if "unknown" in first:
        raise manifest.UnknownFormatError(first["unknown"])
    return first.get("damaged")


def _found(results: list[JsonObject]) -> list[Any]:
    """Returns the result of each process. Raises RuntimeError if a process reported an error.

    Process 0's error is raised last, because it may follow from an error of another process.
    """
    for result in reversed(results):
        if "error" in result:
            raise RuntimeError(result["error"])
    return [result["found"] for result in results]
