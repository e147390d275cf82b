"""Random and mutated JSON for every reader of files: the right value, or one line of ours, and never another error."""

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from support.hugging_face_reference import FOLDER
from support.tokenizer_files import tokenizer_json

import models
from configs import hugging_face
from configs.schema import MODELS, DataConfig, flat, with_defaults
from elastic import __main__ as state_command
from elastic import attempts, manifest
from input_pipeline.shard_index import Shard, ShardIndex
from input_pipeline.shard_listing import list_shards
from input_pipeline.store import StoreError, open_store
from input_pipeline.tokenizers import MAX_IDS, Bytes, HuggingFace
from models.hugging_face import INDEX_FILE, SINGLE_FILE, Weights, open_file
from runtime.command_line import complain
from runtime.files import json_lines, json_objects, run_directory
from runtime.supervisor import supervise
from sharding.state import by_name
from training.metrics.run_files import read_run
from training.registered import register_names

BOUNDED = dict(deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
quick = settings(max_examples=60, **BOUNDED)
DEEP = b"[" * 100_000
# replacements of a value: no JSON, JSON of other types, numbers that no machine has, text without an encoding
FRAGMENTS = [
    *(DEEP, b'{"a":' * 100_000, b"[" * 300 + b"]" * 300, b"[" * 90 + b"]" * 90, b"NaN", b"-Infinity", b"1e999"),
    *(b"9" * 5000, b"1" + b"0" * 30, b'"\\ud800"', b'"a\\u0000b"', b"\xff", b'{"a": 1, "a": 2}', b"\xef\xbb\xbf1"),
    *(b"", b"null", b"true", b"0", b"-1", b"1.5", b'""', b'".."', b'"../a"', b'"a"', b"[]", b"[[]]", b"{}", b'["a"]'),
]
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
scalars |= st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
values = st.recursive(scalars, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text("abc"), x, max_size=4))
fragments = st.sampled_from(FRAGMENTS) | values.map(lambda x: json.dumps(x).encode())
PLACE = "the place of a fragment"


def places(document: Any) -> list[tuple[Any, ...]]:
    """Returns the keys that lead to every value inside a document."""
    items = [*document.items()] if isinstance(document, dict) else [*enumerate(document)]
    inner = [(key, *path) for key, x in items if isinstance(x, dict | list) for path in places(x)]
    return [*((key,) for key, _ in items), *inner]


@st.composite
def hostile(draw: Any, content: bytes) -> bytes:
    """A document with a value replaced or left out, with a bit flipped, or cut; or something else altogether."""
    how = draw(st.sampled_from(["replaced", "without", "flipped", "cut", "inserted", "else"]))
    if how == "else":
        return draw(fragments)
    if how in ("flipped", "cut", "inserted"):
        where = draw(st.integers(0, len(content) - 1))
        if how == "flipped":
            return content[:where] + bytes([content[where] ^ 1 << draw(st.integers(0, 7))]) + content[where + 1 :]
        return content[:where] + (draw(fragments) + content[where:] if how == "inserted" else b"")
    document = json.loads(content)
    *path, last = draw(st.sampled_from(places(document)))
    inner = document
    for key in path:
        inner = inner[key]
    if how == "without":
        del inner[last]
        return json.dumps(document).encode()
    inner[last] = PLACE
    return json.dumps(document).encode().replace(json.dumps(PLACE).encode(), draw(fragments))


def said(act: Callable[[], Any], *refusals: type[Exception]) -> tuple[Any, str]:
    """Returns the result of a reader, and the line of its refusal."""
    try:
        return act(), ""
    except refusals as error:
        line = str(error)
        assert line and "\n" not in line and type(error) in refusals, line
        return None, line


def test_a_file_beyond_the_bound_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "x.json", "wb") as file:
        file.truncate(1 << 40)  # a hole
    got, line = said(lambda: json_objects.read(tmp_path / "x.json"), ValueError)
    assert (got, line) == (None, f"{tmp_path}/x.json has {1 << 40} bytes: too large for JSON")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


FILES = tuple(
    manifest.File(path=x, size=5, sha256="0" * 64) for x in ("config/metadata", "data/metadata", manifest.STATE_FILE)
)
MANIFEST = manifest.Manifest(
    step=7,
    saved_at="2026-01-01T00:00:00+00:00",
    metrics={"loss": float("nan"), "validation_loss": 2.5},
    tree=(manifest.Leaf(path="params.w", shape=(2, 3), dtype="float32"),),
    files=FILES,
)


