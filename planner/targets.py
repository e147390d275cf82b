"""The hardware that a train step can be compiled for without having it: GPUs, TPU slices, virtual CPU devices.

XLA for a kind of hardware is a separate folder of packages. Only the process that compiles has it in its path, because
jax looks for the hardware at its start where it finds them.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sharding.mesh import Device

CPU = "cpu"  # name of the CPU target
WHEELS = Path(__file__).resolve().parent.parent / ".venv" / "h100"
LIBTPU = Path(sys.prefix) / "tpu"  # a version for each version of jax
# libtpu asks for a machine that it may believe to run on: any valid one, because the topology is given
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# topologies of slices by their number of chips (docs.cloud.google.com/tpu/docs/v5e, v6e, v5p and tpu7x)
FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
CUBES |= {1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16"}


class Target(Protocol):
    """Hardware that XLA compiles for."""

    @property
    def packages(self) -> Path | None:
        """The folder with XLA for it, if XLA for CPUs is not enough."""
        ...

    @property
    def missing(self) -> str:
        """The error without these packages."""
        ...

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables of the process that compiles."""
        ...

    def describe(self, memory_bytes: int) -> str:
        """Returns a description of a device for XLA, with this memory if it is not 0; "" if XLA needs none."""
        ...

    def devices(self, nodes: int, devices_per_node: int, about: str) -> Sequence[Device]:
        """Returns the devices of all nodes; `about` describes one. ValueError if no such node exists."""
        ...


def is_installed(target: Target) -> bool:
    """Returns whether this machine can compile for a target."""
    return target.packages is None or target.packages.exists()


@dataclass(frozen=True)
class CpuTarget:
    """Virtual CPU devices of the process."""

    packages: Path | None = None
    missing: str = ""

    @property
    def variables(self) -> Mapping[str, str]:
        """None."""
        return {}

    def describe(self, memory_bytes: int) -> str:
        """Returns ""."""
        return ""

    def devices(self, nodes: int, devices_per_node: int, about: str) -> Sequence[Device]:
        """Makes the devices."""
        import jax

        jax.config.update("jax_num_cpu_devices", nodes * devices_per_node)
        return jax.devices()


@dataclass(frozen=True)
class GpuTarget:
    """Nodes of a GPU that XLA has a description of."""

    name: str
    missing: str = "XLA for GPUs is not installed: make .venv/h100/installed"

    @property
    def packages(self) -> Path:
        """The CUDA plug-in."""
        return WHEELS

    @property
    def variables(self) -> Mapping[str, str]:
        """None."""
        return {}

    def describe(self, memory_bytes: int) -> str:
        """Returns XLA's description of the GPU, with another memory if one is given."""
        text = Path(__file__).with_name(f"{self.name}_target_config.txt").read_text()
        return re.sub(r"device_memory_size: \d+", f"device_memory_size: {memory_bytes}", text) if memory_bytes else text

    def devices(self, nodes: int, devices_per_node: int, about: str) -> Sequence[Device]:
        """Returns the devices of a topology."""
        from jax.experimental import topologies

        shape = f"1x{nodes}x{devices_per_node}"
        made: object = topologies.get_topology_desc(
            topology_name=self.name, platform="cuda", target_config=about, topology=shape
        )
        return made.devices


@dataclass(frozen=True)
class TpuTarget:
    """Slices of a TPU generation; a node is a slice."""

    name: str  # the generation in libtpu
    shapes: Mapping[int, str]  # topology by the chips of a slice
    devices_per_chip: int = 1
    missing: str = "XLA for TPUs is not installed: make .venv/tpu/installed"

    @property
    def packages(self) -> Path:
        """The folder of libtpu."""
        return LIBTPU

    @property
    def variables(self) -> Mapping[str, str]:
        """The answers of a TPU VM to libtpu's questions."""
        return NO_TPU

    def describe(self, memory_bytes: int) -> str:
        """Returns libtpu's version, because jax does not list it as a plug-in; the memory of a TPU is fixed."""
        return ", ".join(sorted(path.name for path in LIBTPU.glob("libtpu-*")))

    def shape(self, chips: int) -> tuple[int, ...]:
        """Returns the chips along each axis of a slice. ValueError lists the sizes for another one."""
        if chips not in self.shapes:
            sizes = ", ".join(map(str, self.shapes))
            raise ValueError(f"{self.name}-{chips}: the topology of that slice is unknown; slices have {sizes} chips")
        return tuple(map(int, self.shapes[chips].split("x")))

    def devices(self, nodes: int, devices_per_node: int, about: str) -> Sequence[Device]:
        """Returns the devices of slices."""
        from jax.experimental import topologies

        shape = "x".join(map(str, self.shape(devices_per_node // self.devices_per_chip)))
        name = f"{self.name}:{shape}"
        made: object = topologies.get_topology_desc(topology_name=name, platform="tpu", num_slices=nodes)
        return made.devices


TPUS = {
    "v5e": TpuTarget("v5e", FLAT),
    "v6e": TpuTarget("v6e", FLAT),
    "v5p": TpuTarget("v5p", CUBES),
    "tpu7x": TpuTarget("tpu7x", CUBES, devices_per_chip=2),
}
GPUS = ("h100", "a100", "b200", "gb200", "l40s", "rtx4090", "rtx5090")
TARGETS: dict[str, Target] = {CPU: CpuTarget(), **{name: GpuTarget(name) for name in GPUS}, **TPUS}
