"""Checks whether a work directory belongs to this run and is finished, and restores the newest step of two tiers.

The tiers are snapshots in the nodes' memories, which are newer but lost with their nodes, and checkpoints.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from configs.register import unknown_names
from configs.schema import GONE, SETTINGS, Config, flat, may_change, with_defaults
from configs.schema.own import OWN
from elastic import latest_config
from elastic.attempts import Extension
from elastic.checkpointer import Checkpointer, damage
from elastic.snapshots import Snapshots
from elastic.tree import Restored, Source
from runtime.consensus import broadcast, new_key
from runtime.exit_codes import ResumableError
from runtime.files import run_directory
from runtime.files.json_objects import JsonObject
from runtime.files.paths import user_path
from runtime.progress import read_progress
from sharding.padding import without_wrappers
from sharding.scopes import WorldTooSmallError
from sharding.step import TrainState
from sharding.trees import PyTree
from training.experiment import BASE, Experiment
from training.metrics.run_files import RunFiles, read_run
from training.validation import EarlyStopping, past_losses

LENGTH = "num_steps"  # the key that --extend may raise


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts: at a restored step, or at step 0."""

    restored: Restored | None  # without the state
    logged: int  # the last step in the metrics

    @property
    def step(self) -> int:
        """Number of steps done before."""
        return self.restored.step if self.restored else 0

    @property
    def event(self) -> JsonObject:
        """The fields of the event `restored`."""
        fields: JsonObject = {"step": self.step, "source": "nothing", "steps_again": self.steps_again}
        if not self.restored:
            return fields
        fields["source"] = self.restored.source
        if self.restored.source is Source.MEMORY:
            fields |= {"source_nodes": self.restored.source_nodes, "nodes": self.restored.nodes}
        return fields

    @property
    def steps_again(self) -> int:
        """Number of logged steps that are repeated."""
        return max(0, self.logged - self.step)

    def extension(self, num_steps: int) -> Extension | None:
        """Returns how the run was extended to `num_steps` after the restored step was saved; None if it was not."""
        before = self.restored.config[LENGTH] if self.restored else num_steps
        return None if before == num_steps else Extension(step=self.step, before=before, after=num_steps)

    def described(self, num_steps: int, workdir: Path, *, may_join: bool = False) -> str:
        """Returns the message for the user, one line; a run that may join others may take their later state yet."""
        at = f"step {self.step} of {num_steps} in {workdir}"
        again = f"steps done again: {'at most ' * (may_join and self.steps_again > 0)}{self.steps_again}"
        if not self.restored:
            lost = f": no checkpoint and no snapshot is left; {again}" if self.logged else ""
            return f"starting{' again' if lost else ''} at {at}{lost}"
        extension = self.extension(num_steps)
        longer = f"; extended from {extension.before} steps" if extension else ""
        return f"resumed at {at}, from {self.restored.source_text}; {again}{longer}"

    @property
    def warnings(self) -> list[str]:
        """A line with the settings that an earlier version saved as keys, if the config file registers their method."""
        if not self.restored:
            return []
        saved = flat(self.restored.config)
        settings = [f"{name}={saved[name]}" for name in SETTINGS if name in saved]
        today = flat(with_defaults(self.restored.config))
        choices = {"all_reduce": today["compression.all_reduce"], "interval": today["local_sgd.interval"]}
        registered = [name for topic, name in choices.items() if name in OWN[topic]]
        if not (settings and registered):
            return []
        return [
            f"an earlier version began this run with {', '.join(settings)}; nothing compares them with the settings "
            f"that the config file gives {' and '.join(registered)}: they must be the same"
        ]


def has_begun(workdir: Path) -> bool:
    """Whether a run has logged a step in `workdir`."""
    return (workdir / run_directory.METRICS).exists()


