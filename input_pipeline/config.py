"""The settings of the input: the section `data` of a config, checked at the door."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

SOURCES = ("stdlib_text", "folder", "synthetic", "tfds:NAME")
TOKENIZERS = ("bytes", "sentencepiece", "tiktoken")
OBJECTIVES = ("causal", "masked")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to read and what to make of it. Raises ValueError for a setting that cannot work."""

    source: str  # stdlib_text | folder | synthetic | tfds:NAME
    path: str  # folder: where the text files are; tfds: its data_dir (empty: the default)
    tokenizer: str  # bytes | sentencepiece | tiktoken
    tokenizer_path: str  # the vocabulary file of a sentencepiece or tiktoken tokenizer
    seq_len: int  # tokens in an example
    objective: str  # causal | masked
    mask_rate: float  # masked: share of the tokens to predict
    prefetch: int  # batches prepared in the background; 0: none

    def __post_init__(self) -> None:
        if not (self.source.startswith("tfds:") and len(self.source) > len("tfds:")):
            check_choice("data.source", self.source, SOURCES)
        if self.source == SOURCES[-1]:
            raise ValueError("data.source is 'tfds:NAME': put a TFDS data set in NAME's place, such as 'tfds:lm1b'")
        check_choice("data.tokenizer", self.tokenizer, TOKENIZERS)
        check_choice("data.objective", self.objective, OBJECTIVES)
        if self.source == "folder" and not self.path:
            raise ValueError("data.path is empty: data.source='folder' needs the folder of the text files in data.path")
        if self.path and self.source in ("stdlib_text", "synthetic"):
            raise ValueError(
                f"data.path is {self.path!r} but data.source={self.source!r} reads no path: "
                "set data.source='folder' (or 'tfds:NAME'), or leave data.path empty"
            )
        if self.tokenizer != "bytes" and not self.tokenizer_path:
            raise ValueError(
                f"data.tokenizer_path is empty: data.tokenizer={self.tokenizer!r} needs its vocabulary file"
            )
        if self.tokenizer == "bytes" and self.tokenizer_path:
            raise ValueError(
                f"data.tokenizer_path is {self.tokenizer_path!r} but data.tokenizer='bytes' reads no file: "
                "set data.tokenizer to 'sentencepiece' or 'tiktoken', or leave data.tokenizer_path empty"
            )
        if self.source == "synthetic" and self.tokenizer != "bytes":
            raise ValueError(f"data.tokenizer is {self.tokenizer!r}: data.source='synthetic' works with 'bytes' only")
        if self.seq_len < 1:
            raise ValueError(f"data.seq_len is {self.seq_len}: an example needs at least 1 token")
        if not 0 < self.mask_rate <= 1:
            raise ValueError(f"data.mask_rate is {self.mask_rate}: it is a share, above 0 and at most 1 (BERT: 0.15)")
        if self.prefetch < 0:
            raise ValueError(f"data.prefetch is {self.prefetch}: 0 (no background) or more batches")


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raises ValueError unless `value` is one of `choices`; the message names the nearest one."""
    choices = tuple(choices)
    if value in choices:
        return
    raise ValueError(f"{key} is {value!r}: choose {', '.join(choices)}.{nearest(value, choices)}")


def nearest(value: str, choices: Iterable[str]) -> str:
    """Returns " Did you mean 'NAME'?" for the choice that is most like `value`, "" if none is."""
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
