"""Tokenizers: bytes, SentencePiece and tiktoken, and the streams of ids that they give."""

import base64
import json
import threading
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_texts import own_cache  # noqa: F401 (a fixture)
from test_input_text import ids_of, settings, text_of

from input_pipeline import load
from input_pipeline.tokenizers import MAX_IDS, Bytes, HuggingFace, make_tokenizer


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


def tokenizer_json(path: Path, special: Sequence[str] = ("<|endoftext|>", "<mask>")) -> Path:
    """Writes a byte-level BPE tokenizer of at most 260 ids, with special tokens, truncation and padding."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=260, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the quick brown fox the the quick"] * 10, trainer)
    made.enable_truncation(4)
    made.enable_padding(length=16, pad_token=special[0] if special else "a")
    made.save(str(path))
    return path


def test_tokenizer_json_matches_its_library(corpus, tmp_path):
    import tokenizers

    vocabulary = tokenizer_json(tmp_path / "tokenizer.json")
    config = settings(corpus, tokenizer="hugging_face", tokenizer_path=str(vocabulary))
    dataset = load(config, "train", 0)
    ours, library = dataset.tokenizer, tokenizers.Tokenizer.from_file(str(vocabulary))
    library.no_truncation()
    library.no_padding()
    separator, mask = library.token_to_id("<|endoftext|>"), library.token_to_id("<mask>")
    assert (ours.separator, ours.mask_id, ours.num_ids) == (separator, mask, 260) == (0, 1, 260)
    assert dataset.vocab_size == 260
    text = "the quick brown fox, naïve 🐍\n"
    expected = library.encode(text).ids
    assert ours.encode(text).tolist() == expected and len(expected) < len(text.encode())
    assert ours.decode(np.array([*expected, 260, -1, *expected])) == f"{text}��{text}"
    named = ours.encode("a<|endoftext|>b")  # text, not a separator
    assert separator not in named and ours.decode(named) == "a<|endoftext|>b"
    by_hand = []
    for piece in text_of(settings(corpus), "train").decode().split("\0")[:-1]:
        by_hand += [*library.encode(piece).ids, separator]
    np.testing.assert_array_equal(ids_of(config, "train"), by_hand)

    masked = load(replace(config, objective="masked"), "train", 0)
    assert masked.vocab_size == 260  # the mask is one of the ids
    example = masked[0]
    hidden = (example["tokens"] == mask) & (example["weights"] > 0)
    assert hidden.any() and (example["targets"] != mask).all()

    first = dataset.fingerprint
    tokenizer_json(vocabulary, ("</s>", "[MASK]"))
    assert load(config, "train", 0).fingerprint != first


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """A file of the source `folder` is one text; while none runs, the other processes take this one for lost.

    In one of twenty tries: both cores may be others' meanwhile.
    """
    ours, over, woken = HuggingFace(tokenizer_json(tmp_path / "tokenizer.json")), threading.Event(), [0]

    def wake() -> None:
        while not over.wait(0.001):
            woken[0] += 1

    thread = threading.Thread(target=wake)
    thread.start()
    found = [0]
    while found[-1] <= 10 and len(found) <= 20:
        before, _, after = woken[0], ours.encode("the quick brown fox jumps over 13 dogs\n" * 5000), woken[0]
        found.append(after - before)
    over.set()
    thread.join()
    assert found[-1] > 10, found


def test_bad_tokenizer_json_is_one_line(corpus, tmp_path):
    path = tmp_path / "tokenizer.json"
    config = settings(corpus, tokenizer="hugging_face", tokenizer_path=str(path))
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read: No such file"):
        load(config, "train", 0)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer.json: [^\n]*$"):
        load(config, "train", 0)
    tokenizer_json(path, ())
    with pytest.raises(
        ValueError, match=r"has no special token that ends a document; one of <\|endoftext\|>, .* would"
    ):
        load(config, "train", 0)
    tokenizer_json(path, ("[SEP]",))
    assert load(replace(config, objective="causal"), "train", 0).tokenizer.separator == 0
    with pytest.raises(
        ValueError, match=r"has no special token <mask> or \[MASK\], which data.objective='masked' needs$"
    ):
        load(replace(config, objective="masked"), "train", 0)


def word_level(path: Path, vocabulary: dict[str, int], **model: Any) -> Path:
    """Writes a tokenizer.json whose tokens are whole words, `<|endoftext|>` the special one."""
    special = {"id": vocabulary["<|endoftext|>"], "content": "<|endoftext|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [special | flags],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"} | model,
    }
    path.write_text(json.dumps(content))
    return path


def test_an_id_that_no_vocabulary_has_is_refused_before_memory_grows_with_it(tmp_path: Path) -> None:
    vocabulary = {"<|endoftext|>": 0, "[UNK]": 1, "far": MAX_IDS}
    path = word_level(tmp_path / "tokenizer.json", vocabulary)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"has a token with the id {MAX_IDS}: ids may be below {MAX_IDS}\Z"):
            make_tokenizer("hugging_face", str(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
    tokenizer = make_tokenizer("hugging_face", str(word_level(path, vocabulary | {"far": 70_000})))
    assert tokenizer.num_ids == 70_001 and tokenizer.encode("far from").tolist() == [70_000, 1]
    assert tokenizer.decode(np.array([70_000, 69_999, 0])) == "far\ufffd<|endoftext|>"


def with_image_token(path: Path) -> Path:
    """Adds a special token behind all others, as Gemma 3 has one that its models of text lack."""
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(["<image_soft_token>"])
    made.save(str(path))
    return path


def test_special_tokens_that_a_model_lacks_do_not_count(tmp_path: Path) -> None:
    path = str(with_image_token(tokenizer_json(tmp_path / "tokenizer.json", ("<mask>", "</s>"))))
    assert make_tokenizer("hugging_face", path).num_ids == 261
    ours = make_tokenizer("hugging_face", path, 260)
    assert isinstance(ours, HuggingFace) and ours.num_ids == 260
    assert ours.decode(ours.encode("<image_soft_token>")) == "<image_soft_token>"  # text
    with pytest.raises(
        ValueError, match=r"\A'<image_soft_token>' has the id 260, not below model.vocab_size; leave it"
    ):
        ours.encode_template("the <image_soft_token>")
    assert make_tokenizer("hugging_face", path, 259).num_ids == 260  # an ordinary token
    special = {"<|endoftext|>": 9, "[UNK]": 1}
    assert make_tokenizer("hugging_face", str(word_level(tmp_path / "words.json", special)), 5).num_ids == 10  # an end


def test_tokenizer_that_cannot_encode_is_one_line(corpus: Path, tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json", {"<|endoftext|>": 0, "the": 1})
    config = settings(corpus, tokenizer="hugging_face", tokenizer_path=str(path))
    with pytest.raises(
        ValueError, match=r"tokenizer.json cannot encode 'file \d+: the .*: WordLevel .*\[UNK\][^\n]*\Z"
    ):
        load(config, "train", 0)


@pytest.mark.parametrize(("shift", "wrong"), [(200, 297), (-98, -1)])
def test_an_id_outside_of_the_tokenizer_s_is_refused(shift: int, wrong: int) -> None:
    """Before it is stored in two bytes, where it would become another."""

    class Shifted(Bytes):
        identity = "shifted"

        def encode(self, text: str) -> np.ndarray:
            return super().encode(text) + shift

    with pytest.raises(ValueError, match=f"'shifted' gives the id {wrong}, but its ids are from 0 to 255"):
        Shifted().document("a")
    assert Bytes().document("a").tolist() == [97, 0]
