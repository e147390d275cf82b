"""The cache folder that runs share: prepared data and compiled programs."""

import os
from pathlib import Path

from runtime.files.paths import user_path

ENVIRONMENT_KEY = "MICS_JAX_CACHE"


def cache_dir() -> Path:
    """Returns $MICS_JAX_CACHE, or ~/.cache/mics-jax."""
    return user_path(os.environ.get(ENVIRONMENT_KEY) or "~/.cache/mics-jax")
