"""The folder of what a later run finds again: prepared data, compiled programs."""

import os
from pathlib import Path

ENVIRONMENT_KEY = "MICS_JAX_CACHE"


def cache_dir() -> Path:
    """Returns $MICS_JAX_CACHE, or ~/.cache/mics-jax."""
    return Path(os.environ.get(ENVIRONMENT_KEY) or "~/.cache/mics-jax").expanduser()
