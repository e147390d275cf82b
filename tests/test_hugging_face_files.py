"""Checkpoints of transformers as files: what is read by whom, how much memory that takes, and what is refused."""

import json
import shutil
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.counting_file import CountingFile
from support.hugging_face_folders import changed, loaded, section, tensors_of
from support.hugging_face_reference import FOLDER, MODELS
from support.tables import every_row

import models
from compression import codecs
from compression.codecs import encode_matrices
from configs.schema import DecoderConfig, ShardingConfig
from models import hugging_face, lora
from models.hugging_face import Weights
from models.hugging_face_export import write
from models.mxfp4 import unpacked
from sharding.frozen import part_frozen, part_like
from sharding.mesh import find_nodes, make_mesh
from sharding.plan import ShardingPlan
from sharding.scopes import make_layout
from sharding.spec import is_spec, place_all
from sharding.state import by_name


def abstract(model: models.Model, *, nodes: int = 4, tensor: int = 1, **strategy: Any) -> Any:
    """Returns the shapes of the parameters with their shardings, on 8 devices."""
    layout = make_layout(ShardingConfig(**strategy), num_nodes=nodes, devices_per_node=8 // nodes, tensor=tensor)
    specs = model.param_specs()
    mesh = make_mesh(layout.shape, find_nodes(jax.devices(), 8 // nodes))
    plan = ShardingPlan(mesh=mesh, layout=layout, placements=place_all(specs, layout))
    shardings = plan.shardings(layout.parameters)
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), specs, shardings)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the bytes that are taken from each tensor of the files, in slices of 128 values or a row."""
    monkeypatch.setattr(hugging_face, "SLICE_VALUES", 128)
    opened = hugging_face.safe_open
    monkeypatch.setattr(hugging_face, "safe_open", lambda *args, **how: CountingFile(opened(*args, **how)))
    CountingFile.taken, CountingFile.most = Counter(), 0
    yield CountingFile.taken


STRATEGIES = {
    "zero3": dict(strategy="zero3"),
    "mics": dict(strategy="mics", partition_size=2),
    "ddp": dict(strategy="ddp"),
    "tensor": dict(strategy="mics", partition_size=4, nodes=2, tensor=2),
}


@every_row(
    ("name", "strategy"),
    [("gpt2", "zero3"), ("llama", "tensor"), ("bert", "mics"), ("roberta", "ddp"), ("gpt_oss", "tensor")],
)
def test_every_sharding_has_the_values_of_the_files(name: str, strategy: str, taken: Counter[str]) -> None:
    """And every byte is read once, however many devices of the process hold it, and few at once.

    A slice of a large tensor on slow storage takes minutes, in which no thread of Python runs: not the heartbeat's.
    """
    taken.clear()
    model = models.build(section(FOLDER / name))
    params = Weights(model, FOLDER / name).load(abstract(model, **STRATEGIES[strategy]))
    assert taken == {tensor: x.nbytes for tensor, x in tensors_of(FOLDER / name).items()}
    assert 0 < CountingFile.most <= 128 * 4
    _, whole = loaded(FOLDER / name, section(FOLDER / name))
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    token = by_name(params)["embed/token"]
    assert token.addressable_shards[0].data.size < token.size or strategy == "ddp"


@every_row("base", ["int8", "nf4"], isolated=True)
def test_a_base_in_blocks_is_read_and_encoded_once(
    base: str, taken: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its codes and its scales are of one reading; and what is encoded at once is a layer of a device's share."""
    taken.clear()
    encoded: list[int] = []
    encode = lambda x, *how: (encoded.append(x.size), encode_matrices(x, *how))[1]
    monkeypatch.setattr(hugging_face, "encode_matrices", encode)
    for module in (codecs, lora):
        monkeypatch.setattr(module, "COLUMNS", 8)  # the example has few columns
    model = models.build(replace(section(FOLDER / "llama"), lora_rank=2, lora_base=base))
    weights = Weights(model, FOLDER / "llama")
    _, frozen = part_frozen(model.param_specs())
    params = by_name(weights.load(part_like(abstract(model, strategy="mics", partition_size=2), frozen)[0]))
    assert taken == {tensor: x.nbytes for tensor, x in tensors_of(FOLDER / "llama").items()}
    plain = by_name(model.plain_specs, is_spec)
    stacks = {path: x for path, x in plain.items() if f"{path}/codes" in params}
    assert sum(encoded) == sum(prod(spec.shape) for spec in stacks.values()) and len(stacks) == 7
    layers, shares = model.config.num_layers, 2
    assert max(encoded) == max(prod(spec.shape) for spec in stacks.values()) // layers // shares
    for path in stacks:
        whole = encode_matrices(weights.region(path, (slice(None),) * 3), base)
        for part in lora.IN_BLOCKS:
            np.testing.assert_array_equal(params[f"{path}/{part}"], whole[part])


def test_a_fingerprint_tells_other_weights(tmp_path: Path) -> None:
    """By a value of a first row, or a dtype; a copy has the same."""
    model, name = models.build(section(FOLDER / "llama")), "model.layers.1.self_attn.k_proj.weight"

    def fingerprint(place: str, change: Any) -> str:
        file = changed(FOLDER / "llama", tmp_path / place) / "model.safetensors"
        values = load_file(file)
        values[name] = change(values[name])
        save_file(values, file)
        return Weights(model, tmp_path / place).fingerprint()

    same = Weights(model, FOLDER / "llama").fingerprint()
    assert fingerprint("copy", lambda x: x) == same
    assert fingerprint("value", lambda x: x + (np.arange(x.size).reshape(x.shape) == 3).astype(x.dtype)) != same
    assert fingerprint("dtype", lambda x: x.astype(np.float16)) != same


def test_a_process_reads_the_slices_of_its_devices_alone(taken: Counter[str]) -> None:
    """A process with one of eight devices takes an eighth of each tensor: rows or columns, of fused ones a third."""
    model = models.build(section(FOLDER / "gpt2"))
    weights = Weights(model, FOLDER / "gpt2")
    shapes = by_name(abstract(model, strategy="zero3"))
    shares = {path: x.sharding.devices_indices_map(x.shape) for path, x in shapes.items()}
    first, last = jax.devices()[0], jax.devices()[-1]
    weights.region("layers/query/weight", shares["layers/query/weight"][first])
    fused = {name: x.nbytes for name, x in tensors_of(FOLDER / "gpt2").items() if "c_attn.weight" in name}
    assert taken == {name: size // 24 for name, size in fused.items()}
    taken.clear()
    for path, share in shares.items():
        weights.region(path, share[first])
    whole = {name: x.nbytes for name, x in tensors_of(FOLDER / "gpt2").items()}
    rows = {"transformer.wte.weight": 48 * 16 * 4}  # of 384 with the padding
    assert taken == {name: size // 8 for name, size in whole.items()} | rows
    taken.clear()
    weights.region("embed/token", shares["embed/token"][last])
    assert not taken  # the last device holds padding alone


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[models.Model, Path, dict[str, np.ndarray]]:
    """A Llama of 4 layers and 21 MB, in files of at most 4 MB, with its parameters."""
    folder = tmp_path_factory.mktemp("large")
    section = DecoderConfig(hidden=256, intermediate=1024, vocab_size=2000, tied_head=False, max_len=16)
    model = models.build(section)
    rng = np.random.default_rng(0)
    values = {path: rng.normal(size=x.shape).astype(np.float32) for path, x in by_name(shapes(model)).items()}
    write(model, folder, values.__getitem__, max_file_bytes=4_000_000)
    return model, folder, values


def shapes(model: models.Model) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.param_specs())


def test_memory_is_a_share_and_one_parameter(large: Any) -> None:
    """One device's eighth of every parameter, all of which is kept, and the largest (stacked) parameter's eighth."""
    model, folder, values = large
    of_devices = by_name(abstract(model, strategy="zero3"))
    mine = {path: x.sharding.devices_indices_map(x.shape)[jax.devices()[0]] for path, x in of_devices.items()}
    total = sum(x.nbytes for x in values.values())
    weights = Weights(model, folder)
    tracemalloc.start()
    kept = [weights.region(path, index) for path, index in mine.items()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = max(x.nbytes for x in values.values())
    assert total > 20e6 and sum(x.nbytes for x in kept) == total // 8
    assert peak < total / 8 + largest / 8 + 200_000 < total / 4


@every_row("base", ["compute", "int8", "nf4"], isolated=True)
def test_memory_of_a_frozen_stack_is_that_and_some_layers(base: str, tmp_path: Path) -> None:
    """Its codes, as it is stored, and its values, as they are merged: not twice that."""
    section = DecoderConfig(num_layers=256, hidden=64, intermediate=256, vocab_size=200, max_len=16, tied_head=False)
    plain = models.build(section)
    write(plain, tmp_path, lambda path: np.ones(by_name(shapes(plain))[path].shape, np.float32))
    weights = Weights(models.build(replace(section, lora_rank=2, lora_base=base)), tmp_path)
    path, layer = "layers/up/weight", 64 * 256
    everything = (slice(None),) * 3
    makes = [(lambda: weights.whole(path), 256 * layer * 4)]
    if base != "compute":
        makes.append((lambda: weights._encoded(path, everything), 256 * layer * (1 if base == "int8" else 0.5)))
    for make, kept in makes:
        make()  # what is imported and compiled
        tracemalloc.start()
        found = make()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found is not None and kept < peak < 1.1 * kept + 10 * 4 * layer


def test_memory_of_writing_is_one_parameter_and_one_tensor(large: Any, tmp_path: Path) -> None:
    """And no file has more than was asked for."""
    model, _, values = large
    largest = max(x.nbytes for x in values.values())
    tracemalloc.start()
    write(model, tmp_path, lambda path: values[path].copy(), max_file_bytes=4_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.2 * largest < sum(x.nbytes for x in values.values())
    files = sorted(tmp_path.glob("*.safetensors"))
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert [file.name for file in files] == names and len(files) > 4
    assert all(3e5 < file.stat().st_size < 4_010_000 for file in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    found = tensors_of(tmp_path)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    np.testing.assert_array_equal(found["lm_head.weight"], values["head/weight"][:, :2000].T)


def test_a_region_in_mxfp4_is_the_published_formula(tmp_path: Path) -> None:
    """(-1)^sign times a value of E2M1 times two to the scale; two experts, 64 rows, and every third of 6 columns."""
    rng, path = np.random.default_rng(0), tmp_path / "x.safetensors"
    blocks, scales = rng.integers(0, 256, (2, 6, 2, 16), np.uint8), rng.integers(100, 150, (2, 6, 2), np.uint8)
    save_file({"x_blocks": blocks, "x_scales": scales}, path)
    file = path, safe_open(path, framework="numpy")
    ((name, (_, opened)),) = unpacked({"x_blocks": file, "x_scales": file}).items()
    tensor = opened.get_slice(name)
    wanted = np.zeros((2, 64, 6), np.float32)
    for e, row, column in np.ndindex(wanted.shape):
        code = int(blocks[e, column, row // 32, row % 32 // 2]) >> 4 * (row % 2) & 15
        exponent, half = code >> 1 & 3, code & 1
        value = (1 + half / 2) * 2.0 ** (exponent - 1) if exponent else half / 2
        wanted[e, row, column] = (-1) ** (code >> 3) * value * 2.0 ** (int(scales[e, column, row // 32]) - 127)
    assert (name, tensor.get_shape()) == ("x", [2, 64, 6])
    for at in (slice(0, 2), slice(0, 64), slice(0, 6)), (slice(1, 2), slice(30, 40), slice(1, 6, 3)), (slice(0, 1),):
        np.testing.assert_array_equal(tensor[at], wanted[at])
    with pytest.raises(ValueError, match="x_blocks is not in MXFP4, or its scales are missing"):
        unpacked({"x_blocks": file})


@every_row("name", MODELS, isolated=True)
def test_round_trip_is_bit_by_bit(name: str, tmp_path: Path) -> None:
    """The same tensors, names and bytes as transformers wrote; the files may be others."""
    model, params = loaded(FOLDER / name, section(FOLDER / name))
    ours = by_name(params)
    written = write(model, tmp_path, lambda path: np.asarray(ours[path]))
    assert [file.name for file in written] == ["model.safetensors"]
    assert not any(np.any(ours[path][260:]) for path in ("embed/token", "head/bias") if path in ours)  # padding
    before, after = tensors_of(FOLDER / name), tensors_of(tmp_path)
    assert before.keys() == after.keys()
    assert [
        key for key, x in before.items() if x.tobytes() != after[key].tobytes() or x.shape != after[key].shape
    ] == []
    assert replace(section(tmp_path), weights="") == replace(section(FOLDER / name), weights="")
    assert not [*tmp_path.glob("*.unfinished")]


def test_gate_and_up_of_one_tensor_are_never_in_memory_together(tmp_path: Path) -> None:
    """Nor any other two parameters: one is gone before the next one is read."""
    model = models.build(section(FOLDER / "gpt_oss"))
    sizes, before = by_name(shapes(model)), list[Any]([lambda: None])

    def read(path: str) -> np.ndarray:
        assert before[0]() is None
        value = np.ones(sizes[path].shape, np.float32)
        before[0] = weakref.ref(value)
        return value

    write(model, tmp_path, read)


def test_a_number_beyond_the_dtype_of_a_merged_model_is_one_line(tmp_path: Path) -> None:
    model, params = loaded(FOLDER / "llama", section(FOLDER / "llama"))
    ours = by_name(params)
    with pytest.raises(
        ValueError, match=r"model\.safetensors: model\.norm\.weight has a number beyond float16, in which"
    ):
        write(model, tmp_path, lambda path: np.asarray(ours[path]) * (1e5 if "head" in path else 1), dtype="float16")
    assert not [*tmp_path.glob("*.safetensors")]


Harm = Callable[[Path], object]


def rewrite(folder: Path, change: Any) -> None:
    """Applies a change to the dict of the tensors of a single file."""
    found = load_file(folder / WHOLE)
    change(found)
    save_file(found, folder / WHOLE)


def updated(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Harm:
    """Returns a function that adds to the tensors of a folder those that `change` makes of them."""
    return lambda folder: rewrite(folder, lambda found: found.update(change(found)))


def written(name: str, text: str) -> Harm:
    return lambda folder: (folder / name).write_text(text)


def cut(name: str) -> Harm:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def removed(name: str) -> Harm:
    return lambda folder: (folder / name).unlink()


def number(dtype: Any, value: float) -> Harm:
    """Returns a function that sets one value of a tensor, in another dtype."""

    def change(found: dict[str, np.ndarray]) -> None:
        found[UP] = found[UP].astype(dtype)
        found[UP][5, 7] = value

    return lambda folder: rewrite(folder, change)


UP, THIRD_LAYER = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 2))
F = np.float32
FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
WHOLE, INDEX = hugging_face.SINGLE_FILE, hugging_face.INDEX_FILE
MORE = {"model.norm.bias": np.zeros(16, F)}
DAMAGE: list[tuple[str, Harm, str]] = [
    ("llama", lambda f: rewrite(f, lambda x: x.pop(UP)), f"has no tensor {UP}, of shape 24 x 16$"),
    ("llama", updated(lambda _: MORE), "a tensor model.norm.bias, of shape 16, that the model has no place for$"),
    (
        "llama",
        updated(lambda x: {THIRD_LAYER: x[UP].copy(), "z": np.zeros(1, F)}),
        f"has a tensor {THIRD_LAYER}, of shape 24 x 16, that .* and 1 more$",
    ),
    ("llama", updated(lambda x: {UP: x[UP][:20].copy()}), f"{UP} has shape 20 x 16, but 24 x 16 in the model$"),
    ("llama", updated(lambda x: {UP: x[UP].astype(np.int8)}), f"{UP} has dtype I8; weights are float32, float16, .*"),
    (
        "llama",
        number(F, np.nan),
        f"{UP} has a NaN or an infinity, with which no model can be trained$",
    ),
    ("llama", number(ml_dtypes.bfloat16, -np.inf), f"{UP} has a NaN or an infinity, with which no model can"),
    ("llama", number(np.float64, -1e39), f"{UP} has a number beyond float32, with which no model can be trained$"),
    ("llama", cut(WHOLE), "model.safetensors is damaged or no safetensors file: .*incomplete"),
    ("llama", removed(WHOLE), "has neither model.safetensors.index.json nor model.safetensors$"),
    ("llama", removed("config.json"), r"config.json cannot be read \(No such file or directory\)"),
    ("llama", written("config.json", '{"model_type": ["llama"]}'), r"model_type \['llama'\] is not supported"),
    ("gpt2", removed(SECOND), f"index.json names {SECOND}, which is not there$"),
    ("gpt2", cut(SECOND), "00002-of-00003.safetensors is damaged"),
    ("gpt2", written(INDEX, "{}"), "index.json is not an index: its weight_map is of type NoneType$"),
    (
        "gpt2",
        written(INDEX, '{"weight_map": {"a": "../b"}}'),
        "says that a is in '../b', which is not the name",
    ),
    ("gpt2", lambda f: shutil.copy(f / FIRST, f / THIRD), f"that transformer.* is in {THIRD}, which does not have it$"),
]


@every_row(("name", "harm", "message"), DAMAGE, isolated=True)
def test_damage_is_one_line_that_names_it(name: str, harm: Harm, message: str, tmp_path: Path) -> None:
    folder = changed(FOLDER / name, tmp_path / name)
    harm(folder)
    model = models.build(section(FOLDER / name))
    with pytest.raises(ValueError, match=message) as error:
        Weights(model, folder).load(abstract(model, strategy="ddp"))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@every_row(
    ("name", "head"),
    [("llama", "lm_head.weight"), ("bert", "cls.predictions.decoder.weight"), ("roberta", "lm_head.decoder.weight")],
    isolated=True,
)
def test_a_head_tied_to_the_embedding_must_be_a_copy_of_it(name: str, head: str, tmp_path: Path) -> None:
    folder = changed(FOLDER / name, tmp_path / name, tie_word_embeddings=True)
    model = models.build(section(folder))
    ends = ("embed_tokens.weight", "word_embeddings.weight")
    embedding = next(x.copy() for key, x in tensors_of(folder).items() if key.endswith(ends))
    rewrite(folder, lambda found: found.update({head: embedding}))
    Weights(model, folder)
    embedding[-1, 0] += 1
    rewrite(folder, lambda found: found.update({head: embedding}))
    with pytest.raises(ValueError, match=f"has a {head} that differs from the embedding, but its config.json ties"):
        Weights(model, folder)