@contextmanager
def retry_if_world_too_small(workdir: Path) -> Iterator[None]:
    """Turns a world that is too small into a reason to wait for more nodes, if the run has begun in `workdir`."""
    try:
        yield
    except WorldTooSmallError as error:
        if not has_begun(workdir):
            raise
        raise ResumableError(str(error)) from error


def is_finished(config: Config, workdir: Path, *, extends: bool = False) -> bool:
    """Whether `workdir` holds this run, finished; prints so. ValueError if it holds another, or no checkpoint.

    `extends`: the run may have more steps than it had.
    """
    step, reason = broadcast(new_key("finished"), lambda: _end(config, workdir, extends))
    last = workdir / run_directory.CHECKPOINTS / str(step)
    if not reason or damage(last, new_key("finished-checkpoint")) is not None:
        return False  # `restore` reports a damaged checkpoint and uses an older one
    if jax.process_index() == 0:
        print(f"{workdir} is finished: {reason}")
    return True


def _end(config: Config, workdir: Path, extends: bool) -> tuple[int, str]:
    """Returns the last step of a finished run, and why it was the last one; "" if the run is not finished."""
    files = read_run(workdir, rows=False) if has_begun(workdir) else RunFiles(run_dir=workdir)
    checkpoints = workdir / run_directory.CHECKPOINTS
    newest_config = latest_config(checkpoints)
    saved = newest_config or files.config  # a run that stopped early has no checkpoint
    if not saved:
        return 0, ""
    check_same_run(saved, config, workdir, extends=extends)
    ended = files.summary.get("exit_reason") == "finished"
    if ended and not newest_config:
        raise ValueError(
            f"{workdir} holds this run, finished, whose checkpoints are gone; to train it again, delete its "
            f"{run_directory.SUMMARY} or choose another --workdir"
        )
    newest = max(run_directory.step_numbers(checkpoints), default=0)
    if not ended or newest == config.num_steps:
        return newest, f"{newest} steps are done" if ended else ""
    return newest, EarlyStopping(config.eval.patience, past_losses(config, workdir, newest)).message


def check_same_run(saved: Mapping[str, object], config: Config, workdir: Path, *, extends: bool = False) -> None:
    """Raises ValueError, naming the differences, if `saved` is the config of another run.

    `extends`: the run may have more steps than it had.
    """
    for name, value in flat(saved).items():
        if name in GONE and value != GONE[name]:
            raise ValueError(
                f"{workdir} holds a run with {name}={value}, but every run is as with {name}={GONE[name]} now; finish "
                "it with the version that began it, or choose another --workdir"
            )
    changed = changed_keys(saved, config.to_dict(), extends=extends)
    if changed:
        for name, value in unknown_names(saved).items():
            raise ValueError(
                f"{workdir} holds a run with {name}={value}, which this --config does not register; give the config "
                "file that does, or choose another --workdir"
            )
        changes = ", ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in changed.items())
        is_longer = changed.keys() == {LENGTH} and not changed_keys(saved, config.to_dict(), extends=True)
        longer = ", or train this run for longer by --extend" if is_longer else ""
        raise ValueError(f"{workdir} holds a run of another config: {changes}; choose another --workdir{longer}")


