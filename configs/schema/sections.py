"""The sections of a few keys each; the larger ones have files of their own."""

from dataclasses import dataclass

from configs.schema.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section, name="batch"):
    """The number of rows (sequences or images) per step, and per device and micro-step."""

    global_size: int = key(32, "rows per step, independent of the number of devices", least=1, unit="rows")
    micro_size: int = key(4, "rows per device and micro-step", least=1, unit="rows", resumable=True)


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section, name="mesh", resumable=True):
    """The devices and their arrangement."""

    num_cpu_devices: int = key(
        0, "virtual CPU devices of each process; 0 keeps the platform's devices", least=0, unit="devices"
    )
    devices_per_node: int = key(
        0, "devices per node; 0 derives the nodes from the processes' host names", least=0, unit="devices"
    )
    tensor: int = key(1, "tensor-parallel devices inside a node", least=1, unit="devices")
    stages: int = key(1, "pipeline stages, each of whole nodes", least=1)


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(Section, name="local_sgd"):
    """The steps between exchanges, and the outer optimizer (on the replicas' mean movement)."""

    inner_steps: int = key(0, "local steps of each replica between exchanges; 0: no local SGD", least=0, unit="steps")
    outer_learning_rate: float = key(
        0.7, "learning rate of the outer Nesterov SGD (DiLoCo); 1 for plain averaging", above=0
    )
    outer_momentum: float = key(0.9, "its momentum; 0 for plain averaging", least=0, below=1)
    streaming: bool = key(
        False, "exchange 1/inner_steps of each tensor in every step, during the compute (Streaming DiLoCo)"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, name="checkpoint", resumable=True):
    """When checkpoints are written, and which of them are kept."""

    every: int = key(100, "steps between checkpoints; 0: only at the end and when interrupted", least=0, unit="steps")
    keep_last: int = key(2, "newest checkpoints to keep", least=1, unit="checkpoints")
    keep_every: int = key(0, "also keep steps that are multiples of this; 0 for none", least=0, unit="steps")
    keep_best: int = key(0, "also keep this many with the lowest validation loss", least=0, unit="checkpoints")


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(Section, name="elastic", resumable=True):
    """Time-outs after which a process counts as lost, and snapshots in the nodes' memory."""

    silence_s: float = key(
        30.0, "silence of a process that ends the run (jax itself aborts after 100 s)", least=1, most=60, unit="s"
    )
    stall_s: float = key(
        600.0, "time of a step, or of reading a batch, that ends the run; inf for no limit", least=1, unit="s"
    )
    snapshot_every: int = key(
        -1,
        "steps between snapshots in memory; -1: as many as cost under 2 % of the time; 0: none",
        least=-1,
        unit="steps",
    )
    memory_dir: str = key("/dev/shm", "RAM disk of each node")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section, name="eval", resumable=True):
    """When and on how many batches a run is validated."""

    every: int = key(50, "steps between validations; 0: only at the end", least=0, unit="steps")
    num_batches: int = key(4, "global batches of one validation", least=1, unit="batches")


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Section, name="sample", resumable=True):
    """Text sampled from a decoder at the end of a run."""

    prompt: str = key("def ", "text to continue")
    length: int = key(200, "tokens to sample; 0 for no sample", least=0, unit="tokens")
    temperature: float = key(0.7, "sampling temperature; 0 always takes the most likely token", least=0)
