"""jax's settings for a run: virtual CPU devices, and the cache of compiled programs."""

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import jax

from configs.schema import Config
from runtime import launchers
from runtime.files.cache import cache_dir
from training.overlap import add_estimate, installed_plugins

MOST_CPU_DEVICES = 1024  # of a process: jax starts threads for each, and 100,000 leave a machine without an answer
SPARE_THREADS = 1  # of XLA:CPU, besides one for each device; more of them wait for work by spinning
DEVICES = Path("/dev")  # where the driver's GPUs are
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def use_devices(config: Config) -> Config:
    """Prepares this process for the devices of a config, before jax initialises them; returns it for the launcher."""
    if devices := launchers.virtual_devices():  # a launcher starts one process of several: none plays several nodes
        config = replace(config, mesh=replace(config.mesh, num_cpu_devices=devices, devices_per_node=0))
    if config.mesh.num_cpu_devices:
        use_cpu_devices(config.mesh.num_cpu_devices)
        if config.sharding.replicas == "independent":
            # what a program hands out is copied in the threads that run the devices' programs, of which tsl makes as
            # many as this says: without more than devices, gradients come when the last backward pass is over
            os.environ["NPROC"] = str(config.mesh.num_cpu_devices + SPARE_THREADS)
    elif config.sharding.overlap != "off":
        add_estimate(os.environ, installed_plugins())
    # of XLA's page-locked memory, which grows as needed: snapshots' copies may be more than its 64 GiB (gpu_helpers.cc)
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(64, _host_gib() // 2)))
    return config


def unused_gpus(config: Config) -> list[str]:
    """Returns a line if this machine has GPUs that a config's virtual devices leave idle; none if a launcher asked."""
    count = config.mesh.num_cpu_devices
    if not count or launchers.virtual_devices() or not any(DEVICES.glob("nvidia[0-9]*")):
        return []
    about = "this machine's GPUs stay idle; to train on them set it and mesh.devices_per_node to 0"
    return [f"mesh.num_cpu_devices={count}: {about}"]


def _host_gib() -> int:
    """Returns the memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30


def use_cpu_devices(count: int) -> None:
    """Gives this process `count` virtual CPU devices; call it before jax initialises its devices.

    ValueError for more than a machine can run.
    """
    if count > MOST_CPU_DEVICES:
        raise ValueError(
            f"mesh.num_cpu_devices={count} is more than a process can run; set it to {MOST_CPU_DEVICES} at most "
            "(python -m planner plays larger clusters)"
        )
    _keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def use_compilation_cache() -> None:
    """Caches compiled programs in JAX_COMPILATION_CACHE_DIR, or else in our cache folder, where that is safe.

    Not with several CPU devices: XLA:CPU loses the order of collectives in a program that it loads from the cache (seen
    in jax 0.10.2), so that devices enter different collectives and deadlock.
    """
    is_safe = jax.default_backend() != "cpu" or jax.device_count() == 1
    jax.config.update("jax_enable_compilation_cache", is_safe)
    if is_safe:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(cache_dir() / "compiled")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _keep_freed_memory() -> None:
    """Makes glibc keep freed memory, because XLA:CPU allocates the same in the next step: half of its system time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
            mallopt(option, value)
