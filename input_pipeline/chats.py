"""Chats: conversations in JSON-lines files, with a loss on the tokens of the answers only.

A line is `{"messages": [{"role": ..., "content": ...}, ...]}`, or a prompt and its answer, `{"prompt": ..., "answer":
...}`. The chat template of the tokenizer renders it as text. A row holds whole conversations, which do not attend to
each other. `"weight": 0` or `"train": false` in an answer excludes it from the loss. The summary of the rows names
every other field that has no effect.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.schema import DataConfig
from input_pipeline import cache, folder, packing
from input_pipeline.chat_template import CharacterSpan, ChatTemplate, Messages
from input_pipeline.shard_index import ProgressWarning
from input_pipeline.text import TextDataset
from input_pipeline.tokenizers import HuggingFace, Tokenizer, utf8
from runtime.command_line import one_line
from runtime.files import json_objects
from runtime.files.json_objects import JsonMapping
from runtime.files.paths import user_path

FORMAT = 2  # version of the files in the cache; part of the folder's name
RULE = 1  # version of the rows that follow from these files; part of the fingerprint
ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = ("answer", "completion", "response")  # the names of an answer to a `prompt`
MASKS = ("weight", "train")  # fields of a message that exclude its answer from the loss
MOST_NAMED = 20  # fields without effect; a foreign file may have any number
OTHER_FILES = (".gz", ".zst", ".bz2", ".xz", ".zip", ".parquet", ".arrow")  # endings of files without JSON lines


@dataclass(frozen=True, kw_only=True)
class ChatTokens:
    """The tokens of all conversations of a split, one after another."""

    tokens: np.ndarray  # [N] uint16 or uint32, read-only and memory-mapped
    is_answer: np.ndarray  # bool [N]; never the first token of a conversation, which nothing predicts
    ends: np.ndarray  # int64 [C], end of each conversation
    sha256: str  # hash of the three arrays, conversation by conversation
    bytes_per_token: float  # averaged over the answers
    of_split: str  # for messages
    masked: int  # answers that `weight` or `train` excludes from the loss
    unused: tuple[str, ...]  # descriptions of the fields that have no effect, with their counts


class ChatRow(NamedTuple):
    """Consecutive conversations, padded to T + 1 tokens."""

    tokens: np.ndarray  # int32 [T + 1]
    is_answer: np.ndarray  # bool [T + 1]
    segments: np.ndarray  # int32 [T + 1]: the conversations are numbered from 0, the padding has the last number


class ChatRows(packing.PackedRows):
    """Windows [T + 1] of whole conversations.

    A longer conversation is cut after T + 1 tokens, and left out if they contain no answer.
    """

    def __init__(self, name: str, chats: ChatTokens, seq_len: int, padding: int) -> None:
        starts = np.append(0, chats.ends[:-1])
        stops = np.minimum(chats.ends, starts + seq_len + 1)
        counts = _counts(chats.is_answer, starts, stops)
        is_trained = _counts(chats.is_answer, starts, chats.ends) > 0
        if not is_trained.any():
            raise ValueError(f"{name}: `weight` or `train` excludes every answer from the loss{chats.of_split}")
        if not counts.any():
            where = f"within data.seq_len={seq_len} tokens{chats.of_split}"
            raise ValueError(f"{name}: no answer begins {where}; raise data.seq_len")
        self._found = np.stack([starts, stops], axis=1)[counts > 0]
        self._chats, self._padding, self.bytes_per_token = chats, padding, chats.bytes_per_token
        parts = {
            "longer than a row were cut": (stops < chats.ends) & (counts > 0),
            "more had no answer within a row and were left out": is_trained & (counts == 0),
            "more had no answer of weight 1 and were left out": ~is_trained,
        }
        numbers = {text: int(np.count_nonzero(which)) for text, which in parts.items()}
        numbers |= {"answers have weight 0 or train false": chats.masked}
        total = np.diff(self._found).sum()
        self.summary = f"{name}: {len(self._found)} conversations, {counts.sum()} of their {total} tokens are answers"
        self.summary += "".join(f"; {count} {text}" for text, count in numbers.items() if count)
        self.summary += f"; without effect: {', '.join(chats.unused)}" if chats.unused else ""
        rule = f"chats {RULE} {packing.FORMAT} {chats.sha256} {seq_len}"
        super().__init__(hashlib.sha256(rule.encode()).hexdigest(), seq_len + 1)

    def find_pieces(self) -> np.ndarray:
        return self._found

    def __getitem__(self, window: int) -> np.ndarray:
        return self.row(window).tokens

    def row(self, window: int) -> ChatRow:
        """Returns row number `window`."""
        pieces = self.pieces(window)
        lengths = np.diff(pieces)[:, 0]
        fill = self._length - int(lengths.sum())

        def beside(values: np.ndarray, padding: int, dtype: type) -> np.ndarray:
            return np.concatenate([*(values[a:b] for a, b in pieces), np.full(fill, padding)]).astype(dtype)

        return ChatRow(
            tokens=beside(self._chats.tokens, self._padding, np.int32),
            is_answer=beside(self._chats.is_answer, 0, np.bool_),
            segments=np.repeat(np.arange(len(pieces) + 1, dtype=np.int32), [*lengths, fill]),
        )


def _counts(is_answer: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Returns int [C]: the number of answer tokens in each range."""
    return np.array([np.count_nonzero(is_answer[a:b]) for a, b in zip(starts, stops, strict=True)])


