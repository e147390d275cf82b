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

MOST_CPU_DEVICES = 1024  # per process: jax starts threads for each, and 100,000 devices make a machine unresponsive
SPARE_THREADS = 1  # XLA:CPU's threads in addition to one per device; further threads spin while they wait for work
DEVICES = Path("/dev")  # the drivers' accelerators are listed there
ACCELERATORS = {"nvidia[0-9]*": "GPUs", "accel[0-9]*": "TPUs", "vfio/[0-9]*": "TPUs"}
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # constants of glibc's malloc.h


def use_devices(config: Config) -> Config:
    """Prepares this process for the devices of a config, before jax initialises them.

    Returns it adapted to a launcher.
    """
    if devices := launchers.virtual_devices():  # a launched process simulates only one node
        config = replace(config, mesh=replace(config.mesh, num_cpu_devices=devices, devices_per_node=0))
    if config.mesh.num_cpu_devices:
        use_cpu_devices(config.mesh.num_cpu_devices)
        if config.sharding.replicas == "independent":
            # The threads that run the devices' programs also copy their outputs, and NPROC sets the number that tsl
            # creates. Without more threads than devices, gradients arrive only after the last backward pass.
            os.environ["NPROC"] = str(config.mesh.num_cpu_devices + SPARE_THREADS)
    elif config.sharding.overlap != "off":
        add_estimate(os.environ, installed_plugins())
    # XLA's page-locked memory grows on demand, and snapshots' copies may exceed its default of 64 GiB (gpu_helpers.cc)
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(64, _host_gib() // 2)))
    return config


def unused_accelerators(config: Config) -> list[str]:
    """Returns a line if a config's virtual devices leave this machine's GPUs or TPUs idle.

    No line if a launcher requested this.
    """
    count = config.mesh.num_cpu_devices
    kinds = [kind for names, kind in ACCELERATORS.items() if any(DEVICES.glob(names))]
    if not count or launchers.virtual_devices() or not kinds:
        return []
    about = f"this machine's {kinds[0]} stay idle; to train on them set it and mesh.devices_per_node to 0"
    return [f"mesh.num_cpu_devices={count}: {about}"]


def _host_gib() -> int:
    """Returns the memory of this host in GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30


def use_cpu_devices(count: int) -> None:
    """Gives this process `count` virtual CPU devices. Call it before jax initialises its devices.

    ValueError for more devices than a machine can run.
    """
    if count > MOST_CPU_DEVICES:
        raise ValueError(
            f"mesh.num_cpu_devices={count} is more than a process can run; set it to {MOST_CPU_DEVICES} at most "
            "(python -m planner simulates larger clusters)"
        )
    _keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def use_compilation_cache() -> None:
    """Caches compiled programs in JAX_COMPILATION_CACHE_DIR, or else in our cache folder, if that is safe.

    With several CPU devices nothing is cached, because XLA:CPU loses the order of collectives in a program that it
    loads from the cache (seen in jax 0.10.2). The devices then enter different collectives and deadlock.
    """
    is_safe = jax.default_backend() != "cpu" or jax.device_count() == 1
    jax.config.update("jax_enable_compilation_cache", is_safe)
    if is_safe:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(cache_dir() / "compiled")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step of XLA:CPU, whose allocations take half of its system time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
            mallopt(option, value)
