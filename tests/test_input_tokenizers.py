"""Tokenizers: bytes, SentencePiece, tiktoken, tokenizer.json; the streams of ids, their beginnings and ends."""

import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from support.hugging_face_reference import FOLDER
from support.planning import small
from support.shard_texts import own_cache  # noqa: F401 (a fixture)
from support.tables import check_rows, raised
from support.text_streams import ids_of, settings, text_of
from support.tokenizer_files import tiktoken_file, tokenizer_json, with_image_token, word_level

from configs.schema import DataConfig, SampleConfig, flat, nested, with_defaults
from input_pipeline import load
from input_pipeline.tokenizers import MAX_IDS, Bytes, HuggingFace, make_tokenizer, with_vocab_size
from training import generate, resume, sampling
from training.datasets import tokenizer_of


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


def test_a_vocabulary_of_size_0_is_the_tokenizers() -> None:
    """Or that of the weights, if it is larger."""
    config = small(model__vocab_size=0)
    assert with_vocab_size(config).model == replace(config.model, vocab_size=256)
    weights = small(model__vocab_size=0, model__weights=str(FOLDER / "llama"))
    assert with_vocab_size(weights).values["model.vocab_size"] == 260
    assert with_vocab_size(small()) == small()


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


def test_tokenizer_json_matches_its_library(corpus, tmp_path):
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
    assert masked.vocab_size == 260  # the mask is among the ids
    example = masked[0]
    hidden = (example["tokens"] == mask) & (example["weights"] > 0)
    assert hidden.any() and (example["targets"] != mask).all()

    first = dataset.fingerprint
    tokenizer_json(vocabulary, ("</s>", "[MASK]"))
    assert load(config, "train", 0).fingerprint != first


