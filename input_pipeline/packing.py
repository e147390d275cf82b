"""Several documents in a row: the document of each position, and rows of whole documents.

A document ends with its separator. A text that contains the separator's id itself, such as the byte 0, counts as
several documents.
"""

import abc
import hashlib
from pathlib import Path

import numpy as np

from input_pipeline import cache, index, streams
from input_pipeline.tokenizers import Tokenizer

FORMAT = 1  # version of the files; part of the folder's name
BLOCK = 1 << 24  # tokens per search for separators


def segments(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Returns int32 [T]: the document number of each token in a row, from 0.

    A separator belongs to the document it ends.
    """
    ends = tokens == separator
    return (np.cumsum(ends) - ends).astype(np.int32)


def is_padding(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Returns bool [T]: the separators that end no document, because no token precedes them."""
    ends = tokens == separator
    return ends & np.append(True, ends[:-1])


class PackedRows(index.Windows):
    """Windows of up to `length` tokens of a stream, each made of whole pieces by best-fit-decreasing packing.

    Pieces are placed from the longest to the shortest, each in the fullest row in which it still fits.
    """

    def __init__(self, content: str, length: int) -> None:
        self.content, self._length = content, length
        folder = cache.prepared(f"rows/{content[:32]}", self._write)
        self._pieces = np.load(folder / "pieces.npy", mmap_mode="r")  # int64 [P, 2]: first token, end; row by row
        self._first = np.load(folder / "rows.npy", mmap_mode="r")  # int64 [rows + 1]: each row's first piece
        self.filled = float(np.diff(self._pieces).sum()) / (len(self) * length)  # fraction that is not padding

    def __len__(self) -> int:
        return len(self._first) - 1

    @abc.abstractmethod
    def find_pieces(self) -> np.ndarray:
        """Returns int64 [P, 2]: first token and end of each piece of 1 to `length` tokens."""

    def pieces(self, window: int) -> np.ndarray:
        """Returns int64 [P, 2]: first token and end of each piece of a row."""
        return self._pieces[self._first[window] : self._first[window + 1]]

    def _write(self, folder: Path) -> None:
        pieces = self.find_pieces()
        rows = best_fit(np.diff(pieces)[:, 0], self._length)
        np.save(folder / "pieces.npy", pieces[np.argsort(rows, kind="stable")])
        np.save(folder / "rows.npy", np.append(0, np.cumsum(np.bincount(rows))))


class WholeDocuments(PackedRows):
    """Windows [T + 1] (causal) or [T] of whole documents, padded with separators.

    Only documents longer than a window are cut: into windows as in a stream, and a remainder. All windows except these
    therefore contain only whole documents and remainders, which end with a separator.
    """

    def __init__(self, stream: streams.Stream, seq_len: int, objective: str, tokenizer: Tokenizer) -> None:
        self._tokens, self._separator = np.asarray(stream.tokens), tokenizer.separator
        self._step, length = seq_len, seq_len + (objective == "causal")
        self.bytes_per_token, self.skipped = stream.bytes_per_token, stream.skipped
        rule = f"{FORMAT} {stream.sha256} {tokenizer.identity} {seq_len} {length}"
        super().__init__(hashlib.sha256(rule.encode()).hexdigest(), length)

    def __getitem__(self, window: int) -> np.ndarray:
        found = np.concatenate([self._tokens[start:end] for start, end in self.pieces(window)]).astype(np.int32)
        return np.pad(found, (0, self._length - len(found)), constant_values=self._separator)

    def find_pieces(self) -> np.ndarray:
        blocks = range(0, len(self._tokens), BLOCK)
        ends = [np.flatnonzero(self._tokens[b : b + BLOCK] == self._separator) + b + 1 for b in blocks]
        ends = np.concatenate(ends)
        starts = np.append(0, ends[:-1])
        cuts = np.maximum(1, -(-(ends - starts - (self._length - self._step)) // self._step))  # pieces per document
        number = np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        first = np.repeat(starts, cuts) + number * self._step
        pieces = np.stack([first, np.minimum(np.repeat(ends, cuts), first + self._length)], axis=1)
        pieces = pieces[np.diff(pieces)[:, 0] > 1]  # a separator alone teaches nothing
        if not len(pieces):
            raise ValueError("data.packing='whole': no document has a token; set data.packing='stream'")
        return pieces


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """Returns the row, int64 [P], of each piece of 1 to `size` tokens, packed by best fit decreasing."""
    rows, count = np.empty(len(lengths), np.int64), 0
    with_room: list[list[int]] = [[] for _ in range(size + 1)]  # rows by their free space
    rooms = 0  # bit s is set if some row has room for s tokens
    for piece in np.argsort(-lengths, kind="stable"):
        length = int(lengths[piece])
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            rooms ^= (not with_room[room]) << room
        else:
            room, row, count = size, count, count + 1
        rows[piece] = row
        with_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows
