"""The section `local_sgd`: replicas that synchronise only every few steps (DiLoCo, Streaming DiLoCo)."""

from dataclasses import dataclass

from configs.schema.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(Section):
    """The steps between synchronisations, and the outer optimizer (on the replicas' mean movement)."""

    SECTION = "local_sgd"

    inner_steps: int = key(
        0, "local steps of each replica between synchronisations; 0 turns local SGD off", least=0, unit="steps"
    )
    outer_learning_rate: float = key(
        0.7, "learning rate of Nesterov SGD on the replicas' mean movement (DiLoCo); 1 for plain averaging", above=0
    )
    outer_momentum: float = key(0.9, "momentum of that SGD; 0 for plain averaging", least=0, below=1)
    streaming: bool = key(
        False, "synchronise 1/inner_steps of each tensor in every step, beside the compute (Streaming DiLoCo)"
    )
