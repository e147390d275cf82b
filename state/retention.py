"""Which checkpoints are kept, and the deletion of the others, always after a newer one is committed."""

import shutil
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path

from configs.schema import CheckpointConfig
from state.manifest import SET_ASIDE, UNFINISHED, Manifest, committed

BEST_METRIC = "validation_loss"


def kept_steps(manifests: Sequence[Manifest], config: CheckpointConfig) -> set[int]:
    """Returns the steps to keep: the newest `keep_last`, multiples of `keep_every`, the `keep_best` lowest losses.

    Of equal losses the newer step is better. A step without a loss, or with a loss of NaN, is never among the best.
    """
    steps = sorted(manifest.step for manifest in manifests)
    kept = set(steps[-config.keep_last :])
    if config.keep_every:
        kept |= {step for step in steps if step % config.keep_every == 0}
    losses = [(m.metrics.get(BEST_METRIC, nan), -m.step) for m in manifests]
    losses = [(loss, negative_step) for loss, negative_step in losses if not isnan(loss)]
    return kept | {-negative_step for _, negative_step in sorted(losses)[: config.keep_best]}


def remove_old(directory: Path, config: CheckpointConfig) -> list[int]:
    """Deletes the steps in `directory` that `config` does not keep and returns them.

    Call this after a new step is committed. Steps without a valid manifest are neither counted nor deleted.
    """
    manifests = committed(directory)
    kept = kept_steps(manifests, config)
    removed = [manifest.step for manifest in manifests if manifest.step not in kept]
    for step in removed:  # renamed first, so that an interrupted deletion leaves no partial step
        leaving = directory / UNFINISHED / f"{step}.deleted"
        leaving.parent.mkdir(exist_ok=True)
        shutil.rmtree(leaving, ignore_errors=True)
        (directory / str(step)).rename(leaving)
        shutil.rmtree(leaving)
    return removed


def remove_unfinished(directory: Path) -> None:
    """Deletes the files of killed and failed saves in DIR/unfinished.

    A failed save may still be writing there. Files that cannot be deleted now are left to the next call; nothing reads
    them.
    """
    unfinished = directory / UNFINISHED
    if unfinished.is_dir():
        shutil.rmtree(unfinished, ignore_errors=True)


def set_aside(directory: Path, step: int) -> Path:
    """Moves a step into DIR/set_aside under the first free name STEP-1, STEP-2, ... and returns that."""
    (directory / SET_ASIDE).mkdir(exist_ok=True)
    number = 1
    while (target := directory / SET_ASIDE / f"{step}-{number}").exists():
        number += 1
    (directory / str(step)).rename(target)
    return target
