"""Chats: conversations in files of JSON lines, of whose tokens only those of the answers count.

A line is `{"messages": [{"role": ..., "content": ...}, ...]}`, or a prompt and its answer, `{"prompt": ..., "answer":
...}`. The chat template of the tokenizer makes a text of it; a row holds whole conversations, which do not see each
other.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.schema import DataConfig
from files import json_objects
from files.paths import user_path
from input_pipeline import cache, folder, packing
from input_pipeline.chat_template import ChatTemplate, Messages
from input_pipeline.shard_index import Progress
from input_pipeline.text import TextDataset
from input_pipeline.tokenizers import HuggingFace, Tokenizer

FORMAT = 1  # version of the files in the cache; part of the folder's name
ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = ("answer", "completion", "response")  # the names of an answer beside a `prompt`


@dataclass(frozen=True, kw_only=True)
class ChatTokens:
    """The tokens of all conversations of a split, one after another."""

    tokens: np.ndarray  # [N] uint16 or uint32, read-only and memory-mapped
    is_answer: np.ndarray  # bool [N]; never the first token of a conversation, which nothing predicts
    ends: np.ndarray  # int64 [C], of the conversations
    sha256: str  # of these three, conversation by conversation
    bytes_per_token: float  # of the answers
    unread: tuple[str, ...]  # names of fields that were not read


class Row(NamedTuple):
    """Conversations beside each other, filled up."""

    tokens: np.ndarray  # int32 [T + 1]
    is_answer: np.ndarray  # bool [T + 1]
    segments: np.ndarray  # int32 [T + 1]: the conversations are numbered from 0, the padding has the last number


class ChatRows(packing.PackedRows):
    """Windows [T + 1] of whole conversations.

    A longer conversation is cut after T + 1 tokens; one without an answer up to there is left out.
    """

    def __init__(self, name: str, chats: ChatTokens, seq_len: int, padding: int) -> None:
        starts = np.append(0, chats.ends[:-1])
        stops = np.minimum(chats.ends, starts + seq_len + 1)
        counts = np.array([np.count_nonzero(chats.is_answer[a:b]) for a, b in zip(starts, stops, strict=True)])
        if not counts.any():
            raise ValueError(f"{name}: no answer begins within data.seq_len={seq_len} tokens; raise data.seq_len")
        self._found = np.stack([starts, stops], axis=1)[counts > 0]
        self._chats, self._padding, self.bytes_per_token = chats, padding, chats.bytes_per_token
        cut, left_out = np.count_nonzero((stops < chats.ends) & (counts > 0)), np.count_nonzero(counts == 0)
        total = np.diff(self._found).sum()
        self.summary = f"{name}: {len(self._found)} conversations, {counts.sum()} of their {total} tokens are answers"
        self.summary += f"; {cut} longer than a row were cut" if cut else ""
        self.summary += f"; {left_out} more had no answer within a row and were left out" if left_out else ""
        self.summary += f"; fields not read: {', '.join(chats.unread)}" if chats.unread else ""
        rule = f"chats {FORMAT} {packing.FORMAT} {chats.sha256} {seq_len}"
        super().__init__(hashlib.sha256(rule.encode()).hexdigest(), seq_len + 1)

    def find_pieces(self) -> np.ndarray:
        return self._found

    def __getitem__(self, window: int) -> np.ndarray:
        return self.row(window).tokens

    def row(self, window: int) -> Row:
        """Returns a row by its number."""
        pieces = self.pieces(window)
        lengths = np.diff(pieces)[:, 0]
        fill = self._length - int(lengths.sum())

        def beside(values: np.ndarray, padding: int, dtype: type) -> np.ndarray:
            return np.concatenate([*(values[a:b] for a, b in pieces), np.full(fill, padding)]).astype(dtype)

        return Row(
            tokens=beside(self._chats.tokens, self._padding, np.int32),
            is_answer=beside(self._chats.is_answer, 0, np.bool_),
            segments=np.repeat(np.arange(len(pieces) + 1, dtype=np.int32), [*lengths, fill]),
        )


class ChatDataset(TextDataset):
    """Examples of rows of conversations, as those of TextDataset: weights are 1 where the target is of an answer."""

    def __init__(self, rows: ChatRows, tokenizer: Tokenizer, config: DataConfig, seed: int) -> None:
        super().__init__(rows, tokenizer, config, seed)
        self._rows = rows

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        row = self._rows.row(self._rows.window_of(int(i), self.seed))
        weights = row.is_answer[1:].astype(np.float32)
        return {
            "tokens": row.tokens[:-1],
            "targets": row.tokens[1:].copy(),
            "weights": weights,
            "segments": row.segments[:-1],
        }


def load_rows(config: DataConfig, split: str, tokenizer: HuggingFace) -> ChatRows:
    """Returns the rows of a split; the conversations are tokenised into the cache the first time.

    Validation has the conversations whose line hashes into the lowest 5 %, at least one, so equal ones are in one
    split. Raises ValueError, which names file and line, for one that cannot be read or rendered, or has no answer.
    """
    path, template = user_path(config.path), ChatTemplate(user_path(config.tokenizer_path))
    files = _files(path)
    name = f"data.path {path}"
    root = path if path.is_dir() else path.parent
    signature = folder.signature(f"chats {split}", root, [file.relative_to(root).as_posix() for file in files])
    key = hashlib.sha256(
        f"{FORMAT}\n{signature}\n{tokenizer.identity}\n{tokenizer.num_ids}\n{template.identity}".encode()
    ).hexdigest()[:32]

    def write(to: Path) -> None:
        _write(to, name, files, split, tokenizer, template)

    found = cache.prepared(f"chats/{key}", write)
    meta = json_objects.read(found / "meta.json")
    chats = ChatTokens(
        tokens=np.memmap(found / "tokens.bin", dtype=meta["dtype"], mode="r"),
        is_answer=np.memmap(found / "answers.bin", dtype=np.bool_, mode="r"),
        ends=np.load(found / "ends.npy"),
        sha256=meta["sha256"],
        bytes_per_token=meta["answer_bytes"] / meta["answer_tokens"],
        unread=tuple(meta["unread"]),
    )
    return ChatRows(name, chats, config.seq_len, tokenizer.separator)


def messages_of(record: Mapping[str, Any]) -> tuple[Messages, list[str]]:
    """Returns the messages of a line, and the names of its fields that were not read. ValueError if it has none."""
    if "messages" in record:
        messages, read = record["messages"], {"messages"}
    else:
        answer = next((name for name in ANSWERS if name in record), "")
        if "prompt" not in record or not answer:
            there = ", ".join(sorted(map(str, record))) or "nothing"
            raise ValueError(
                f"it has {there}, but neither messages nor prompt and {', '.join(ANSWERS[:-1])} or {ANSWERS[-1]}"
            )
        read = {"prompt", answer}
        messages = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record[answer]}]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("its messages are no list of objects")
    for number, message in enumerate(messages, start=1):
        if (role := message.get("role")) not in ROLES:
            raise ValueError(f"message {number} has the role {role!r}; known are {', '.join(ROLES)}")
        if not isinstance(content := message.get("content"), str):
            raise ValueError(f"message {number} has a content of type {type(content).__name__}, and no text")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("it has no answer: no message has the role assistant")
    return messages, sorted(set(record) - read)


def _files(path: Path) -> list[Path]:
    """Returns the file, or those below a folder that end with .jsonl. ValueError if there are none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"data.path {path} does not exist; set it to a file of JSON lines, or a folder of .jsonl files"
        )
    names = [name for name in folder.text_files(path) if name.endswith(".jsonl")]
    if not names:
        raise ValueError(f"data.path {path} has no files that end with .jsonl")
    return [path / name for name in names]