@pytest.mark.slow
def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """A file of the source `folder` is one text; while none runs, the other processes take this one for lost.

    In any of twenty tries, because other programs may use both cores meanwhile.
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


def test_bad_tokenizer_files_are_one_line(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokens = lambda *names, **named: (tokenizer_json(path, names), config_file(tmp_path, **named))
    causal = {"objective": "causal"}
    rows: list[tuple[Callable[[], object], dict[str, str], str]] = [
        (lambda: None, {}, "tokenizer.json cannot be read: No such file"),
        (lambda: path.write_text("{}"), {}, "tokenizer.json is not a tokenizer.json: "),
        (tokens, causal, "and no tokenizer_config.json there names an eos_token: set data.eos_token"),
        (lambda: tokens("</s>", eos_token="<e>"), causal, "eos_token='<e>' of tokenizer_config.json there is not"),
        (lambda: tokens("</s>"), causal | {"eos_token": "<e>"}, "data.eos_token='<e>' is not a token of data."),
        (lambda: tokens("</s>"), causal | {"add_bos": "always"}, "add_bos=always: data.tokenizer_path"),
        (lambda: tokens("</s>", add_bos_token=True, bos_token="<b>"), causal, "lacks the bos_token '<b>': set"),
        (lambda: tokens("[SEP]"), {}, "has no special token <mask> or [MASK], which data.objective='masked' needs"),
        (lambda: (tmp_path / "tokenizer_config.json").write_text("["), causal, "tokenizer_config.json is not JSON: "),
        (lambda: word_level(path, {"<|endoftext|>": 0, "the": 1}), {}, "tokenizer.json cannot encode 'file "),
    ]

    def check(write: Callable[[], object], changes: dict[str, str], message: str) -> None:
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        write()
        config = settings(corpus, tokenizer="hugging_face", tokenizer_path=str(path), **changes)
        assert message in raised(lambda: load(config, "train", 0))

    check_rows(rows, check)


def config_file(folder: Path, **content: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


FILES = Path(__file__).parent / "data" / "tokenizers"
DOCUMENTS = [  # folder, changes, and the tokens that begin and end a document
    ("bos_added_by_its_own_file", {}, "<bos>", "<eos>"),
    ("bos_added_by_its_own_file", {"add_bos": "never"}, "", "<eos>"),
    ("gemma", {}, "", "<eos>"),  # no file there says that texts begin with <bos>
    ("gemma", {"add_bos": "always"}, "<bos>", "<eos>"),
    ("gemma", {"eos_token": "<end_of_turn>"}, "", "<end_of_turn>"),
    ("chatml_only", {}, "", "<|im_end|>"),
    ("cohere", {}, "", "<|END_OF_TURN_TOKEN|>"),
    ("cohere", {"add_bos": "always"}, "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    ("eod", {}, "", "<EOT>"),
    ("eod", {"eos_token": "<|endofdocument|>"}, "", "<|endofdocument|>"),
    ("llama3_eot", {"add_bos": "always"}, "<|begin_of_text|>", "<|eot_id|>"),
    ("two", {}, "", "</s>"),
    ("two", {"eos_token": "<|endoftext|>"}, "", "<|endoftext|>"),
]


def in_file(name: str, **changes: Any) -> HuggingFace:
    tokenizer = make_tokenizer("hugging_face", str(FILES / name / "tokenizer.json"), **changes)
    assert isinstance(tokenizer, HuggingFace)
    return tokenizer


def test_documents_and_prompts_begin_and_end_as_the_tokenizer_s_files_say() -> None:
    """The eos_token of tokenizer_config.json ends a document, for any other special tokens."""

    def check(name: str, changes: dict[str, str], bos: str, eos: str) -> None:
        ours = in_file(name, **changes)
        library = tokenizers.Tokenizer.from_file(str(FILES / name / "tokenizer.json"))
        text = library.encode("hello <eos>", add_special_tokens=False).ids
        text = [*library.encode("hello ", add_special_tokens=False).ids, *ours.encode("<eos>").tolist()]
        begin = [library.token_to_id(bos)] if bos else []
        assert ours.prompt("hello <eos>").tolist() == [*begin, *text]
        assert ours.document("hello <eos>").tolist() == [*begin, *text, library.token_to_id(eos)]
        assert ours.continued(ours.prompt("hello <eos>")) == "hello <eos>"
        assert ours.prompt("").tolist() == begin

    check_rows(DOCUMENTS, check)
    identities = {in_file(name, **changes).identity for name, changes, _, _ in DOCUMENTS}
    assert len(identities) == len(DOCUMENTS)


@pytest.mark.slow  # needs an optional package
def test_prompts_and_ends_are_those_of_transformers() -> None:
    transformers: Any = pytest.importorskip("transformers")
    for folder in FILES.iterdir():
        ours, theirs = in_file(folder.name), transformers.AutoTokenizer.from_pretrained(folder)
        assert ours.prompt("hello").tolist() == theirs("hello")["input_ids"]
        assert ours.separator_token == theirs.eos_token


def test_the_end_of_a_document_is_special_and_keeps_its_flags(tmp_path: Path) -> None:
    """Its name in a text is text also if the file does not mark it as special; one may take the spaces after it."""
    made = tokenizers.Tokenizer.from_file(str(FILES / "two" / "tokenizer.json"))
    made.add_tokens(["<end>"])
    made.add_special_tokens([tokenizers.AddedToken("<stop>", rstrip=True, special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    end, stop = (HuggingFace(tmp_path / "tokenizer.json", eos_token=eos) for eos in ("<end>", "<stop>"))
    assert end.separator not in end.encode("a<end>b") and end.separator in end.special_ids
    assert stop.encode_template("a<stop> b")[0].tolist() == [*stop.encode("a"), stop.separator, *stop.encode("b")]


def test_ends_of_documents_have_different_identities(tmp_path: Path) -> None:
    """Also if one is known by its name, and the file does not mark it as special: else it would find cached tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1, "<eos>": 2}, unk_token="a"))
    made.add_special_tokens(["<eos>"])
    made.save(str(tmp_path / "tokenizer.json"))
    found = [HuggingFace(tmp_path / "tokenizer.json", eos_token=eos) for eos in ("", "</s>")]
    assert [one.separator for one in found] == [2, 1] and found[0].identity != found[1].identity


