"""Tokenizers: bytes, a SentencePiece model, a tiktoken vocabulary, a tokenizer.json. Nothing is downloaded."""

import abc
import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from configs import hugging_face
from configs.schema import Config, DataConfig, TransformerConfig
from configs.schema.own import OWN
from input_pipeline import tokenizer_config
from input_pipeline.tokenizer_config import CONFIG_FILE
from runtime.files.paths import user_path
from runtime.files.regular import read_regular

UNKNOWN = "\ufffd"  # decoded from ids without text: the mask, and padding rows of the embedding
MAX_IDS = 1 << 24  # of a vocabulary file (real files: up to 262,000), because memory grows with the highest id

# GPT-2's pattern to split text before merging (from its tokenizer's source; tiktoken calls it r50k).
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# Names of the special tokens (end of text, beginning of text, mask) for a tokenizer.json without a
# tokenizer_config.json that names them.
EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "[EOS]")
BOS = ("<bos>", "<s>", "<|begin_of_text|>", "<BOS_TOKEN>", "[BOS]")
MASKS = ("<mask>", "[MASK]")


class Tokenizer(abc.ABC):
    """Encodes and decodes. Ids are in [0, num_ids). `separator` ends a document. `mask_id` is num_ids or less."""

    num_ids: int
    separator: int
    bos: int | None = None  # begins documents and prompts, if the model was trained with it
    identity: str  # changes when an id, or the beginning or end of a document, changes its meaning

    @property
    def mask_id(self) -> int:
        return self.num_ids

    def vocab_size(self, objective: str) -> int:
        """Returns the number of ids that a model needs for `data.objective`, with the mask for masked tokens."""
        return max(self.num_ids, self.mask_id + 1) if objective == "masked" else self.num_ids

    @property
    def document_bos(self) -> int | None:
        """The id that begins a document. None also if the separator of the preceding document is the same id."""
        return None if self.bos == self.separator else self.bos

    def document(self, text: str) -> np.ndarray:
        """Returns the ids of a document, from its bos, if any, to its separator.

        ValueError for an id that the tokenizer must not produce.
        """
        begin = [] if self.document_bos is None else [self.document_bos]
        ids = np.concatenate([np.asarray(begin, np.int32), self.encode(text), [self.separator]])
        if ids.min() < 0 or ids.max() >= self.num_ids:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(
                f"the tokenizer {self.identity!r} gives the id {wrong}, but its ids are from 0 to {self.num_ids - 1}"
            )
        return ids

    def prompt(self, text: str) -> np.ndarray:
        """Returns the int32 ids [N] of a prompt, beginning with bos, if any."""
        ids = self.encode(text)
        return ids if self.bos is None else np.append(np.int32(self.bos), ids)

    def continued(self, ids: np.ndarray) -> str:
        """Returns the text of a prompt and its continuation, without bos."""
        return self.decode(ids if self.bos is None else ids[1:])

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Returns int32 ids [N], without bos and separator."""

    @abc.abstractmethod
    def decode(self, ids: np.ndarray) -> str:
        """Returns text for any integers [N]. Ids without text become U+FFFD."""


class Bytes(Tokenizer):
    """UTF-8 bytes: the id is the byte, and 0 separates documents."""

    num_ids, separator, identity = 256, 0, "bytes"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return _decoded(ids, range(256), lambda run: bytes(run).decode(errors="replace"))


class SentencePiece(Tokenizer):
    """A SentencePiece model. Its end-of-sentence id separates documents. Most models write a newline as a space.

    `add_bos`: `always`, `never`, or `auto`, which follows a tokenizer_config.json next to the model.
    """

    def __init__(self, path: Path, add_bos: str = "auto") -> None:
        import sentencepiece

        content = _read(path)
        try:
            if not content:
                raise RuntimeError("it is empty")  # SentencePiece would accept it as a model without pieces
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(f"data.tokenizer_path {path} is not a SentencePiece model") from error
        self.num_ids = self._model.get_piece_size()
        self.separator = self._model.eos_id()
        if self.separator < 0:
            raise ValueError(f"data.tokenizer_path {path} has no end-of-sentence id: train the model with eos_id >= 0")
        self.identity = f"sentencepiece {hashlib.sha256(content).hexdigest()}"
        if add_bos == "always" or (add_bos == "auto" and tokenizer_config.adds_bos(tokenizer_config.read(path.parent))):
            self.bos = self._model.bos_id()
            if self.bos < 0:
                raise ValueError(f"data.tokenizer_path {path} has no beginning-of-sentence id: set data.add_bos=never")
            self.identity += " with bos"

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._model.encode(text, out_type=int), np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return _decoded(ids, range(self.num_ids), self._model.decode)


class Tiktoken(Tokenizer):
    """A tiktoken vocabulary (lines of base64 and rank), split by GPT-2's pattern. An extra id separates documents."""

    def __init__(self, path: Path) -> None:
        import tiktoken

        content = _read(path)
        ranks = _tiktoken_ranks(path, content)
        self.separator = max(ranks.values()) + 1
        self.num_ids = self.separator + 1
        self._encoding = tiktoken.Encoding(
            path.name,
            pat_str=GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": self.separator},
        )
        self._known = [*ranks.values(), self.separator]
        self.identity = f"tiktoken {hashlib.sha256(content).hexdigest()}"

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._encoding.encode_ordinary(text), np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return _decoded(ids, self._known, self._encoding.decode)