def _lines(files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yields where a line is, and the line; not those without text."""
    for file in files:
        try:
            with file.open("rb") as opened:
                for number, line in enumerate(opened, start=1):
                    if line.strip():
                        yield f"{file}, line {number}", line
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from error


def _chosen(name: str, files: list[Path], split: str) -> Iterator[tuple[str, bytes]]:
    """Yields the lines of a split."""
    hashes = [hashlib.sha256(line.strip()).hexdigest() for _, line in _lines(files)]
    held_out = folder.validation_names([*dict.fromkeys(hashes)]) if hashes else set()
    chosen = [split == "all" or (one in held_out) == (split == "validation") for one in hashes]
    if not any(chosen):
        raise ValueError(
            f"{name} has {len(set(hashes))} different conversations; training and validation need one each"
        )
    yield from (line for line, wanted in zip(_lines(files), chosen, strict=True) if wanted)


def _write(to: Path, name: str, files: list[Path], split: str, tokenizer: HuggingFace, template: ChatTemplate) -> None:
    """Writes the tokens of a split's conversations, which of them are of answers, and where conversations end."""
    dtype = np.dtype("<u2") if tokenizer.num_ids <= 1 << 16 else np.dtype("<u4")
    digest, progress, ends, unread, answer_tokens, answer_bytes = hashlib.sha256(), Progress(), [0], set(), 0, 0
    with open(to / "tokens.bin", "wb") as tokens, open(to / "answers.bin", "wb") as answers:
        for where, line in _chosen(name, files, split):
            try:
                record = json_objects.parse(line, where, lenient=True)
            except ValueError as error:  # such as a list of all conversations
                raise ValueError(f"{error}; write each conversation as an object on a line of its own") from error
            try:
                messages, others = messages_of(record)
                ids, is_answer, text_bytes = encode(messages, tokenizer, template)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            for file, values in ((tokens, ids.astype(dtype)), (answers, is_answer)):
                file.write(payload := values.tobytes())
                digest.update(payload)
            ends.append(ends[-1] + len(ids))
            unread.update(others)
            answer_tokens += int(is_answer.sum())
            answer_bytes += text_bytes
            progress.say("%s: %d conversations of the %s split are tokenised", name, len(ends) - 1, split)
    np.save(to / "ends.npy", np.array(ends[1:], np.int64))
    meta = {"dtype": dtype.str, "sha256": digest.hexdigest(), "unread": sorted(unread)}
    meta |= {"answer_tokens": answer_tokens, "answer_bytes": answer_bytes}
    (to / "meta.json").write_text(json.dumps(meta, indent=1))


def encode(messages: Messages, tokenizer: HuggingFace, template: ChatTemplate) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns a conversation's ids [N], whether each is of an answer [N], and the UTF-8 bytes of the answers.

    A token that an answer shares with what is beside it counts. ValueError if none does.
    """
    text, spans = template.answers(messages)
    ids, characters = tokenizer.encode_template(text)
    is_answer = np.zeros(len(ids), np.bool_)
    for start, end in spans:
        is_answer |= (characters[:, 0] < end) & (characters[:, 1] > start)
    is_answer[:1] = False
    if not is_answer.any():
        raise ValueError("it has no answer: the chat template makes no token of one")
    return ids, is_answer, sum(len(text[start:end].encode()) for start, end in spans)
