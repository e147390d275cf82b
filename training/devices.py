"""jax's settings for a run: its devices before they are asked for, and the cache of compiled programs."""

import ctypes
import os
from pathlib import Path

import jax

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def use_cpu_devices(count: int) -> None:
    """Makes this process play `count` CPU devices; call it before jax's devices are asked for."""
    _keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def use_compilation_cache() -> None:
    """Keeps compiled programs in MICS_JAX_CACHE or ~/.cache/mics-jax, where that is safe.

    XLA:CPU does not keep the order of collectives in a program that it loads from the cache (seen in jax 0.10.2): its
    devices, each in another one, wait for each other for ever.
    """
    if jax.default_backend() != "cpu" or jax.device_count() == 1:
        cache = Path(os.environ.get("MICS_JAX_CACHE") or Path.home() / ".cache" / "mics-jax")
        jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _keep_freed_memory() -> None:
    """Tells glibc to keep what XLA:CPU frees, since the next step allocates the same again (docs/performance.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
            mallopt(option, value)