def test_tokenizer_config_says_whether_documents_begin_with_bos(tmp_path: Path) -> None:
    """Before the post-processor of tokenizer.json does; an undetermined case is reported."""
    path = tmp_path / "tokenizer.json"
    rows = [
        ("bos_added_by_its_own_file", {"add_bos_token": False, "bos_token": "<bos>"}, False, False),
        ("bos_added_by_its_own_file", {}, True, False),
        ("gemma", {"add_bos_token": True, "bos_token": {"content": "<start_of_turn>"}}, True, False),
        ("gemma", {"add_bos_token": None, "bos_token": "<bos>"}, False, True),
        ("eod", {}, False, False),
        ("eod", {"add_bos_token": True, "bos_token": "<EOT>", "eos_token": "<EOT>"}, True, False),
    ]

    def check(name: str, content: dict[str, Any], adds: bool, is_unclear: bool) -> None:
        path.write_bytes((FILES / name / "tokenizer.json").read_bytes())
        config_file(tmp_path, **{"eos_token": "<EOT>" if name == "eod" else "<eos>"} | content)
        ours = HuggingFace(path)
        assert (ours.adds_bos, ours.bos_is_unclear) == (adds, is_unclear)
        assert not HuggingFace(path, add_bos="never").bos_is_unclear
        if ours.bos == ours.separator:  # the separator of the document before already precedes a document
            assert ours.document("a").tolist() == [*ours.encode("a"), ours.separator]
            assert ours.prompt("a").tolist() == [ours.separator, *ours.encode("a")]

    check_rows(rows, check)


