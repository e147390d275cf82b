"""Tokenizers: bytes, SentencePiece and tiktoken, and the streams of ids that they give."""

import base64
from pathlib import Path

import numpy as np
import pytest
from test_input_text import ids_of, settings, text_of

from input_pipeline import load


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))


def test_bytes_tokenizer_round_trips():
    tokenizer = load(settings("", source="synthetic"), "train", 0).tokenizer
    text = "naïve 🐍\n\ttabs"
    np.testing.assert_array_equal(tokenizer.encode(text), list(text.encode()))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(np.array([104, 256, -1, 105, 300])) == "h��i�"
    assert tokenizer.decode(np.array([], np.int32)) == "" and tokenizer.encode("").shape == (0,)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory) -> Path:
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text").write_text("file number: the quick brown fox jumps over the lazy dog\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "m"), vocab_size=64, hard_vocab_limit=False, minloglevel=2
    )
    return folder / "m.model"


def test_sentencepiece_matches_its_library(corpus, sentencepiece_model):
    import sentencepiece

    config = settings(corpus, tokenizer="sentencepiece", tokenizer_path=str(sentencepiece_model))
    dataset = load(config, "train", 0)
    model = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    pieces = model.get_piece_size()
    assert (dataset.vocab_size, dataset.tokenizer.mask_id) == (pieces + 1, pieces)
    by_hand = []
    length = 0
    for text in text_of(settings(corpus), "train").decode().split("\0")[:-1]:
        by_hand += [*model.encode(text), model.eos_id()]
        length += len(text) + 1
    np.testing.assert_array_equal(ids_of(config, "train"), by_hand)
    assert dataset.bytes_per_token == pytest.approx(length / len(by_hand))
    assert dataset.tokenizer.decode(np.array([*model.encode("the fox"), pieces, *model.encode("dog")])) == "the fox�dog"


def tiktoken_file(path: Path, merges: list[bytes]) -> Path:
    pieces = [bytes([byte]) for byte in range(256)] + merges
    path.write_bytes(b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces)))
    return path


def test_tiktoken_matches_its_library(corpus, tmp_path):
    vocabulary = tiktoken_file(tmp_path / "small.tiktoken", [b"th", b"the", b" q", b"ui"])
    config = settings(corpus, tokenizer="tiktoken", tokenizer_path=str(vocabulary))
    dataset = load(config, "train", 0)
    assert (dataset.vocab_size, dataset.tokenizer.separator, dataset.tokenizer.mask_id) == (262, 260, 261)
    expected = [257, 258, 259, *b"ck 42"]
    assert dataset.tokenizer.encode("the quick 42").tolist() == expected
    assert dataset.tokenizer.decode(np.array([*expected, 261, 97, 999])) == "the quick 42�a�"
    text = text_of(settings(corpus), "train").decode().split("\0")[:-1]
    ids = ids_of(config, "train")
    assert dataset.tokenizer.decode(ids).split("<|endoftext|>")[:-1] == text
    assert dataset.bytes_per_token == pytest.approx(sum(len(piece) + 1 for piece in text) / len(ids))
    assert len(ids) < len("\0".join(text))

    first = dataset.fingerprint  # another vocabulary at the same path: other ids, not a stale copy
    tiktoken_file(vocabulary, [b"th", b"qu"])
    again = load(config, "train", 0)
    assert again.fingerprint != first and again.vocab_size == 260
    assert again.tokenizer.encode("the quick").tolist() == [256, *b"e ", 257, *b"ick"]

    content = vocabulary.read_bytes()  # a rank that no piece has
    vocabulary.write_bytes(content.replace(b" 257\n", b" 300\n"))
    again = load(config, "train", 0)
    assert again.tokenizer.encode("quth").tolist() == [300, 256]
    assert again.tokenizer.decode(np.array([300, 299, 97, 301])) == "qu�a<|endoftext|>"

    prints = []  # vocabularies that only differ in pieces that the text does not use give the same ids
    for unused in ([b"q~", b"~q"], [b"~q", b"q~"]):
        tiktoken_file(vocabulary, unused)
        prints.append((load(config, "train", 0).fingerprint, ids_of(config, "train").tolist()))
    assert prints[0][0] != prints[1][0] and prints[0][1] == prints[1][1]


def test_ids_of_large_vocabularies_do_not_overflow(corpus, tmp_path):
    merges = [b"%d" % number for number in range(10, 2**16)] + [b"th"]
    vocabulary = tiktoken_file(tmp_path / "large.tiktoken", merges)
    config = settings(corpus, tokenizer="tiktoken", tokenizer_path=str(vocabulary))
    dataset = load(config, "train", 0)
    assert dataset.tokenizer.mask_id == 256 + len(merges) + 1
    assert ids_of(config, "train").max() == dataset.tokenizer.separator > 2**16
