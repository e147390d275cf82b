"""Examples of text by index: windows of tokens, as inputs, targets and weights."""

import hashlib
import json

import numpy as np

from configs.schema import DataConfig
from input_pipeline import index, packing, streams
from input_pipeline.tokenizers import Tokenizer


class StreamWindows(index.Windows):
    """Windows of a token stream: tokens `[i * T, i * T + T + 1)` if causal, `[i * T, i * T + T)` if masked."""

    def __init__(self, stream: streams.Stream, seq_len: int, objective: str) -> None:
        self.content, self.bytes_per_token = stream.sha256, stream.bytes_per_token
        self.skipped = stream.skipped
        self._tokens, self._seq_len = np.asarray(stream.tokens), seq_len
        self._overlap = int(objective == "causal")
        self._length = index.num_windows(len(stream.tokens), seq_len, objective)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, window: int) -> np.ndarray:
        start = window * self._seq_len
        return np.asarray(self._tokens[start : start + self._seq_len + self._overlap], np.int32)


class TextDataset:
    """Examples `dataset[i]` for every i >= 0: an endless sequence of epochs, each of which visits every window once.

    An example holds the arrays of `row_arrays` and is a pure function of (seed, i):
    {"tokens": int32 [T], "targets": int32 [T], "weights": float32 [T]}.
    Causal: targets are the next tokens, weights are 1. Masked: targets are the original tokens, weights are 1 where the
    model must predict them and 0 elsewhere. If documents begin with the tokenizer's bos, a causal window that begins
    inside a document has bos in place of its first token. With a `data.packing` of documents, `segments` int32 [T]
    numbers the documents, and weights are 0 where the target belongs to another document.
    """

    threads = 1  # threads that prepare batches; cutting windows is cheap

    def __init__(self, windows: index.Windows, tokenizer: Tokenizer, config: DataConfig, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.seq_len = config.seq_len
        self.row_arrays = index.row_arrays(config)
        self.vocab_size = tokenizer.vocab_size(config.objective)
        self.bytes_per_token = windows.bytes_per_token  # average over the split, for bits per byte
        self._windows, self._objective, self._mask_rate = windows, config.objective, config.mask_rate
        self._packs, self._pads = config.packing != "stream", config.packing == "whole"
        self.filled, self.summary, self.skipped = windows.filled, windows.summary, windows.skipped
        settings = {
            "content": windows.content,
            "tokenizer": self.identity_of(tokenizer),
            "seq_len": config.seq_len,
            "objective": config.objective,
            "mask_rate": config.mask_rate if config.objective == "masked" else None,
        }
        settings |= {"packing": config.packing} if self._packs else {}
        # Equal fingerprints and seeds mean equal examples.
        self.fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def identity_of(self, tokenizer: Tokenizer) -> str:
        """Returns the identity of a tokenizer as far as it affects the examples."""
        return tokenizer.identity

    def __len__(self) -> int:
        """Returns the number of windows in an epoch."""
        return len(self._windows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        window = self._windows[self._windows.window_of(int(i), self.seed)]
        separator = self.tokenizer.separator
        segments = {"segments": packing.segments(window[: self.seq_len], separator)} if self._packs else {}
        if self._objective == "causal":
            tokens, weights = self._with_bos(window[:-1]), np.ones(self.seq_len, np.float32)
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

    def _with_bos(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the inputs int32 [T] of a causal model. A window that begins inside a document starts with bos.

        The token that bos replaces is the last target of the preceding window, so the loss counts it there.
        """
        bos, separator = self.tokenizer.document_bos, self.tokenizer.separator
        if bos is None:
            return tokens
        starts = np.append(True, tokens[:-1] == separator) & (tokens != separator)
        return np.where(starts, np.int32(bos), tokens)