def test_sentencepiece_begins_with_bos_as_a_file_next_to_it_says(sentencepiece_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.model"
    path.write_bytes(sentencepiece_model.read_bytes())
    of = lambda **changes: make_tokenizer("sentencepiece", str(path), **changes)
    plain = of()
    assert plain.bos is None and of(add_bos="always").bos == 1
    config_file(tmp_path, add_bos_token=True)
    assert of().document("the").tolist() == [1, *plain.document("the")]
    assert of(add_bos="never").identity == plain.identity != of().identity


@pytest.mark.parametrize("packing", ["stream", "documents", "whole"])
def test_each_part_of_a_document_begins_with_bos(packing: str, tmp_path: Path) -> None:
    """Also in a window that begins inside a document; each token is still a target as often as without bos."""
    texts = ["hello " * 30, "one", "two three " * 9, "a"]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    file = FILES / "bos_added_by_its_own_file" / "tokenizer.json"
    base = {"seq_len": 16, "tokenizer": "hugging_face", "tokenizer_path": str(file), "objective": "causal"}
    of = lambda **changes: load(settings(tmp_path / "texts", packing=packing, **base, **changes), "all", 0)
    data = of()
    bos, eos = data.tokenizer.bos, data.tokenizer.separator
    counted: Counter[int] = Counter()
    for row in (data[i] for i in range(len(data))):
        inputs, targets, weights = row["tokens"], row["targets"], row["weights"]
        assert inputs[0] in (bos, eos)
        begins = np.flatnonzero((inputs[:-1] == eos) & (inputs[1:] != eos)) + 1
        assert (inputs[begins] == bos).all()
        assert ((inputs[1:] == targets[:-1]) | (inputs[1:] == bos)).all()
        counted.update(targets[(weights > 0) & (targets != bos)].tolist())
    expected = Counter(token for text in texts for token in data.tokenizer.document(text)[1:].tolist())
    assert counted == expected if packing == "whole" else not counted - expected
    prints = {of(add_bos=add_bos).fingerprint for add_bos in ("auto", "never")}
    assert len(prints) == 2


def test_generate_and_samples_begin_with_bos_and_do_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, asked = in_file("bos_added_by_its_own_file"), []

    class Continuation:
        def __init__(self, *_: object, **__: object) -> None: ...

        def room(self, prompt: np.ndarray, what: str) -> int:
            return 9

        def __call__(self, params: object, prompt: np.ndarray, length: int) -> np.ndarray:
            asked.append(prompt.tolist())
            return np.append(prompt, tokenizer.encode(" two"))

    monkeypatch.setattr(generate, "Continuation", Continuation)
    monkeypatch.setattr(sampling, "Continuation", Continuation)
    monkeypatch.setattr(sampling, "models", SimpleNamespace(Decoder=SimpleNamespace))
    monkeypatch.setattr(sampling, "inter_part", lambda parameters: False)
    model: Any = SimpleNamespace(tokenizer=lambda: tokenizer, experiment=None, params=None)
    options = {"length": 3, "temperature": 0.0, "seed": 0, "chat": False}
    assert [*generate.generate(model, ["one", ""], **options)] == ["one two", " two"]
    assert asked == [[tokenizer.bos, *tokenizer.encode("one")], [tokenizer.bos]]
    layout = SimpleNamespace(layout=SimpleNamespace(parameters=None))
    experiment: Any = SimpleNamespace(model=SimpleNamespace(), config=SimpleNamespace(seed=0), plan=layout)
    assert sampling.Sampler(experiment, tokenizer, SampleConfig(prompt="one", length=3))(None) == "one two"
    assert asked[2] == asked[0]
    data = settings("a", objective="causal", tokenizer="hugging_face", tokenizer_path=str(tokenizer._path))
    config = replace(small(), data=data)
    assert tokenizer_of(replace(config, model=replace(config.model, vocab_size=400))).bos == tokenizer.bos  # evaluate


def test_a_run_of_a_version_without_these_keys_has_no_bos() -> None:
    saved = flat(small().to_dict())
    del saved["data.add_bos"], saved["data.eos_token"]
    data = with_defaults(nested(saved))["data"]
    assert (data["add_bos"], data["eos_token"]) == ("never", "")
    assert with_defaults(small().to_dict())["data"]["add_bos"] == "auto"
    data = settings("a", objective="causal", tokenizer="hugging_face", tokenizer_path="t")
    cases = ((small().to_dict(), data, False), (with_data(saved, data), data, True))
    cases += (
        (with_data(saved, chats := replace(data, source="chats", packing="whole")), chats, False),
    )  # the keys change no chats
    for config, section, hint in cases:
        experiment: Any = SimpleNamespace(
            config=replace(small(), data=section), state_shapes=None, in_files=lambda shapes: shapes
        )
        found = SimpleNamespace(config=config, data={"fingerprint": "b"}, step=3)
        snapshots: Any = SimpleNamespace(find=lambda _: None)
        checkpointer: Any = SimpleNamespace(restore=lambda _, found=found: found)
        restored = lambda checkpointer=checkpointer, snapshots=snapshots, experiment=experiment: resume.restore(
            experiment, Path("run"), checkpointer, snapshots, {"fingerprint": "a"}
        )
        message = raised(restored)
        assert ("set data.add_bos=never" in message) == hint and message.endswith("choose another --workdir")


def with_data(saved: dict[str, Any], data: DataConfig) -> dict[str, Any]:
    """Returns a saved config of an earlier version with another section."""
    values = {name: value for name, value in vars(data).items() if name not in ("add_bos", "eos_token")}
    return nested(saved | {f"data.{name}": value for name, value in values.items()})


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


def test_special_tokens_that_a_model_lacks_do_not_count(tmp_path: Path) -> None:
    path = str(with_image_token(tokenizer_json(tmp_path / "tokenizer.json", ("<mask>", "</s>"))))
    assert make_tokenizer("hugging_face", path).num_ids == 261
    ours = make_tokenizer("hugging_face", path, 260)
    assert isinstance(ours, HuggingFace) and ours.num_ids == 260
    assert ours.decode(ours.encode("<image_soft_token>")) == "<image_soft_token>"  # text
    with pytest.raises(
        ValueError, match=r"\A'<image_soft_token>' has the id 260, not below model.vocab_size; remove the token"
    ):
        ours.encode_template("the <image_soft_token>")
    assert make_tokenizer("hugging_face", path, 259).num_ids == 260  # an ordinary token
    special = {"<|endoftext|>": 9, "[UNK]": 1}
    assert make_tokenizer("hugging_face", str(word_level(tmp_path / "words.json", special)), 5).num_ids == 10  # an end


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
