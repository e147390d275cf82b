"""Random and damaged tokenizer.json files: the ids that a dict or the library gives, or one line."""

import copy
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_input_tokenizers import tokenizer_json

from input_pipeline.tokenizers import MAX_IDS, HuggingFace

TEXTS = ["", "the quick fox", "na\u00efve \U0001f40d\n\ttabs", "<|endoftext|>"]
bounded = partial(settings, max_examples=100, deadline=None, derandomize=True, database=None)


def made(content: bytes) -> HuggingFace | None:
    """Returns the tokenizer of a file; None after one line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_bytes(content)
        try:
            return HuggingFace(path)
        except ValueError as error:
            assert str(error).startswith(f"data.tokenizer_path {path} ") and "\n" not in str(error)
            return None


def ids_of(tokenizer: HuggingFace, text: str) -> list[int] | None:
    """Returns the ids of a document; None after one line."""
    try:
        return tokenizer.document(text).tolist()
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
        return None


any_id = st.integers(0, 9) | st.sampled_from([MAX_IDS - 1, MAX_IDS, 2**31 - 2, 2**31, 2**32 - 1, 2**32, -1])


@pytest.fixture(scope="module", name="originals")
def good_files(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    bytes_of = tokenizer_json(tmp_path_factory.mktemp("bpe") / "tokenizer.json").read_text()
    special = tokenizers.AddedToken("</s>", special=True)
    pieces = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("the", -1.0), ("f", -2.0)], 0, False))
    vocabulary = {"[UNK]": 0, "the": 1, "f": 2, "##ox": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    for one in (pieces, words):
        one.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        one.add_special_tokens([special])
    return [json.loads(text) for text in (bytes_of, pieces.to_str(), words.to_str())]


values = st.none() | st.booleans() | any_id | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})


@bounded()
@given(st.integers(0, 2), st.data())
def test_a_damaged_file_gives_the_ids_of_the_library_or_one_line(originals: list[Any], which: int, data: Any) -> None:
    content = copy.deepcopy(originals[which])
    for _ in range(data.draw(st.integers(0, 2))):
        place = content
        while place:
            keys = [*place] if isinstance(place, dict) else [*range(len(place))]
            key = data.draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and data.draw(st.integers(0, 3)):
                place = place[key]
                continue
            if data.draw(st.booleans()):
                place[key] = data.draw(values)
            else:
                del place[key]
            break
    raw = json.dumps(content)
    raw = raw[: data.draw(st.none() | st.integers(0, len(raw)))] if data.draw(st.integers(0, 4)) == 0 else raw
    check(raw.encode(), is_intact=content == originals[which] and raw == json.dumps(content))


@bounded()
@given(st.binary(max_size=40) | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"", b"null", b"NaN", b"1e999"]))
def test_what_is_no_tokenizer_is_one_line(content: bytes) -> None:
    assert made(content) is None


def check(content: bytes, *, is_intact: bool) -> None:
    tokenizer = made(content)
    if tokenizer is None:
        assert not is_intact
        return
    library = tokenizers.Tokenizer.from_buffer(content)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    for text in TEXTS:
        ids = ids_of(tokenizer, text)
        assert ids is not None or not is_intact
        if ids is not None:
            assert ids == [*library.encode(text, add_special_tokens=False).ids, tokenizer.separator]
            assert min(ids) >= 0 and max(ids) < tokenizer.num_ids <= MAX_IDS
