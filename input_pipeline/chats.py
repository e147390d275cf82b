"""Chats: conversations in files of JSON or parquet, with a loss on the tokens of their answers only.

A record is `{"messages": [{"role": ..., "content": ...}, ...]}`, or has another form (chat_records.py). The chat
template of the tokenizer renders it as text. A row holds whole conversations, which do not attend to each other.
`data.loss_on` selects the messages in the loss; `"weight": 0` or `"train": false` excludes a message. The summary of
the rows names every other field without effect.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from configs.schema import DataConfig
from input_pipeline import cache, packing
from input_pipeline.bad_documents import BadDocuments, check
from input_pipeline.chat_records import MASKS, candidates, conversation_of, is_trained
from input_pipeline.chat_template import ChatTemplate, Messages
from input_pipeline.folder import named_splits, validation_names
from input_pipeline.shard_formats import Document, records
from input_pipeline.shard_index import ProgressWarning
from input_pipeline.shard_listing import list_shards, split_file
from input_pipeline.store import LocalStore, Store, is_url, open_store
from input_pipeline.text import TextDataset
from input_pipeline.tokenizers import HuggingFace, Tokenizer, utf8
from runtime.command_line import one_line
from runtime.files import json_objects
from runtime.files.cache import cache_dir
from runtime.files.paths import user_path

FORMAT = 3  # version of the files in the cache; part of the folder's name
RULE = 1  # version of the rows that follow from these files; part of the fingerprint
MOST_NAMED = 20  # fields without effect; a foreign file may have any number


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
    skipped: tuple[str, ...]  # place and fault of each broken conversation that was left out


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
            raise ValueError(
                f"{name}: `weight`, `train` or data.loss_on excludes every answer{chats.of_split}; change one of them"
            )
        if not counts.any():
            where = f"within data.seq_len={seq_len} tokens{chats.of_split}"
            raise ValueError(f"{name}: no answer begins {where}; raise data.seq_len")
        self.skipped = chats.skipped
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

    Names of Hugging Face's `datasets` determine the splits (`folder.named_splits`). Without files of validation, it has
    the conversations whose line hashes into the lowest 5 %, at least one, so that equal conversations are in the same
    split. Raises ValueError with file and line for a conversation that cannot be read or rendered, or has no answer.
    """
    template = ChatTemplate(user_path(config.tokenizer_path))
    name = f"data.path {config.path if is_url(config.path) else user_path(config.path)}"
    path, file = split_file(config.path)
    store = open_store(path)
    with closing(store):
        items = {item.name: item for item in list_shards(store, file, config, tokenizer).items}
        if not items:
            raise ValueError(f"{name} has token shards, and no conversations")
        trained, validated = named_splits([*items])
        is_whole = split == "all" or bool(validated)
        names = [*items] if split == "all" else validated if validated and split == "validation" else trained
        described = [FORMAT, store.url, [vars(items[name]) for name in names], "all" if is_whole else split]
        described += [config.loss_on, tokenizer.file_identity, tokenizer.num_ids, template.identity]
        key = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]

        def write(to: Path) -> None:
            with _local(store, names) as files:
                chosen = _chosen(name, files, "all" if is_whole else split)
                _write(to, name, chosen, config, tokenizer, template)

        found = cache.prepared(f"chats/{key}", write)
    meta = json_objects.read(found / "meta.json")
    check(meta["skipped"], config.skip_bad)  # another run may have skipped more
    chats = ChatTokens(
        tokens=np.memmap(found / "tokens.bin", dtype=meta["dtype"], mode="r"),
        is_answer=np.memmap(found / "answers.bin", dtype=np.bool_, mode="r"),
        ends=np.load(found / "ends.npy"),
        sha256=meta["sha256"],
        bytes_per_token=meta["answer_bytes"] / max(1, meta["answer_tokens"]),
        of_split="" if split == "all" else f" of the {split} split",
        masked=meta["masked"],
        unused=tuple(meta["unused"]),
        skipped=tuple(meta["skipped"]),
    )
    return ChatRows(name, chats, config.seq_len, tokenizer.separator)


@contextmanager
def _local(store: Store, names: Sequence[str]) -> Iterator[list[tuple[Path, str]]]:
    """Yields the path and the full name of each file. Files of a remote store are fetched, and removed at the end."""
    if isinstance(store, LocalStore):
        yield [(store.root / name, str(store.root / name)) for name in names]
        return
    with TemporaryDirectory(dir=cache_dir()) as folder:
        files = [(Path(folder) / str(number), f"{store.url}/{name}") for number, name in enumerate(names)]
        for (path, _), name in zip(files, names, strict=True):
            store.fetch(name, path)
        yield files


