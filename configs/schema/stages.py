"""What does not go together with `mesh.stages`, the stages of a pipeline."""

from collections.abc import Mapping

from configs.schema.compression import METHODS
from configs.schema.own import OWN

# key: the values that a pipeline supports, and what it could not do with others
NEEDS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "sharding.partitioner": (("manual",), "the schedule is not XLA's to choose"),
    "sharding.two_hop": ((True,), "it was not tried"),
    "compression.delayed": ((False,), "hop two begins when the pipeline is empty"),
    "local_sgd.inner_steps": ((0,), "it was not tried"),
    "sample.length": ((0,), "sampling runs all layers on every device"),
}


def refuse(values: Mapping[str, object]) -> None:
    """Raises ValueError for a config, its values by full name, that a pipeline does not support."""
    stages = values["mesh.stages"]
    for name, (supported, why) in NEEDS.items():
        if values[name] not in supported:
            fix = " or ".join(map(str, supported))
            raise ValueError(f"{name}={values[name]} does not go with mesh.stages={stages}: {why}; set {name}={fix}")
    hop_two = values["compression.hop_two"]
    if hop_two in METHODS or hop_two in OWN["hop_two"]:
        raise ValueError(
            f"compression.hop_two={hop_two} does not go with mesh.stages={stages}: it was not tried on layers that are "
            "cut over stages; set it to none or to a codec"
        )
