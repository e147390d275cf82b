"""The section `optimizer`: the optimizer, its schedule, clipping, and the guard against non-finite updates."""

import math
from dataclasses import dataclass

from configs.schema.keys import Section, key

NAMES = ("adamw", "sgd", "lamb", "lars", "adafactor", "muon")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, name="optimizer"):
    """The optimizer, its schedule, clipping, and the guard against non-finite updates."""

    name: str = key("adamw", "optimizer", choices=NAMES, topics=("optimizer",))
    learning_rate: float = key(1e-3, "peak learning rate", above=0, below=math.inf)
    schedule: str = key(
        "cosine",
        "schedule after the warm-up; quadratic: the square of the share of steps left; wsd: the peak until "
        "decay_fraction of all steps is left, then linear",
        choices=("constant", "linear", "cosine", "quadratic", "wsd"),
        topics=("schedule",),
    )
    warmup_steps: int = key(10, "steps of the linear warm-up to the peak", least=0, unit="steps")
    final_fraction: float = key(0.1, "learning rate of the last step, as a share of the peak", least=0)
    decay_fraction: float = key(0.1, "wsd: share of all steps with a falling learning rate", above=0, most=1)
    momentum: float = key(0.9, "sgd, lars, muon: momentum", least=0, below=1)
    b1: float = key(0.9, "adamw, lamb, muon: decay of the first moment", least=0, below=1)
    b2: float = key(0.95, "adamw, lamb, muon: decay of the second moment", least=0, below=1)
    eps: float = key(1e-8, "adamw, lamb, muon: added to the denominator", above=0, below=math.inf)
    weight_decay: float = key(0.1, "weight decay", least=0)
    decay_mask: str = key("matrices", "what decays; matrices: no biases, norms, positions", choices=("all", "matrices"))
    clip_norm: float = key(1.0, "global norm of clipped gradients; 0 for no clipping", least=0)
    max_skipped: int = key(10, "consecutive non-finite updates that end the run", least=1, unit="steps")
