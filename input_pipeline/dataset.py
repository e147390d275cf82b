"""Examples by index: `load` returns a `Dataset` whose example `i` depends on (seed, i) only."""

import hashlib
import json
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from configs.schema import DataConfig
from configs.schema.own import OWN
from input_pipeline import digits, folder, index, packing, stdlib_text, streams, tfds_images, tfds_text
from input_pipeline.images import ImageDataset, Images
from input_pipeline.mixture import MixedDataset
from input_pipeline.rows import row_arrays
from input_pipeline.shards import ShardSet
from input_pipeline.synthetic import SyntheticWindows
from input_pipeline.synthetic_images import SyntheticImages
from input_pipeline.tokenizers import Tokenizer, make_tokenizer

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


class Windows(Protocol):
    """Token windows by index, in the order of the text."""

    content: str  # hash of all tokens
    bytes_per_token: float

    def __len__(self) -> int: ...

    def window_of(self, i: int, seed: int) -> int:
        """Returns the window of example `i` >= 0: each epoch of `len` examples visits every window once."""
        ...

    def __getitem__(self, window: int) -> np.ndarray:
        """Returns int32 [T + 1] for a causal model, [T] for a masked one."""
        ...


class StreamWindows(index.Shuffled):
    """Windows of a token stream: tokens `[i * T, i * T + T + 1)` if causal, `[i * T, i * T + T)` if masked."""

    def __init__(self, stream: streams.Stream, seq_len: int, objective: str) -> None:
        self.content, self.bytes_per_token = stream.sha256, stream.bytes_per_token
        self._tokens, self._seq_len = np.asarray(stream.tokens), seq_len
        self._overlap = int(objective == "causal")
        self._length = index.num_windows(len(stream.tokens), seq_len, objective)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, window: int) -> np.ndarray:
        start = window * self._seq_len
        return np.asarray(self._tokens[start : start + self._seq_len + self._overlap], np.int32)


class TextDataset:
    """Examples `dataset[i]` for every i >= 0, an endless sequence of epochs, each of which visits every window once.

    An example holds the arrays of `row_arrays` and is a pure function of (seed, i):
    {"tokens": int32 [T], "targets": int32 [T], "weights": float32 [T]}.
    Causal: targets are the next tokens, weights are 1. Masked: targets are the original tokens, weights are 1
    where the model must predict them and 0 elsewhere. With a `data.packing` of documents, `segments` int32 [T] numbers
    the documents, and weights are 0 where the target is not of the same document.
    """

    threads = 1  # that prepare batches; cutting windows is cheap

    def __init__(self, windows: Windows, tokenizer: Tokenizer, config: DataConfig, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.seq_len = config.seq_len
        self.row_arrays = row_arrays(config)
        self.vocab_size = tokenizer.vocab_size(config.objective)
        self.bytes_per_token = windows.bytes_per_token  # average over the split, for bits per byte
        self._windows, self._objective, self._mask_rate = windows, config.objective, config.mask_rate
        self._packs, self._pads = config.packing != "stream", config.packing == "whole"
        # share of the positions that hold tokens; the others have weight 0
        self.filled = windows.filled if isinstance(windows, packing.WholeDocuments) else 1.0
        settings = {
            "content": windows.content,
            "tokenizer": tokenizer.identity,
            "seq_len": config.seq_len,
            "objective": config.objective,
            "mask_rate": config.mask_rate if config.objective == "masked" else None,
        }
        settings |= {"packing": config.packing} if self._packs else {}
        # Equal fingerprints and seeds mean equal examples.
        self.fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        """Returns the number of windows in an epoch."""
        return len(self._windows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if i < 0:
            raise IndexError(f"example {i}: examples are numbered from 0")
        window = self._windows[self._windows.window_of(int(i), self.seed)]
        separator = self.tokenizer.separator
        segments = {"segments": packing.segments(window[: self.seq_len], separator)} if self._packs else {}
        if self._objective == "causal":
            tokens, weights = window[:-1], np.ones(self.seq_len, np.float32)
            if self._packs:
                weights[tokens == separator] = 0
            return {"tokens": tokens, "targets": window[1:].copy(), "weights": weights} | segments
        tokens, weights = index.mask_tokens(
            window,
            key=(self.seed, int(i)),
            rate=self._mask_rate,
            mask_id=self.tokenizer.mask_id,
            num_ids=self.tokenizer.num_ids,
        )
        if self._pads:
            weights[packing.is_padding(window, separator)] = 0
        return {"tokens": tokens, "targets": window, "weights": weights} | segments


Dataset = TextDataset | MixedDataset | ImageDataset


def load(config: DataConfig, split: Split, seed: int, shards: Sequence[ShardSet] = ()) -> Dataset:
    """Returns the examples of a split; text is tokenised into the cache the first time.

    `shards` are the open sets of data.source=shards; one that is not there is opened for this process alone.
    Raises ValueError for data or a vocabulary that is missing, empty or unreadable, or data too small for one example.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split} is not known; one of {', '.join(SPLITS)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}: use a number from 0 to 2**63 - 1")
    if config.objective == "classify":
        return ImageDataset(_images(config, split), config, seed, training=split == "train")
    if components := config.components:
        examples = [_load_text(config.alone(component), split, seed, shards) for component in components]
        return MixedDataset(examples, [one.name for one in components], [one.weight for one in components])
    return _load_text(config, split, seed, shards)


def _images(config: DataConfig, split: Split) -> Images:
    if config.source == "digits":
        return digits.Digits(split)
    if config.source == "synthetic":
        return SyntheticImages(config.image_size, config.channels, split)
    if config.source in OWN["source"]:
        return OWN["source"][config.source](config, split)
    return tfds_images.TfdsImages(config.source.removeprefix("tfds:"), config.path, split)


def _load_text(config: DataConfig, split: Split, seed: int, shards: Sequence[ShardSet]) -> TextDataset:
    tokenizer = make_tokenizer(config.tokenizer, config.tokenizer_path)
    if config.source == "synthetic":
        windows = SyntheticWindows(config.seq_len, config.objective, tokenizer.num_ids, split)
    elif config.source == "shards":
        opened = next((one for one in shards if one.path == config.path), None) or ShardSet(config, tokenizer)
        windows = opened.windows(split)
    else:
        source = _text_source(config, split)
        stream = streams.tokenised(source, tokenizer)
        if config.packing == "whole":
            windows = packing.WholeDocuments(stream, config.seq_len, config.objective, tokenizer)
        else:
            windows = StreamWindows(stream, config.seq_len, config.objective)
        if len(windows) == 0:
            needed = config.seq_len + (config.objective == "causal")
            raise ValueError(
                f"{source.name} has {len(stream.tokens)} tokens in its {split} split, but one example needs {needed}: "
                "lower data.seq_len or add text"
            )
    if windows.shuffled_together > index.MAX_WINDOWS:
        raise ValueError(
            f"data.seq_len={config.seq_len} gives the {split} split {windows.shuffled_together} windows, more than the "
            f"{index.MAX_WINDOWS} that can be shuffled; raise data.seq_len"
        )
    return TextDataset(windows, tokenizer, config, seed)


def _text_source(config: DataConfig, split: Split) -> streams.TextSource:
    if config.source == "stdlib_text":
        return stdlib_text.source(split)
    if config.source == "folder":
        return folder.source(config.path, split, config.pattern)
    if config.source in OWN["source"]:
        return OWN["source"][config.source](config, split)
    return tfds_text.source(config.source.removeprefix("tfds:"), config.path, split)