def unused_fields(messages: Messages, numbers: Sequence[int], template: ChatTemplate) -> Counter[str]:
    """Returns the number of messages per field without effect.

    `numbers` are the messages that the loss may include. ValueError for an answer among them without content.
    """
    unrendered = template.unrendered(_for_template(messages))
    found = Counter(f"{name} of {messages[number]['role']}" for number, name in unrendered)
    for number, message in enumerate(messages):
        names = {name for name, value in message.items() if value is not None}
        if number not in numbers:
            found.update(f"{name} of {message['role']}" for name in MASKS if message.get(name))
        elif not (message.get("content") or "").strip() and is_trained(message):
            others = names - {"role", "content", *MASKS}
            if all((number, name) in unrendered for name in others):
                also = f": the chat template does not render its {' and '.join(sorted(others))}" if others else ""
                raise ValueError(f"message {number + 1} is an answer without content{also}")
    if template.tools and template.with_tools(()).render(_for_template(messages)) == template.render(
        _for_template(messages)
    ):
        found["tools"] += 1
    return found


def _for_template(messages: Messages) -> Messages:
    """Returns the messages as passed to the template: without masks, and with null contents replaced by ""."""
    plain = [{name: value for name, value in message.items() if name not in MASKS} for message in messages]
    return [message | {"content": message.get("content") or ""} for message in plain]


def _chosen(name: str, files: Sequence[tuple[Path, str]], split: str) -> Iterator[Document]:
    """Yields the records of a split."""

    def every() -> Iterator[Document]:
        return (record for path, name in files for record in records(path, name))

    hashes = [record.sha256 for record in every()]
    held_out = validation_names([*dict.fromkeys(hashes)]) if hashes else set()
    chosen = [split == "all" or (one in held_out) == (split == "validation") for one in hashes]
    if not any(chosen):
        raise ValueError(
            f"{name} has {len(set(hashes))} different conversations; training and validation need one each"
        )
    yield from (record for record, wanted in zip(every(), chosen, strict=True) if wanted)


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


def _write(
    to: Path,
    name: str,
    chosen: Iterator[Document],
    config: DataConfig,
    tokenizer: HuggingFace,
    template: ChatTemplate,
) -> None:
    """Writes the tokens of conversations, their answer masks, and the ends of the conversations."""
    dtype = np.dtype("<u2") if tokenizer.num_ids <= 1 << 16 else np.dtype("<u4")
    digest, progress, ends, totals = hashlib.sha256(), ProgressWarning(), [0], _Totals()
    bad = BadDocuments(config.skip_bad)
    with open(to / "tokens.bin", "wb") as tokens, open(to / "answers.bin", "wb") as answers:
        for document in chosen:
            encoded: tuple[np.ndarray, np.ndarray] | None = None
            with bad.skipping(document.place):
                encoded = _encode_record(document.read(), config.loss_on, tokenizer, template, totals)
            if encoded is None:
                continue
            for file, values in ((tokens, encoded[0].astype(dtype)), (answers, encoded[1])):
                file.write(payload := values.tobytes())
                digest.update(payload)
            ends.append(ends[-1] + len(encoded[0]))
            progress.say("%s: %d conversations are tokenised", name, len(ends) - 1)
    if len(ends) == 1:
        raise ValueError(f"{name}: every conversation of a split is broken, such as {bad.lines[0]}; mend one")
    np.save(to / "ends.npy", np.array(ends[1:], np.int64))
    meta = {"dtype": dtype.str, "sha256": digest.hexdigest(), "masked": totals.masked, "unused": totals.in_words()}
    meta |= {"answer_tokens": totals.answer_tokens, "answer_bytes": totals.answer_bytes, "skipped": bad.lines}
    (to / "meta.json").write_text(json.dumps(meta, indent=1))


def _encode_record(
    record: object, loss_on: str, tokenizer: HuggingFace, template: ChatTemplate, totals: _Totals
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a conversation's ids [N] and its answer mask [N], and updates the totals."""
    messages, tools, unread = conversation_of(record)
    numbers, template = candidates(messages, loss_on), template.with_tools(tools)
    unused = unused_fields(messages, numbers, template)
    ids, is_answer, text_bytes = encode(messages, numbers, tokenizer, template)
    totals.unread.update([*unread, *["tools"] * unused.pop("tools", 0)])
    totals.unused.update(unused)
    totals.masked += sum(not is_trained(messages[number]) for number in numbers)
    totals.answer_tokens += int(is_answer.sum())
    totals.answer_bytes += text_bytes
    return ids, is_answer


def encode(
    messages: Messages, numbers: Sequence[int], tokenizer: HuggingFace, template: ChatTemplate
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns a conversation's ids [N], the mask [N] of the loss, and the number of UTF-8 bytes that it includes.

    The loss includes the messages of these numbers unless they are masked. A token that covers both an answer and the
    adjacent text belongs to the answer. ValueError if the template turns all answers into no token.
    """
    trained = [number for number in numbers if is_trained(messages[number])]
    text, spans = template.spans(_for_template(messages), trained)
    utf8(text)
    ids, characters = tokenizer.encode_template(text)
    starts, ends = np.array([*spans, (len(text), len(text) + 1)]).T  # the last start is beyond all characters
    is_answer = starts[np.searchsorted(ends, characters[:, 0], "right")] < characters[:, 1]
    is_answer[:1] = False
    if spans and not is_answer.any():
        raise ValueError("it has no answer: the chat template makes no token of one")
    return ids, is_answer, sum(len(text[start:end].encode()) for start, end in spans)
