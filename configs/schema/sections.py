"""The sections of a config, but for `model` and `data`: how it is trained, kept and measured."""

import math
from dataclasses import dataclass

from configs.schema.codecs import TABLE
from configs.schema.keys import Section, key
from configs.schema.mixture import parse_sets

CODECS = tuple(name for name, coding in TABLE.items() if not coding.needs_feedback)
METHODS = tuple(coding.method for coding in TABLE.values() if coding.method)  # values of all_reduce that are no codecs
ALL_REDUCE = tuple(coding.method or name for name, coding in TABLE.items())
WITH_SCALES = ", ".join(coding.method or name for name, coding in TABLE.items() if coding.scales)
OPTIMIZERS = ("adamw", "sgd", "lamb", "lars", "adafactor", "muon")


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section, name="batch"):
    """The number of rows (sequences or images) per step, and per device and micro-step."""

    global_size: int = key(32, "rows per step, for any number of devices", least=1, unit="rows")
    micro_size: int = key(4, "rows per device and micro-step, at most", least=1, unit="rows", resumable=True)


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section, name="mesh", resumable=True):
    """The devices and their arrangement."""

    num_cpu_devices: int = key(0, "virtual CPU devices per process; 0: the platform's devices", least=0, unit="devices")
    devices_per_node: int = key(0, "devices per node; 0: nodes are hosts, or TPU slices", least=0, unit="devices")
    context: int = key(1, "devices inside a node that divide the positions of a row", least=1, unit="devices")
    tensor: int = key(1, "tensor-parallel devices inside a node", least=1, unit="devices")
    stages: int = key(1, "pipeline stages, each of whole nodes", least=1)


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Section, name="sharding", resumable=True):
    """A strategy or three custom scopes, and the collectives over them."""

    strategy: str = key(
        "mics",
        "three scopes by name; custom: from the next three keys",
        choices=("ddp", "zero1", "zero2", "zero3", "hsdp", "mics", "custom"),
        topics=("strategy",),
    )
    partition_size: int = key(0, "mics: devices that hold one model state", least=0, unit="devices")
    parameters: str | int = key("", "custom: scope of the parameters (none, node, all or a number of devices)")
    gradients: str | int = key("", "custom: scope of the gradients")
    optimizer: str | int = key("", "custom: scope of the optimizer state")
    experts: str | int = key(
        "none",
        "scope over which experts are divided, so that tokens travel; none: experts are gathered",
    )
    gather: str = key(
        "layer",
        "lifetime of gathered parameters; node: a micro-step between nodes, a layer inside them",
        choices=("layer", "node", "micro_step", "step"),
    )
    overlap: str = key(
        "auto",
        "overlap the collectives with compute; auto: where possible",
        choices=("auto", "on", "off"),
    )
    replicas: str = key(
        "one_world",
        "independent: each partition group is a separate train.py --group, and can join or leave",
        choices=("one_world", "independent"),
    )
    shares: int = key(
        0,
        "independent: work units of a step; 0: one per micro-step",
        least=0,
        unit="parts",
    )
    reduce_dtype: str = key(
        "compute",
        "dtype of the group reduce-scatter on GPUs; CPUs sum in float32",
        choices=("compute", "float32"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy == "mics" and self.partition_size < 1:
            raise ValueError(
                "sharding.strategy=mics needs sharding.partition_size, the devices that hold one model state"
            )
        if self.strategy != "mics" and self.partition_size:
            raise ValueError(
                f"sharding.partition_size={self.partition_size} belongs to mics, not to {self.strategy}; set it to 0"
            )
        for name in ("parameters", "gradients", "optimizer"):
            scope = getattr(self, name)
            if self.strategy == "custom" and scope == "":
                raise ValueError(
                    f"sharding.strategy=custom needs sharding.{name}: none, node, all or a number of devices"
                )
            if self.strategy != "custom" and scope != "":
                raise ValueError(
                    f"sharding.{name}={scope} is only read by sharding.strategy=custom, not {self.strategy}"
                )


@dataclass(frozen=True, kw_only=True)
class AblationConfig(Section, name="ablation", resumable=True):
    """Baselines that show the gain from a part of MiCS (docs/results/papers/mics.md)."""

    hierarchical: bool = key(True, "gather between nodes, then inside; False: in one collective")
    two_hop: bool = key(True, "average replicas once per step; False: in every micro-step")
    partitioner: str = key(
        "manual", "manual: shard_map; auto: XLA's partitioner on the same shardings", choices=("manual", "auto")
    )


def _codec(payload: str) -> str:
    return key("none", f"codec of {payload}", choices=CODECS, topics=("codec",))


@dataclass(frozen=True, kw_only=True)
class CompressionConfig(Section, name="compression"):
    """The method of the replica all-reduce, and the codecs of the gathers and of the group reduce-scatter."""

    all_reduce: str = key(
        "none",
        "method or codec of the replica all-reduce",
        choices=ALL_REDUCE,
        topics=("all_reduce", "codec"),
    )
    all_gather_inter: str = _codec("parameters gathered between nodes")
    all_gather_intra: str = _codec("parameters gathered inside a node")
    reduce_scatter_inter: str = _codec("gradients reduce-scattered between nodes")
    reduce_scatter_intra: str = _codec("gradients reduce-scattered inside a node")
    experts_inter: str = _codec("tokens sent to experts between nodes, and of their gradients")
    experts_intra: str = _codec("tokens sent to experts inside a node")
    weight_differences_inter: str = _codec("differences of updated parameters, between nodes")
    weight_differences_intra: str = _codec("differences of updated parameters, inside a node")
    block: int = key(1024, f"{WITH_SCALES}: values per scale; a multiple of 8", unit="values")
    error_feedback: bool = key(True, "add the encoding error to the next step's gradients")
    warmup_steps: int = key(0, "one_bit_adam: steps of plain Adam before it compresses", least=0, unit="steps")
    delayed: bool = key(False, "exchange the previous step's gradients during the compute")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 8 or self.block % 8:
            raise ValueError(f"compression.block={self.block} must be a multiple of 8: values fill whole bytes")


LEAST_INTERVAL = 2  # steps between meetings, where a run chooses them: one without a meeting shows the time of a step


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(Section, name="local_sgd"):
    """The steps between exchanges, and the outer optimizer (on the replicas' mean movement)."""

    inner_steps: int = key(
        0,
        "local steps of each replica between exchanges; 0: no local SGD",
        least=0,
        unit="steps",
    )
    outer_learning_rate: float = key(0.7, "outer Nesterov SGD (DiLoCo); 1: plain averaging", above=0)
    outer_momentum: float = key(0.9, "its momentum; 0: plain averaging", least=0, below=1)
    streaming: bool = key(False, "exchange 1/inner_steps of each tensor in every step (Streaming DiLoCo)")
    interval: str = key(
        "fixed",
        "steps between exchanges: inner_steps; a registered choice: 2 to inner_steps",
        choices=("fixed",),
        topics=("interval",),
    )
    quorum: int = key(
        0,
        "asynchronous rounds: workers that have done inner_steps before a round ends without the others; 0: all",
        least=0,
        unit="workers",
    )
    grace_s: float = key(1.0, "asynchronous rounds: time for the others after the quorum", least=0, unit="s")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, name="optimizer"):
    """The optimizer, its schedule, clipping, and the guard against non-finite updates."""

    name: str = key("adamw", "optimizer", choices=OPTIMIZERS, topics=("optimizer",))
    learning_rate: float = key(1e-3, "peak learning rate", above=0, below=math.inf)
    schedule: str = key(
        "cosine",
        "schedule after the warm-up; quadratic: the square of the steps left; wsd: linear in the last decay_fraction",
        choices=("constant", "linear", "cosine", "quadratic", "wsd"),
        topics=("schedule",),
    )
    warmup_steps: int = key(10, "steps of the linear warm-up to the peak", least=0, unit="steps")
    final_fraction: float = key(0.1, "last learning rate, as a share of the peak", least=0)
    decay_fraction: float = key(0.1, "wsd: share of steps with a falling rate", above=0, most=1)
    momentum: float = key(0.9, "sgd, lars, muon: momentum", least=0, below=1)
    b1: float = key(0.9, "adamw, lamb, muon: decay of the first moment", least=0, below=1)
    b2: float = key(0.95, "adamw, lamb, muon: decay of the second moment", least=0, below=1)
    eps: float = key(1e-8, "adamw, lamb, muon: added to the denominator", above=0, below=math.inf)
    weight_decay: float = key(0.1, "weight decay of matrices, not of biases, norms, positions", least=0)
    clip_norm: float = key(1.0, "global norm of clipped gradients; 0: no clipping", least=0)
    max_skipped: int = key(
        10, "consecutive non-finite gradients that end the run", least=1, unit="steps", resumable=True
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, name="checkpoint", resumable=True):
    """When checkpoints are written, and which of them are kept."""

    every: int = key(100, "steps between checkpoints; 0: only at the end and when interrupted", least=0, unit="steps")
    keep_last: int = key(2, "newest checkpoints to keep", least=1, unit="checkpoints")
    keep_every: int = key(0, "also keep multiples of this; 0: none", least=0, unit="steps")
    keep_best: int = key(0, "also keep the best by validation loss", least=0, unit="checkpoints")


AUTOMATIC, SNAPSHOT_SHARE = -1, 0.02  # snapshot_every: as many as cost under that share of the time


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(Section, name="elastic", resumable=True):
    """Time-outs after which a process counts as lost, and snapshots in the nodes' memory."""

    silence_s: float = key(30.0, "silence of a process that ends the run", least=1, most=60, unit="s")
    stall_s: float = key(600.0, "time without progress that ends the run; inf: no limit", least=1, unit="s")
    snapshot_every: int = key(
        AUTOMATIC,
        f"steps between snapshots in memory; -1: as many as take under {100 * SNAPSHOT_SHARE:g} % of the time",
        least=-1,
        unit="steps",
    )
    memory_dir: str = key("/dev/shm", "RAM disk of each node")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section, name="eval", resumable=True):
    """When and on how many batches a run is validated."""

    every: int = key(50, "steps between validations; 0: only at the end", least=0, unit="steps")
    num_batches: int = key(4, "global batches of one validation of each set", least=1, unit="batches")
    data: str = key("", "validation sets: NAME SOURCE[:PATH] or split, separated by commas; empty: split")
    patience: int = key(0, "validations without a lower loss that end the run; 0: none", least=0, unit="validations")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_sets(self.data)


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Section, name="sample", resumable=True):
    """Text sampled from a decoder at the end of a run."""

    prompt: str = key("def ", "text to continue")
    length: int = key(
        200,
        "tokens to sample; each gathers all parameters; 0: no sample",
        least=0,
        unit="tokens",
    )
    temperature: float = key(0.7, "sampling temperature; 0: the most likely token", least=0)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section, name="profile", resumable=True):
    """A trace of some steps, in the run's directory."""

    start: int = key(0, "first step that is traced; 0: no trace", least=0)
    steps: int = key(3, "steps that are traced", least=1, unit="steps")
