"""`WandbSink`: the metrics of a run for Weights & Biases too, offline; `wandb sync` sends them later. Optional."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_installed() -> None:
    """Raises ValueError if wandb is not installed."""
    if not importlib.util.find_spec("wandb"):
        raise ValueError("sink=wandb needs wandb, which is not installed: make .venv/wandb-installed, or set sink=none")


class WandbSink:
    """Writes to `run_dir/wandb`; each attempt is a run of wandb's, in a group named like the directory."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        check_installed()
        import wandb

        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run = wandb.init(
            mode="offline", dir=run_dir, project="mics-jax", group=run_dir.name, config=dict(config), settings=quiet
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the values measured at `step`."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Ends the run; a second call does nothing."""
        self._run.finish()