@pytest.fixture(scope="module")
def a_manifest(folder: Path) -> bytes:
    (folder / "7").mkdir()
    manifest.write(folder / "7", MANIFEST)
    return (folder / "7" / manifest.FILE_NAME).read_bytes()


def hashed_again(content: bytes) -> bytes:
    """Returns a manifest with the hash of its content, as a stranger would write it; anything else as it is."""
    try:
        document = json_objects.parse(content, "it", lenient=True)
        document["sha256"] = ""
        del document["sha256"]
        digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        return (json.dumps(document | {"sha256": digest}, sort_keys=True, indent=1) + "\n").encode()
    except ValueError:
        return content


@settings(max_examples=200, **BOUNDED)
@given(data=st.data())
def test_a_manifest(folder: Path, a_manifest: bytes, data: st.DataObject) -> None:
    """Also with a hash that is right: no value of a stranger's manifest gives more than a line."""
    content = data.draw(hostile(a_manifest))
    is_hashed_again = data.draw(st.booleans())
    (folder / "7" / manifest.FILE_NAME).write_bytes(hashed_again(content) if is_hashed_again else content)
    got, line = said(
        lambda: manifest.read(folder / "7"), manifest.DamagedError, manifest.UnknownFormatError, ValueError
    )
    if not is_hashed_again:
        assert (str(got) == str(MANIFEST)) == (content == a_manifest)
    assert (got is None) == bool(line)
    for command in (state_command.verify, state_command.ls):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert command(folder) in (0, 1)
        assert (
            out.getvalue().startswith("step") and out.getvalue().count("\n") == 1 and out.getvalue()[:-1].isprintable()
        )


NOT_BELOW = ("/dev/zero", "../x", "a/../b", "a//b", "", ".", "a\x1b[2J", "\ud800", "a\0", 7, None, "x" * 300)
ODD_ENTRIES = [
    *(({"path": path}, "does not name a file below") for path in NOT_BELOW),
    *(({"size": size}, "no size or no hash") for size in (-1, True, "5", 1 << 70, None)),
    ({"sha256": "z"}, "no size or no hash"),
    ({"path": manifest.DATA_FILE}, "lists a file twice"),
    ({"more": 1}, "unexpected keyword"),
]


def test_an_entry_of_a_manifest_that_leaves_its_folder_or_cannot_be(folder: Path, a_manifest: bytes) -> None:
    lines = {}
    for number, (change, why) in enumerate(ODD_ENTRIES):
        document = json.loads(a_manifest)
        document["files"][0] |= change
        (folder / "7" / manifest.FILE_NAME).write_bytes(hashed_again(json.dumps(document).encode()))
        _, line = said(lambda: manifest.read(folder / "7"), manifest.DamagedError)
        if not (line.startswith(f"{manifest.FILE_NAME} is damaged: ") and why in line and line.isprintable()):
            lines[number] = line
    assert not lines


def test_names_of_strangers_cannot_steer_a_terminal_and_passwords_are_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile_name = "\x1b]0;owned\x07\u202ename\r\n at s3://me:pass@word/x and http://u:p@h:1/y, https://host/v1@2"

    def fail(kind: type[Exception]) -> bool:
        raise kind(hostile_name)

    complain(ValueError(hostile_name))
    for kind in (ValueError, OSError, KeyError):  # a mistake, a failure, and a bug, which has a traceback
        assert supervise(lambda _, kind=kind: fail(kind)) in (1, 2)
    shown = capsys.readouterr().err
    wanted = "error: \\x1b]0;owned\\x07\\u202ename at s3://***@word/x and http://***@h:1/y, https://host/v1@2"
    assert shown.splitlines().count(wanted) == 3 and shown.isascii()
    assert not any(secret in shown for secret in ("\x1b", "\r", "pass", "u:p"))


ATTEMPTS = {"run_id": "0123456789abcdef", "folder": 0, "began_at": [0, 4], "saved": 3}
ATTEMPTS |= {"extended": [{"step": 4, "before": 4, "after": 8}]}