def changed_keys(
    saved: Mapping[str, object], config: Mapping[str, object], *, extends: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Returns the (old, new) values of the keys that differ but must not differ within one run.

    A key that is newer than `saved` counts with its default. `extends`: more steps are allowed.
    """
    old, new = flat(with_defaults(saved)), flat(config)
    keys = [key for key in sorted({*old, *new}) if not may_change(key)]
    changed = {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
    if extends and new[LENGTH] > old[LENGTH]:
        del changed[LENGTH]
    return changed


def is_same_run(saved: Mapping[str, object], config: Mapping[str, object], *, extends: bool = False) -> bool:
    """Whether two configs may belong to one run; `extends`: the second may have more steps."""
    return not changed_keys(saved, config, extends=extends)


def restore_newest(abstract_state: PyTree, checkpointer: Checkpointer, snapshots: Snapshots) -> Restored | None:
    """Returns the newest step that verifies, with the shardings of `abstract_state`; None without any.

    A checkpoint is read only if it is newer than the snapshots in the nodes' memories, or if these cannot be fetched.
    Every process must call it. It raises the same errors as `Checkpointer.restore`.
    """
    found = snapshots.find(abstract_state)
    if found is None:
        return checkpointer.restore(abstract_state)
    newer = checkpointer.restore(abstract_state, newer_than=found.step)
    return newer or snapshots.load(found, abstract_state) or checkpointer.restore(abstract_state)


def restore(
    experiment: Experiment,
    workdir: Path,
    checkpointer: Checkpointer,
    snapshots: Snapshots,
    fingerprints: Mapping[str, str],
    extends: bool = False,
) -> tuple[Start, TrainState | None]:
    """Restores the newest step of the run, from memory or a checkpoint.

    Returns where the run starts, and the state without the frozen parameters, None for a new run. ValueError if the
    state belongs to another run or to other data.
    """
    restored = restore_newest(experiment.in_files(experiment.state_shapes), checkpointer, snapshots)
    if restored:  # `is_finished` does not check snapshots in memory
        check_same_run(restored.config, experiment.config, workdir, extends=extends)
        _check_same_data(restored, experiment, workdir, fingerprints)

    logged = broadcast(new_key("logged"), lambda: read_progress(workdir).step)
    if restored is None:
        return Start(restored=None, logged=logged), None
    # nothing but the loop refers to the state: a replica that joins others takes theirs instead
    return Start(restored=replace(restored, state=None), logged=logged), without_wrappers(restored.state)


def _check_same_data(
    restored: Restored, experiment: Experiment, workdir: Path, fingerprints: Mapping[str, str]
) -> None:
    check_same_base(restored.data, fingerprints, workdir)
    for key, what in (("fingerprint", "trained"), ("validation_fingerprint", "validated")):
        known = fingerprints.get(key)  # the split may be no validation set; an imported run has neither
        if known and restored.data.get(key, known) != known:
            raise ValueError(
                f"{workdir} was {what} on other data: {experiment.config.data.origin} has changed since "
                f"step {restored.step}; {_remedy(restored.config, experiment.config)}choose another --workdir"
            )


def _remedy(saved: Mapping[str, object], config: Config) -> str:
    """Returns keys that may restore the data of a run that began before documents had a bos; "" for other runs."""
    has_documents = config.data.source != "chats" and config.data.tokenizer in ("hugging_face", "sentencepiece")
    if "data.add_bos" in flat(saved) or not has_documents:
        return ""
    return (
        "an earlier version began this run: set data.add_bos=never, and data.eos_token to the token that ended its "
        "documents (docs/hugging_face.md#tokenizers), or "
    )


def check_same_base(saved: Mapping[str, object], now: Mapping[str, str], workdir: Path) -> None:
    """Raises ValueError if a run's adapters were trained with another base, by the hash in a checkpoint.

    Earlier versions saved none.
    """
    if BASE in now and saved.get(BASE, now[BASE]) != now[BASE]:
        raise ValueError(
            f"{workdir} trained adapters of other weights: the files in its model.weights have changed since; "
            "put the old ones back"
        )


def check_not_weights(config: Config, workdir: Path) -> None:
    """Raises ValueError if the run's directory holds its weights, whose config.json the run would replace."""
    for key in ("weights", "lora_weights"):
        if (folder := getattr(config.model, key, "")) and user_path(folder).resolve() == workdir.resolve():
            raise ValueError(
                f"--workdir={workdir} is model.{key}, whose files the run would replace; choose another one"
            )


def check_writable(*folders: Path) -> None:
    """Raises ValueError for an existing folder without write permission, which the first save would need."""
    for folder in folders:
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{folder} cannot be written; change that, or choose another --workdir")