class ChatDataset(TextDataset):
    """Examples of rows of conversations, as in TextDataset. Weights are 1 where the target belongs to an answer."""

    def __init__(self, rows: ChatRows, tokenizer: Tokenizer, config: DataConfig, seed: int) -> None:
        super().__init__(rows, tokenizer, config, seed)
        self._rows = rows

    def identity_of(self, tokenizer: Tokenizer) -> str:
        """Returns the identity of the vocabulary, because the template begins and ends a conversation."""
        assert isinstance(tokenizer, HuggingFace)
        return tokenizer.file_identity

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
    """Returns the rows of a split. The conversations are tokenised into the cache the first time.

    Validation has the conversations whose line hashes into the lowest 5 %, at least one, so that equal conversations
    are in the same split. Raises ValueError with file and line for a conversation that cannot be read or rendered, or
    has no answer.
    """
    path, template = user_path(config.path), ChatTemplate(user_path(config.tokenizer_path))
    files = _files(path)
    name = f"data.path {path}"
    root = path if path.is_dir() else path.parent
    signature = folder.signature(f"chats {split}", root, [file.relative_to(root).as_posix() for file in files])
    key = hashlib.sha256(
        f"{FORMAT}\n{signature}\n{tokenizer.file_identity}\n{tokenizer.num_ids}\n{template.identity}".encode()
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
        bytes_per_token=meta["answer_bytes"] / max(1, meta["answer_tokens"]),
        of_split="" if split == "all" else f" of the {split} split",
        masked=meta["masked"],
        unused=tuple(meta["unused"]),
    )
    return ChatRows(name, chats, config.seq_len, tokenizer.separator)


def messages_of(record: Mapping[str, object]) -> tuple[Messages, list[str]]:
    """Returns the messages of a line, and the names of its unread fields. ValueError if the line has no messages."""
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
        _check_message(number, message)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("it has no answer: no message has the role assistant")
    return messages, sorted(set(record) - read)


def _check_message(number: int, message: Mapping[str, object]) -> None:
    """Raises ValueError for a message without a known role and a text, or with an invalid mask."""
    if (role := message.get("role")) not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; known are {', '.join(ROLES)}")
    content = message.get("content")
    if not isinstance(content, str) and not (role == "assistant" and content is None):
        raise ValueError(f"message {number} has a content of type {type(content).__name__}: write one string")
    if message.get("weight") not in (None, 0, 1):
        raise ValueError(f"message {number} has the weight {message['weight']!r}; it may be 0 or 1")
    if message.get("train") not in (None, False, True):
        raise ValueError(f"message {number} has train={message['train']!r}; it may be true or false")


def _is_trained(message: JsonMapping) -> bool:
    """Whether the loss includes a message, if it is an answer."""
    return all(message.get(name) is None or message[name] for name in MASKS)


def _for_template(messages: Messages) -> Messages:
    """Returns the messages as passed to the template: without masks, and with null contents replaced by ""."""
    plain = [{name: value for name, value in message.items() if name not in MASKS} for message in messages]
    return [message | {"content": message.get("content") or ""} for message in plain]


def unused_fields(messages: Messages, template: ChatTemplate) -> Counter[str]:
    """Returns the number of messages per field without effect. ValueError for an answer without content."""
    unrendered = template.unrendered(_for_template(messages))
    found = Counter(f"{name} of {messages[number]['role']}" for number, name in unrendered)
    for number, message in enumerate(messages):
        names = {name for name, value in message.items() if value is not None}
        if message["role"] != "assistant":
            found.update(f"{name} of {message['role']}" for name in names & {*MASKS})
        elif not (message.get("content") or "").strip() and _is_trained(message):
            others = names - {"role", "content", *MASKS}
            if all((number, name) in unrendered for name in others):
                also = f": the chat template does not render its {' and '.join(sorted(others))}" if others else ""
                raise ValueError(f"message {number + 1} is an answer without content{also}")
    return found


def _files(path: Path) -> list[Path]:
    """Returns the file, or the .jsonl files below a folder. ValueError if no such file exists."""
    if path.is_file():
        if path.suffix in OTHER_FILES:
            raise ValueError(f"data.path {path} is no file of JSON lines: unpack or convert it to .jsonl")
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
    """Yields the place and the content of each line that is not blank."""
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