@quick
@given(data=st.data())
def test_attempts(folder: Path, data: st.DataObject) -> None:
    known = ATTEMPTS | {"folder": folder.stat().st_ino}
    content = data.draw(hostile(json.dumps(known).encode()))
    (folder / run_directory.ATTEMPTS).write_bytes(content)
    got, line = said(lambda: attempts.read_attempts(folder, lambda line: None), ValueError)
    if got is None:
        assert line.startswith(f"{folder / run_directory.ATTEMPTS} is damaged (")
    elif (written := json.loads(content))["folder"] == known["folder"]:
        assert json.loads(json.dumps(asdict(got))) == {"saved": 0, "extended": []} | written
    else:  # a copy of the folder is another run
        assert got.began_at == () and got.folder == known["folder"]


INDEX = ShardIndex(
    tokenizer=Bytes().identity,
    shards=tuple(Shard(name=f"{x}.txt", num_tokens=9, text_bytes=8, dtype="<u2", sha256=f"{x}" * 64) for x in range(3)),
)


def test_rows_of_a_shard_index_are_objects() -> None:
    for rows in (["x"], [None], [["name"]], [1]):
        _, line = said(partial(ShardIndex.from_json, INDEX.as_json() | {"shards": rows}, "here"), ValueError)
        assert line.startswith("here is not an index of token shards (")


@quick
@given(data=st.data())
def test_a_shard_index(folder: Path, data: st.DataObject) -> None:
    content = data.draw(hostile(json.dumps(INDEX.as_json()).encode()))
    (folder / "set").mkdir(exist_ok=True)
    (folder / "set" / "index.json").write_bytes(content)
    store, config = open_store(str(folder / "set")), DataConfig()
    got, line = said(lambda: list_shards(store, "", config, Bytes()), ValueError)
    if got is None:
        assert str(folder / "set") in line
    else:
        rows = [row | {"skipped": (*row.get("skipped", ()),)} for row in json.loads(content)["shards"]]
        assert [asdict(shard) for shard in got.index.shards] == sorted(rows, key=lambda row: row["name"])


@quick
@given(data=st.data())
def test_a_saved_config(folder: Path, data: st.DataObject) -> None:
    """In a checkpoint: its keys with the defaults, or one line."""
    content = data.draw(hostile(json.dumps({"model": {"kind": "gpt2"}, "data": {"seq_len": 9}, "seed": 3}).encode()))
    saved, _ = said(lambda: json_objects.parse(content, "it", lenient=True), ValueError)
    said(lambda: register_names(saved or {}, folder, ""), ValueError)
    got, line = said(lambda: with_defaults(saved or {}), ValueError)
    assert got is not None or line
    assert got is None or flat(saved).items() <= flat(got).items()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """For a writer, that is, who never comes."""
    readers: dict[str, Callable[[Path], Any]] = {
        "config.json": lambda file: hugging_face.read(file.parent),
        "tokenizer.json": HuggingFace,
        "manifest.json": lambda file: manifest.read(file.parent),
        "rows.jsonl": json_lines.read,
        "last_rows.jsonl": lambda file: json_lines.read_tail(file, 9),
        SINGLE_FILE: lambda file: open_file(file, "missing"),
        "a.txt": lambda file: open_store(str(file.parent)).fetch(file.name, tmp_path / "copy"),
        "index.json": lambda file: open_store(str(file.parent)).read(file.name),
    }
    for name, read in readers.items():
        os.mkfifo(tmp_path / name)
        with pytest.raises((ValueError, StoreError, manifest.DamagedError), match=f"{name} is not a regular file|pipe"):
            read(tmp_path / name)
    os.mkfifo(tmp_path / run_directory.SUMMARY)
    (tmp_path / run_directory.METRICS).touch()
    assert read_run(tmp_path).problems[run_directory.SUMMARY] == "is not a regular file"


