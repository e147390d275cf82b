"""The section `eval`: when and on how many batches a run is validated."""

from dataclasses import dataclass

from configs.schema.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """When and on how many batches a run is validated."""

    SECTION = "eval"
    RESUMABLE = True

    every: int = key(50, "steps between validations; 0 validates only at the end", least=0, unit="steps")
    num_batches: int = key(4, "global batches of one validation", least=1, unit="batches")