@dataclass(kw_only=True)
class _Totals:
    """Sums over the conversations of a split."""

    answer_tokens: int = 0
    answer_bytes: int = 0
    masked: int = 0  # answers
    unread: Counter[str] = field(default_factory=Counter)  # lines, by the name of a field
    unused: Counter[str] = field(default_factory=Counter)  # messages, by field and role

    def in_words(self) -> list[str]:
        """Returns the fields that have no effect, limited to the most frequent ones."""
        found = [(count, f"{name} in {count} lines") for name, count in self.unread.items()]
        found += [(count, f"{name} in {count} messages") for name, count in self.unused.items()]
        frequent = sorted(found, key=lambda pair: (-pair[0], pair[1]))
        words = [one_line(text, "the file has") for _, text in frequent[:MOST_NAMED]]
        return words + [f"{len(found) - MOST_NAMED} others"] * (len(found) > MOST_NAMED)


def _write(to: Path, name: str, files: list[Path], split: str, tokenizer: HuggingFace, template: ChatTemplate) -> None:
    """Writes the tokens of a split's conversations, their answer masks, and the ends of the conversations."""
    dtype = np.dtype("<u2") if tokenizer.num_ids <= 1 << 16 else np.dtype("<u4")
    digest, progress, ends, totals = hashlib.sha256(), ProgressWarning(), [0], _Totals()
    with open(to / "tokens.bin", "wb") as tokens, open(to / "answers.bin", "wb") as answers:
        for where, line in _chosen(name, files, split):
            try:
                record = json_objects.parse(line, where, lenient=True)
            except ValueError as error:  # such as a list of all conversations
                raise ValueError(f"{error}; write each conversation as an object on a line of its own") from error
            try:
                ids, is_answer = _encode_record(record, tokenizer, template, totals)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            for file, values in ((tokens, ids.astype(dtype)), (answers, is_answer)):
                file.write(payload := values.tobytes())
                digest.update(payload)
            ends.append(ends[-1] + len(ids))
            progress.say("%s: %d conversations of the %s split are tokenised", name, len(ends) - 1, split)
    np.save(to / "ends.npy", np.array(ends[1:], np.int64))
    meta = {"dtype": dtype.str, "sha256": digest.hexdigest(), "masked": totals.masked, "unused": totals.in_words()}
    meta |= {"answer_tokens": totals.answer_tokens, "answer_bytes": totals.answer_bytes}
    (to / "meta.json").write_text(json.dumps(meta, indent=1))


def _encode_record(
    record: Mapping[str, object], tokenizer: HuggingFace, template: ChatTemplate, totals: _Totals
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a conversation's ids [N] and its answer mask [N], and updates the totals."""
    messages, unread = messages_of(record)
    totals.unused.update(unused_fields(messages, template))
    ids, is_answer, text_bytes = encode(messages, tokenizer, template)
    totals.unread.update(unread)
    totals.masked += sum(message["role"] == "assistant" and not _is_trained(message) for message in messages)
    totals.answer_tokens += int(is_answer.sum())
    totals.answer_bytes += text_bytes
    return ids, is_answer


def encode(messages: Messages, tokenizer: HuggingFace, template: ChatTemplate) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns a conversation's ids [N], its answer mask [N], and the number of UTF-8 bytes of the answers.

    Masked answers do not count. A token that covers both an answer and the adjacent text belongs to the answer.
    ValueError if the template turns an answer into no token.
    """
    text, spans = template.answers(_for_template(messages))
    utf8(text)
    spans = _trained(messages, spans)
    ids, characters = tokenizer.encode_template(text)
    starts, ends = np.array([*spans, (len(text), len(text) + 1)]).T  # the last start is beyond all characters
    is_answer = starts[np.searchsorted(ends, characters[:, 0], "right")] < characters[:, 1]
    is_answer[:1] = False
    if spans and not is_answer.any():
        raise ValueError("it has no answer: the chat template makes no token of one")
    return ids, is_answer, sum(len(text[start:end].encode()) for start, end in spans)


def _trained(messages: Messages, spans: Sequence[CharacterSpan]) -> Sequence[CharacterSpan]:
    """Returns the spans of the answers in the loss. ValueError if a span cannot be attributed to an answer."""
    trained = [_is_trained(message) for message in messages if message["role"] == "assistant"]
    if all(trained):
        return spans
    if len(spans) != len(trained):
        raise ValueError(
            f"the chat template marks {len(spans)} answers in {len(trained)} messages of the assistant: it must mark "
            "each of them for `weight` or `train` to exclude one"
        )
    return [span for span, counts in zip(spans, trained, strict=True) if counts]