@quick
@given(name=st.sampled_from(["gpt2", "llama", "bert", "roberta"]), data=st.data())
def test_a_config_of_hugging_face(folder: Path, name: str, data: st.DataObject) -> None:
    content = data.draw(hostile((FOLDER / name / "config.json").read_bytes()))
    (folder / "config.json").write_bytes(content)
    got, line = said(lambda: hugging_face.read(folder), ValueError)
    if got is None:
        assert line.startswith(str(folder / "config.json"))
    else:
        architecture, found = got
        written = json.loads(content)
        assert architecture.model_type == written["model_type"]
        same = ("vocab_size", "hidden", "num_layers", "num_heads", "norm_eps")
        their_names = {field.ours: field.theirs for field in architecture.fields if field.ours in same}
        assert {key: found[key] for key in same} == {key: written[their_names[key]] for key in same}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, dict[str, np.ndarray]]:
    """A checkpoint in two files with an index, the content of that, and its parameters."""
    folder = shutil.copytree(FOLDER / "llama", tmp_path_factory.mktemp("weights") / "llama")
    tensors = load_file(folder / "model.safetensors")
    halves = {"a.safetensors": [*tensors][::2], "b.safetensors": [*tensors][1::2]}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    places = {name: file for file, names in halves.items() for name in names}
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": places}).encode()
    return folder, index, parameters(FOLDER / "llama")


def parameters(folder: Path) -> dict[str, np.ndarray]:
    model = models.build(MODELS["decoder"](**hugging_face.model(FOLDER / "llama").to_dict()))
    here = SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), model.param_specs())
    return {path: np.asarray(x) for path, x in by_name(Weights(model, folder).load(wanted)).items()}


def check_same(got: dict[str, np.ndarray] | None, line: str, wanted: dict[str, np.ndarray], folder: Path) -> None:
    """Checks that all parameters came, or a line that names the folder."""
    if got is None:
        assert str(folder) in line
    else:
        assert {path: x.tobytes() for path, x in got.items()} == {path: x.tobytes() for path, x in wanted.items()}


@settings(max_examples=30, **BOUNDED)
@given(data=st.data())
def test_an_index_of_safetensors(llama: Any, data: st.DataObject) -> None:
    folder, content, wanted = llama
    (folder / INDEX_FILE).write_bytes(data.draw(hostile(content) | st.just(content)))
    check_same(*said(lambda: parameters(folder), ValueError), wanted, folder)


@settings(max_examples=30, **BOUNDED)
@given(data=st.data())
def test_a_header_of_safetensors(folder: Path, llama: Any, data: st.DataObject) -> None:
    content = (FOLDER / "llama" / SINGLE_FILE).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = data.draw(hostile(content[8:end]))
    size = (
        len(header).to_bytes(8, "little") if data.draw(st.booleans()) else data.draw(st.binary(min_size=8, max_size=8))
    )
    shutil.copy(FOLDER / "llama" / "config.json", folder)
    (folder / SINGLE_FILE).write_bytes(size + header + content[end:])
    check_same(*said(lambda: parameters(folder), ValueError), llama[2], folder)


@pytest.fixture(scope="module")
def tokenizer_files(folder: Path) -> list[bytes]:
    """Byte-level BPE, Unigram and WordPiece."""
    pieces = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("the", -1.0), ("f", -2.0)], 0, False))
    vocabulary = {"[UNK]": 0, "the": 1, "f": 2, "##ox": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    for one in (pieces, words):
        one.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        one.add_special_tokens([tokenizers.AddedToken("</s>", special=True)])
    return [tokenizer_json(folder / "bpe.json").read_bytes(), pieces.to_str().encode(), words.to_str().encode()]


@quick
@given(which=st.integers(0, 2), data=st.data())
def test_a_tokenizer(folder: Path, tokenizer_files: list[bytes], which: int, data: st.DataObject) -> None:
    """The ids of the library, or one line for the file or for a text."""
    whole, path = tokenizer_files[which], folder / "tokenizer.json"
    content = data.draw(hostile(whole) | st.just(whole))
    path.write_bytes(content)
    got, line = said(lambda: HuggingFace(path), ValueError)
    if got is None:
        assert content != whole and line.startswith(f"data.tokenizer_path {path} ")
        return
    library = tokenizers.Tokenizer.from_buffer(content)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    for text in ("", "the quick fox", "na\u00efve \U0001f40d\n\ttabs", "<|endoftext|>"):
        ids, _ = said(lambda text=text: got.document(text).tolist(), ValueError)
        assert ids is not None or content != whole
        assert ids is None or ids == [*library.encode(text, add_special_tokens=False).ids, got.separator]
        assert ids is None or (min(ids) >= 0 and max(ids) < got.num_ids <= MAX_IDS)
