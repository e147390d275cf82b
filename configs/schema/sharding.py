"""The section `sharding`: the partitioning of parameters, gradients and optimizer state."""

from dataclasses import dataclass

from configs.schema.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Section, name="sharding", resumable=True):
    """A strategy or three custom scopes, and the collectives over them."""

    strategy: str = key(
        "mics",
        "three scopes by name; custom takes them from the keys below",
        choices=("ddp", "zero1", "zero2", "zero3", "hsdp", "mics", "custom"),
        topics=("strategy",),
    )
    partition_size: int = key(0, "mics: devices that hold one copy of the model state", least=0, unit="devices")
    parameters: str | int = key("", "custom: scope of the parameters (none, node, all or a number of devices)")
    gradients: str | int = key("", "custom: scope of the gradients")
    optimizer: str | int = key("", "custom: scope of the optimizer state")
    experts: str | int = key(
        "none",
        "scope over which experts are divided, within the parameters': tokens travel to them; none: they are gathered",
    )
    hierarchical: bool = key(True, "gather between nodes first, then inside each node")
    two_hop: bool = key(True, "average replicas once per step; False: all-reduce in every micro-step")
    gather: str = key("layer", "how long gathered parameters live", choices=("layer", "node", "micro_step", "step"))
    overlap: str = key(
        "auto",
        "overlap gathers, hop one and hop two with compute; auto: where they can be",
        choices=("auto", "on", "off"),
    )
    reduce_dtype: str = key(
        "compute",
        "dtype of hop one's sums on GPUs: model.compute_dtype or float32; CPUs always sum in float32",
        choices=("compute", "float32"),
    )
    partitioner: str = key(
        "manual", "manual: shard_map; auto: XLA's partitioner on the same shardings", choices=("manual", "auto")
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
