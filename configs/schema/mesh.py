"""The section `mesh`: the devices of a run."""

from dataclasses import dataclass

from configs.schema.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """The devices and their arrangement."""

    SECTION = "mesh"
    RESUMABLE = True

    num_cpu_devices: int = key(
        0, "virtual CPU devices of each process; 0 keeps the platform's devices", least=0, unit="devices"
    )
    devices_per_node: int = key(
        0, "devices per node; 0 derives the nodes from the processes' host names", least=0, unit="devices"
    )
    tensor: int = key(1, "tensor-parallel devices inside a node", least=1, unit="devices")
    stages: int = key(
        1, "pipeline stages, each of whole nodes with as many layers; the micro-steps are its micro-batches", least=1
    )
