"""Compares two runs: the loss of every step, and the parameters at the end."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from elastic.saved_arrays import SavedArrays
from runtime.files import run_directory
from training.metrics.run_files import read_run, series


class Largest(NamedTuple):
    """The largest relative difference, and where it is."""

    difference: float
    where: str


def compare_losses(run: Path, reference: Path) -> Largest:
    """Returns the largest difference of a step's loss. ValueError if not every step is there once, in order."""
    ours, theirs = (series(read_run(folder).rows, "loss") for folder in (run, reference))
    if [step for step, _ in theirs] != [float(i) for i in range(1, len(theirs) + 1)]:
        raise ValueError(f"{reference} has not every step once; give a --reference that ran undisturbed to its end")
    steps = [step for step, _ in ours]
    if steps != [step for step, _ in theirs]:
        raise ValueError(
            f"{run} has {len(steps)} losses, {len(set(steps))} of them of different steps; the undisturbed "
            f"run has {len(theirs)}"
        )
    apart = [abs(a - b) / abs(b) for (_, a), (_, b) in zip(ours, theirs, strict=True)]
    worst = int(np.argmax(apart))  # argmax takes a NaN for the largest
    return Largest(apart[worst], f"step {worst + 1}")


def compare_parameters(run: Path, reference: Path) -> Largest:
    """Returns the largest difference of any parameter value, as a fraction of its array's largest value."""
    ours, theirs = (_parameters(folder / run_directory.CHECKPOINTS) for folder in (run, reference))
    if ours.keys() != theirs.keys():
        raise ValueError(f"{run} and {reference} hold different models, or different steps")
    apart = {name: float(np.abs(x - theirs[name]).max() / np.abs(theirs[name]).max()) for name, x in ours.items()}
    worst = max(apart, key=lambda name: np.nan_to_num(apart[name], nan=np.inf))
    return Largest(apart[worst], worst)


def _parameters(checkpoints: Path) -> dict[str, np.ndarray]:
    """Returns the parameters of the newest checkpoint, after verifying it. The names hold its step."""
    saved = SavedArrays(checkpoints)
    paths = [path for path in saved.paths if path.startswith("params.")]
    return {f"{path} at step {saved.step}": x for path, x in zip(paths, saved.read(*paths), strict=True)}