class HuggingFace(Tokenizer):
    """A tokenizer.json of the `tokenizers` library. Separator, bos and mask are special tokens that it names.

    The separator is `eos_token`. If that is "", it is the `eos_token` of the tokenizer_config.json next to the file,
    else its `sep_token`, else the first of `EOS`. `add_bos`: `always`, `never`, or `auto`, which follows these files.

    `vocabulary` maps tokens to ids, and `special_ids` holds the ids of special tokens. Special ids >= `vocab_size` are
    excluded, because text models have no embedding for the image tokens of models that share their tokenizer.
    `file_identity` identifies the vocabulary alone. `bos_is_unclear`: a bos exists, but no file states whether texts
    begin with it.
    """

    def __init__(self, path: Path, vocab_size: int = MAX_IDS, *, add_bos: str = "auto", eos_token: str = "") -> None:
        import tokenizers

        content, config = _read(path), tokenizer_config.read(path.parent)
        with _explained(f"data.tokenizer_path {path} is not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the name of a separator within a text is plain text
        self._path, named = path, tokenizer_config.named_tokens(config)
        self.vocabulary = ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if (most := max(ids.values(), default=0)) >= MAX_IDS:
            raise ValueError(f"data.tokenizer_path {path} has a token with the id {most}: ids may be below {MAX_IDS}")
        special = {x.content for x in self._tokenizer.get_added_tokens_decoder().values() if x.special}
        default = _first(EOS, special)
        self.separator_token = self._end(eos_token, named, default)
        if self.separator_token not in special:  # adding it again would lose the flags of the file
            self._tokenizer.add_special_tokens([self.separator_token])
            special.add(self.separator_token)
        self.bos_token = named.get("bos_token") or _first(BOS, special)
        said = tokenizer_config.adds_bos(config)
        said = said if said is not None else (True if self._post_processor_adds_bos() else None)
        self.adds_bos = self._adds_bos(add_bos, said)
        self.bos_is_unclear = add_bos == "auto" and said is None and self.bos_token in ids
        self._tokenizer.post_processor = None  # it may omit the spaces from a token's characters
        self.mask_token = _first(MASKS, special)
        self.special_ids = sorted(ids[name] for name in special)
        optional = special - {self.separator_token, self.mask_token, self.bos_token if self.adds_bos else ""}
        counted = (number for name, number in ids.items() if number < vocab_size or name not in optional)
        self.num_ids, self.separator = max(counted) + 1, ids[self.separator_token]
        self.bos = ids[self.bos_token] if self.adds_bos else None
        self.file_identity = self.identity = f"hugging_face {hashlib.sha256(content).hexdigest()}"
        if self.separator_token != default:
            self.identity += f" eos {self.separator_token}"
        if self.document_bos is not None:
            self.identity += f" bos {self.bos_token}"

    def _end(self, eos_token: str, named: Mapping[str, str], default: str) -> str:
        """Returns the token that ends a document. ValueError if no file defines it."""
        name = next((name for name in ("eos_token", "sep_token") if named.get(name)), "")
        token = eos_token or named.get(name, "") or default
        source = f"data.eos_token={eos_token!r}" if eos_token else f"{name}={token!r} of {CONFIG_FILE} there"
        if not token:
            raise ValueError(
                f"data.tokenizer_path {self._path} has no special token that ends a document by its name, and no "
                f"{CONFIG_FILE} there names an eos_token: set data.eos_token"
            )
        if token not in self.vocabulary:
            raise ValueError(
                f"{source} is not a token of data.tokenizer_path {self._path}: set data.eos_token to a token that "
                "ends a document"
            )
        return token

    def _adds_bos(self, wanted: str, said: bool | None) -> bool:
        """Returns whether documents and prompts begin with bos. ValueError if they should but bos does not exist."""
        adds = wanted == "always" or (wanted == "auto" and bool(said))
        if adds and self.bos_token not in self.vocabulary:
            name = f"the bos_token {self.bos_token!r}" if self.bos_token else "a bos_token"
            raise ValueError(
                f"data.add_bos={wanted}: data.tokenizer_path {self._path} lacks {name}: set data.add_bos=never"
            )
        return adds

    def _post_processor_adds_bos(self) -> bool:
        with _explained(f"data.tokenizer_path {self._path} cannot encode an empty text"):
            tokens = self._tokenizer.encode("", add_special_tokens=True).tokens
        return bool(self.bos_token) and tokens[:1] == [self.bos_token]

    @property
    def mask_id(self) -> int:
        if not self.mask_token:
            raise ValueError(
                f"data.tokenizer_path {self._path} has no special token {' or '.join(MASKS)}, which "
                "data.objective='masked' needs"
            )
        return self.vocabulary[self.mask_token]

    def encode(self, text: str) -> np.ndarray:
        with _explained(f"data.tokenizer_path {self._path} cannot encode {text[:40]!r}"):
            # not `encode`, which holds Python's lock throughout, so that the heartbeats of this process would stop
            (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
            ids = found.ids
        return np.asarray(ids, np.int64).astype(np.int32)

    def encode_template(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns int32 ids [N] and their character ranges [N, 2]. Names of special tokens are encoded as these tokens.

        ValueError for a special token whose id is not below `num_ids`.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            with _explained(f"data.tokenizer_path {self._path} cannot encode {text[:40]!r}"):
                found = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        for token, number in zip(found.tokens, found.ids, strict=True):
            if number >= self.num_ids:
                raise ValueError(
                    f"{token!r} has the id {number}, not below model.vocab_size; remove the token, or raise "
                    "model.vocab_size"
                )
        return np.asarray(found.ids, np.int32), np.asarray(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: np.ndarray) -> str:
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        with _explained(f"data.tokenizer_path {self._path} cannot decode"):
            return _decoded(ids, [*self.vocabulary.values()], decode)


def make_tokenizer(
    kind: str, path: str, vocab_size: int = MAX_IDS, *, add_bos: str = "auto", eos_token: str = ""
) -> Tokenizer:
    """Returns the tokenizer of `data.tokenizer` for a model of `vocab_size` ids. `tokenizer_for` reads a config.

    Raises ValueError for an unusable vocabulary file.
    """
    if kind == "bytes":
        return Bytes()
    if kind in OWN["tokenizer"]:
        return OWN["tokenizer"][kind](path)
    file = user_path(path)
    if kind == "hugging_face":
        return HuggingFace(file, vocab_size, add_bos=add_bos, eos_token=eos_token)
    return SentencePiece(file, add_bos) if kind == "sentencepiece" else Tiktoken(file)


def with_vocab_size(config: Config) -> Config:
    """Returns a config whose `model.vocab_size`, if it is 0, is replaced by the tokenizer's number of ids.

    A checkpoint in `model.weights` may have more ids, which the model then has, too. ValueError for a bad tokenizer.
    """
    model = config.model
    if not isinstance(model, TransformerConfig) or model.vocab_size:
        return config
    theirs: Any = hugging_face.read(model.weights)[1]["vocab_size"] if model.weights else 0
    size = max(tokenizer_for(config.data).vocab_size(config.data.objective), theirs)
    return replace(config, model=replace(model, vocab_size=size))


def tokenizer_for(data: DataConfig, vocab_size: int = MAX_IDS) -> Tokenizer:
    """Returns the tokenizer of a config's data section. See `make_tokenizer`."""
    names = {"add_bos": data.add_bos, "eos_token": data.eos_token}
    return make_tokenizer(data.tokenizer, data.tokenizer_path, vocab_size, **names)


def utf8(text: str) -> bytes:
    """Returns the UTF-8 bytes of a text. ValueError for an unpaired surrogate, which JSON can contain."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"character {error.start} is {half!r}, half of a surrogate pair: write the whole pair, or remove it"
        ) from error


def _first(names: Sequence[str], among: Set[str]) -> str:
    """Returns the first of `names` that is in `among`, or ""."""
    return next((name for name in names if name in among), "")


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns errors of the `tokenizers` library into one line: bare Exceptions, and panics, which are BaseExceptions."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {' '.join(str(error).split())}") from error


def _decoded(ids: np.ndarray, known: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """Returns the text of ids [N]. Ids that are not in `known` become U+FFFD."""
    ids = np.asarray(ids)
    runs = np.split(ids, np.flatnonzero(~np.isin(ids, known)))
    return UNKNOWN.join(decode(run[number > 0 :].tolist()) for number, run in enumerate(runs))  # [0]: without one


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise ValueError(f"data.tokenizer_path {path} cannot be read: {error.strerror}") from error


def _tiktoken_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Returns the rank of each piece. (tiktoken's own loader caches by path and would miss changes of the file.)"""
    ranks: dict[bytes, int] = {}
    what = f"data.tokenizer_path {path} is not a"
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = range(MAX_IDS).index(int(rank))
        except ValueError as error:  # binascii.Error is one
            raise ValueError(f"{what} tiktoken vocabulary: line {number} is not 'base64 rank'") from error
    rank, count = Counter(ranks.values()).most_common(1)[0] if ranks else (0, 0)
    if count > 1:
        raise ValueError(f"{what} tiktoken vocabulary: rank {rank} occurs twice")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(
            f"{what} complete tiktoken vocabulary: {len(missing)} of the 256 single bytes have no rank (the first is "
            f"{missing[0]})"
        )
    return ranks
