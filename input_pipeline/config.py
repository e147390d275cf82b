"""The settings of the input: the section `data` of a config, checked at the door."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SOURCES = ("stdlib_text", "folder", "synthetic", "digits", "tfds:NAME")
TOKENIZERS = ("bytes", "sentencepiece", "tiktoken")
OBJECTIVES = ("causal", "masked", "classify")
AUGMENTATIONS = ("none", "crop_flip")


class RowArray(NamedTuple):
    """Shape and dtype of one array of an example; a batch has one such row for each of its examples."""

    shape: tuple[int, ...]
    dtype: type[np.generic]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to read and what to make of it. Raises ValueError for a setting that cannot work."""

    source: str  # stdlib_text | folder | synthetic | digits | tfds:NAME
    path: str  # folder: where the text files are; tfds: its data_dir (empty: the default)
    tokenizer: str  # bytes | sentencepiece | tiktoken
    tokenizer_path: str  # the vocabulary file of a sentencepiece or tiktoken tokenizer
    seq_len: int  # tokens in an example
    objective: str  # causal | masked: text; classify: images
    mask_rate: float  # masked: share of the tokens to predict
    image_size: int  # classify: pixels a side
    channels: int  # classify: 1 grey, 3 colours
    augment: str  # classify: none | crop_flip
    prefetch: int  # batches prepared in the background; 0: none

    def __post_init__(self) -> None:
        if not (self.source.startswith("tfds:") and len(self.source) > len("tfds:")):
            check_choice("data.source", self.source, SOURCES)
        if self.source == SOURCES[-1]:
            raise ValueError("data.source is 'tfds:NAME': put a TFDS data set in NAME's place, such as 'tfds:lm1b'")
        check_choice("data.tokenizer", self.tokenizer, TOKENIZERS)
        check_choice("data.objective", self.objective, OBJECTIVES)
        check_choice("data.augment", self.augment, AUGMENTATIONS)
        if not self.source.startswith("tfds:") and (self.source == "digits") != (self.objective == "classify"):
            wanted = "'classify'" if self.source == "digits" else "'causal' or 'masked'"
            raise ValueError(
                f"data.objective is {self.objective!r}, which data.source={self.source!r} has no examples for: set it "
                f"to {wanted}"
            )
        if self.source == "folder" and not self.path:
            raise ValueError("data.path is empty: data.source='folder' needs the folder of the text files in data.path")
        if self.path and self.source in ("stdlib_text", "synthetic", "digits"):
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
        if self.image_size < 1:
            raise ValueError(f"data.image_size is {self.image_size}: an image has at least 1 pixel a side")
        if self.channels not in (1, 3):
            raise ValueError(f"data.channels is {self.channels}: 1 (grey) or 3 (colours)")
        if self.prefetch < 0:
            raise ValueError(f"data.prefetch is {self.prefetch}: 0 (no background) or more batches")

    @property
    def row_arrays(self) -> dict[str, RowArray]:
        """The arrays of an example by name; the first is the model's input, `weights` is among them."""
        if self.objective == "classify":
            shape = (self.image_size, self.image_size, self.channels)
            return {
                "images": RowArray(shape, np.float32),
                "labels": RowArray((), np.int32),
                "weights": RowArray((), np.float32),
            }
        return {
            "tokens": RowArray((self.seq_len,), np.int32),
            "targets": RowArray((self.seq_len,), np.int32),
            "weights": RowArray((self.seq_len,), np.float32),
        }


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
