"""The section `sample`: text sampled from a decoder at the end of a run."""

from dataclasses import dataclass

from configs.schema.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Section):
    """Text sampled from a decoder at the end of a run."""

    SECTION = "sample"
    RESUMABLE = True

    prompt: str = key("def ", "text to continue")
    length: int = key(200, "tokens to sample; 0 for no sample", least=0, unit="tokens")
    temperature: float = key(0.7, "sampling temperature; 0 always takes the most likely token", least=0)
