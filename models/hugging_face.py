"""Weights in the layout of transformers: maps our parameters to its tensors, and reads them into a mesh (`Weights`).

The table of an architecture (configs/hugging_face.py, which also reads and writes `config.json`) maps our parameters to
tensors. Our parameters are stacked, `[L, ...]`, and multiply from the right, `x @ weight`. transformers has one tensor
per layer. torch's Linear stores `[out, in]`. GPT-2's Conv1D stores `[in, out]` as we do, with query, key and value
concatenated in one tensor. Heads are in the same order, and both pair dim `i` of a head with `i + H/2` in rotary
positions, so that no tensor is permuted. Experts are stacked once more, `[L, E, ...]`, with one tensor per layer and
expert. gpt-oss has one tensor per layer, `[E, in, out]`, in which the columns of gate and up alternate, and which may
be in MXFP4 (models/mxfp4.py).

Each process reads the slices that its devices hold, each slice once, directly from the mapped file. Host memory
additionally holds this process' shards of one of our (stacked) parameters and a slice of one tensor.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from compression.codecs import decode_matrices, encode_matrices
from configs.hugging_face import Architecture, check_same
from configs.schema import TransformerConfig
from models.lora import ADAPTERS, IN_BLOCKS, in_blocks
from models.model import Model, Params
from models.mxfp4 import unpacked
from runtime.files import json_objects
from runtime.files.paths import user_path
from runtime.files.regular import open_regular
from sharding.padding import from_regions
from sharding.spec import ParamSpec, path_name
from sharding.state import by_name
from sharding.trees import PyTree

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
TIED_HEADS = ("lm_head.weight", "cls.predictions.decoder.weight", "lm_head.decoder.weight")  # BERT, RoBERTa
MATRICES = ("/weight", "/router", "/experts/up", "/experts/gate", "/experts/down")  # ends of the paths of matrices
SLICE_VALUES = 1 << 22  # values per read: reads hold Python's lock, which must not delay heartbeats
TensorSlice = tuple[slice, ...]
StackIndex = tuple[int, ...]  # in a stack: (layer,), or (layer, expert); () for a parameter that is not stacked

# suffixes of a name in the table (theirs, ours): embedding tables have none, modules append the name of the parameter
ENDS = (("", ""), (".weight", "/weight"), (".weight", "/scale"), (".bias", "/bias"))


@dataclass(frozen=True, kw_only=True)
class TensorMapping:
    """One of our parameters, and the tensor or tensors of transformers that hold it."""

    path: str  # our name
    name: str  # their name, with `{}` for the number of the layer, and another one for the number of the expert
    transposed: bool
    part: int  # index of ours among the `parts` that theirs concatenates in its last dim
    parts: int
    interleaved: bool  # columns of the parts alternate; otherwise the parts follow each other
    spec: ParamSpec
    shape: tuple[int, ...]  # shape at one place, without the padding of the vocabulary

    @property
    def places(self) -> list[StackIndex]:
        """The place of each of their tensors in our parameter."""
        return [*np.ndindex(self.spec.shape[: len(self.spec.shape) - len(self.shape)])]

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of each tensor of transformers."""
        whole = (*self.shape[:-1], self.shape[-1] * self.parts)
        return whole[::-1] if self.transposed else whole

    def columns(self, ours: slice) -> slice:
        """Returns the columns of their tensor that hold our columns `ours`."""
        if self.interleaved:
            return slice(ours.start * self.parts + self.part, ours.stop * self.parts, self.parts)
        first = self.part * self.shape[-1]
        return slice(ours.start + first, ours.stop + first)

    def name_in(self, place: StackIndex) -> str:
        """Returns the name of the tensor at a place."""
        return self.name.format(*place)


def tensors(model: Model, architecture: Architecture, num_ids: int = 0) -> dict[str, TensorMapping]:
    """Returns the tensors of a model by our path, in the order of the table, without adapters.

    They have `num_ids` token ids, 0: as many as the model.
    """
    assert isinstance(model.config, TransformerConfig)
    every: dict[str, ParamSpec] = by_name(model.plain_specs, lambda x: isinstance(x, ParamSpec))
    specs = {path: spec for path, spec in every.items() if not path.endswith(ADAPTERS)}
    vocab_size, found = num_ids or model.config.vocab_size, {}
    for name, ours in architecture.tensors.items():
        modules = ours.split()
        for their_end, our_end in ENDS:
            for part, path in enumerate(f"{module}{our_end}" for module in modules):
                if (spec := specs.get(path)) is None:  # some models lack a bias or an untied head
                    continue
                shape = tuple(vocab_size if dim == "vocab" else n for dim, n in zip(spec.dims, spec.shape, strict=True))
                stacked = name.count("{}")
                found[path] = TensorMapping(
                    path=path,
                    name=f"{name}{their_end}",
                    transposed=path.endswith(MATRICES)
                    and not (architecture.conv1d and stacked)
                    and len(shape) < stacked + 3,
                    part=part,
                    parts=len(modules),
                    interleaved=architecture.interleaved,
                    spec=spec,
                    shape=shape[stacked:],
                )
    assert found.keys() == specs.keys(), found.keys() ^ specs.keys()
    return found


def ignored(model: Model, architecture: Architecture, name: str) -> bool:
    """Whether the model has no use for a checkpoint's tensor: buffers, heads of other tasks, copies of a tied head."""
    return copies_embedding(model, name) or re.fullmatch(architecture.ignored, name) is not None


def copies_embedding(model: Model, name: str) -> bool:
    """Whether a checkpoint's tensor is the head of a model that uses the embedding as its head."""
    return getattr(model.config, "tied_head", True) and name in TIED_HEADS


def spellings(architecture: Architecture, name: str) -> tuple[str, ...]:
    """Returns the possible names of a tensor: with and without the prefix, and with TensorFlow's names of norms."""
    found = (name, name.removeprefix(architecture.prefix))
    old = (x.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta") for x in found)
    return (*found, *old)


_File = tuple[Path, Any]  # with the handle of safetensors
Spans = tuple[tuple[int, int], ...]  # start and stop in each dim


class Weights:
    """A checkpoint that fits a model: it has every tensor with the right shape, and no other tensors."""

    def __init__(self, model: Model, folder: str | Path) -> None:
        """Opens the files and reads their headers.

        ValueError for a config.json of another model, a missing or damaged file, and a tensor that is missing, of
        another shape, of no float dtype, or not part of the model.
        """
        assert isinstance(model.config, TransformerConfig)
        self.folder, self._config = user_path(folder), model.config
        architecture, num_ids = check_same(model.config, self.folder)
        self._files = unpacked(_open(self.folder))
        self._tensors = tensors(model, architecture, num_ids)
        self._names: dict[tuple[str, StackIndex], str] = {}
        unused = {name for name in self._files if not ignored(model, architecture, name)}
        for path, tensor in self._tensors.items():
            for place in tensor.places:
                wanted = tensor.name_in(place)
                name = next((x for x in spellings(architecture, wanted) if x in self._files), None)
                if name is None:
                    raise ValueError(f"{self.folder} has no tensor {wanted}, of shape {_times(tensor.their_shape)}")
                self._check(name, tensor)
                self._names[path, place] = name
                unused.discard(name)
        for name in filter(partial(copies_embedding, model), self._files):
            self._check_copy(name)
        if unused:
            first = min(unused)
            shape, more = _times(self._slice(first).get_shape()), f" and {len(unused) - 1} more" * (len(unused) > 1)
            raise ValueError(
                f"{self.folder} has a tensor {first}, of shape {shape}, that the model has no place for{more}"
            )

    @property
    def dtype(self) -> str:
        """The common dtype of all tensors if that is float16 or bfloat16, else float32."""
        found = {FLOATS[self._slice(name).get_dtype()] for name in self._names.values()}
        return found.pop() if found in ({"float16"}, {"bfloat16"}) else "float32"

    def fingerprint(self) -> str:
        """Returns a hash of every tensor's name, dtype, shape and first row (of a vector, its first value).

        A copy has the same fingerprint. A model that was trained further has another one.
        """
        found = hashlib.sha256()
        for name in sorted({*self._names.values()}):
            tensor = self._slice(name)
            found.update(json.dumps([name, tensor.get_dtype(), tensor.get_shape()]).encode())
            found.update(tensor[(slice(1),) * max(1, len(tensor.get_shape()) - 1)].tobytes())
        return found.hexdigest()

    def load(self, abstract: Params) -> Params:
        """Returns parameters with the shapes, dtypes and shardings of `abstract` (jax.ShapeDtypeStructs).

        Parameters in blocks (models/lora.py) are encoded while they are read, a layer at a time.
        """
        made: dict[Spans, PyTree] = {}  # regions of one parameter, because several devices may hold the same region
        owner = ""

        def load(at: KeyPath, x: jax.ShapeDtypeStruct) -> jax.Array:
            nonlocal owner
            path = path_name(at)
            before, owner = owner, path.rpartition("/")[0] if path.endswith(IN_BLOCKS) else path
            if owner != before:
                made.clear()
            region = lambda index: self._stored(path, index, x.dtype, made)
            return jax.block_until_ready(from_regions(x, region))  # then the next parameter may use the memory

        return jax.tree_util.tree_map_with_path(load, abstract)

    def whole(self, path: str) -> np.ndarray:
        """Returns our parameter `path` whole in float32, with the rounding of its frozen, block-encoded form."""
        found = self.region(path, (slice(None),) * len(self._tensors[path].spec.shape))
        coded, dtype = in_blocks(self._config, self._tensors[path].spec), jnp.dtype(self._config.compute_dtype)
        base = self._config.lora_base
        for part in found if found.ndim > 2 else [found]:  # in place: a stack may take half of the memory
            part[...] = decode_matrices(encode_matrices(part, base), part.dtype) if coded else part.astype(dtype)
        return found

    def region(self, path: str, index: TensorSlice) -> np.ndarray:
        """Returns a region of our parameter `path` in float32.

        The padding of the vocabulary is zero. Token ids that the checkpoint lacks have the mean of its ids' values.
        """
        tensor = self._tensors[path]
        bounds = [part.indices(size)[:2] for part, size in zip(index, tensor.spec.shape, strict=True)]
        out = np.zeros([stop - start for start, stop in bounds], np.float32)
        stacked = len(bounds) - len(tensor.shape)
        for place in product(*(range(*bound) for bound in bounds[:stacked])):
            inside = tuple(number - first for number, (first, _) in zip(place, bounds, strict=False))
            self._fill(out[(*inside, ...)], tensor, place, bounds[stacked:])
        if "vocab" in tensor.spec.dims:
            self._add_ids(out, tensor, bounds)
        return out

    def _add_ids(self, out: np.ndarray, tensor: TensorMapping, bounds: list[tuple[int, int]]) -> None:
        """Writes the mean over the checkpoint's token ids to the ids of the region `bounds` that it lacks."""
        dim = tensor.spec.dims.index("vocab")
        (start, stop), others = bounds[dim], [slice(*bound) for bound in bounds[:dim] + bounds[dim + 1 :]]
        new = slice(max(tensor.shape[dim] - start, 0), min(stop, self._config.vocab_size) - start)
        if new.start < new.stop:
            theirs, num_ids = self._slice(self._names[tensor.path, ()]), tensor.their_shape[0]
            most = max(1, SLICE_VALUES // prod(tensor.their_shape[1:]))
            parts = (theirs[first : min(first + most, num_ids)] for first in range(0, num_ids, most))
            mean = sum(np.sum(part, axis=0, dtype=np.float64) for part in parts) / num_ids
            np.moveaxis(out, dim, 0)[new] = np.asarray(mean)[tuple(others)]

    def _stored(self, path: str, index: TensorSlice, dtype: DTypeLike, made: dict[Spans, PyTree]) -> np.ndarray:
        """Returns a region of a parameter in its stored form. Codes and scales have their blocks along the last dim.

        `made` caches the values read and encoded for it.
        """
        parent, _, part = path.rpartition("/")
        coded = part in IN_BLOCKS
        rows = (*index[:-1], slice(None)) if coded else index
        key = tuple((one.start, one.stop) for one in rows)
        if key not in made:
            made[key] = self._encoded(parent, rows) if coded else self.region(path, rows).astype(dtype)
        return made[key][part][..., index[-1]] if coded else made[key]

    def _encoded(self, path: str, index: TensorSlice) -> dict[str, np.ndarray]:
        """Returns the codes and scales of a region with whole rows of a stack of matrices."""
        found: dict[str, np.ndarray] = {}
        layers = range(self._tensors[path].spec.shape[0])[index[0]]
        for number, layer in enumerate(layers):
            values = self.region(path, (slice(layer, layer + 1), *index[1:]))
            for part, x in encode_matrices(values, self._config.lora_base).items():
                if not number:
                    found[part] = np.empty((len(layers), *x.shape[1:]), x.dtype)
                found[part][number] = x[0]
        return found

    def _fill(self, out: np.ndarray, tensor: TensorMapping, place: StackIndex, bounds: list[tuple[int, int]]) -> None:
        """Copies the region `bounds` of one tensor into `out`, except for padding."""
        stops = [min(stop, size) for (_, stop), size in zip(bounds, tensor.shape, strict=True)]
        wanted = [slice(start, max(start, stop)) for (start, _), stop in zip(bounds, stops, strict=True)]
        inside = tuple(slice(0, part.stop - part.start) for part in wanted)
        if any(part.start == part.stop for part in wanted):
            return  # only padding
        wanted[-1] = tensor.columns(wanted[-1])
        name = self._names[tensor.path, place]
        wanted = wanted[::-1] if tensor.transposed else wanted
        into, theirs = out[inside].T if tensor.transposed else out[inside], self._slice(name)
        for theirs_at, ours_at in _pieces(wanted, tensor.their_shape):
            read, block = theirs[theirs_at], into[ours_at]
            with np.errstate(over="ignore"):  # a float64 may become infinite
                block[...] = read
            if not (np.isfinite(block.min()) and np.isfinite(block.max())):  # avoids an array of booleans
                what = "a NaN or an infinity" if not np.isfinite(read).all() else "a number beyond float32"
                raise ValueError(f"{self._files[name][0]}: {name} has {what}, with which no model can be trained")

    def _slice(self, name: str) -> Any:
        return self._files[name][1].get_slice(name)

    def _check_copy(self, name: str) -> None:
        """Raises ValueError if a tied head is not a copy of the embedding, because the model would lose it."""
        copy, embedding = self._slice(name), self._slice(self._names["embed/token", ()])
        (rows, columns), most = embedding.get_shape(), max(1, SLICE_VALUES // embedding.get_shape()[1])
        parts = [slice(start, min(start + most, rows)) for start in range(0, rows, most)]
        is_same = lambda part: np.array_equal(copy[part], embedding[part], equal_nan=True)
        if copy.get_shape() != [rows, columns] or not all(map(is_same, parts)):
            raise ValueError(
                f"{self.folder} has a {name} that differs from the embedding, but its config.json ties the two; if the "
                "head was trained apart, set tie_word_embeddings to false there and model.tied_head=False, else remove "
                "the tensor"
            )

    def _check(self, name: str, tensor: TensorMapping) -> None:
        found = self._slice(name)
        shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if shape != tensor.their_shape:
            raise ValueError(
                f"{self.folder}: {name} has shape {_times(shape)}, but {_times(tensor.their_shape)} in the model"
            )
        if dtype not in FLOATS:
            raise ValueError(f"{self.folder}: {name} has dtype {dtype}; weights are {', '.join(FLOATS.values())}")


def _pieces(region: list[slice], shape: tuple[int, ...]) -> Iterator[tuple[TensorSlice, TensorSlice]]:
    """Yields the parts of a region of a tensor that are read at once, in the tensor and in the region.

    A part has whole rows of one matrix, because the pages of a row are read anyway.
    """
    stacks, (rows, *columns) = region[:-2], region[-2:]
    most = max(1, SLICE_VALUES // prod(shape[len(stacks) + 1 :]))
    experts = (range(part.start, part.stop) for part in stacks)
    for *numbers, start in product(*experts, range(rows.start, rows.stop, most)):
        part = *(slice(i, i + 1) for i in numbers), slice(start, min(start + most, rows.stop))
        place = tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(part, region, strict=False))
        yield (*part, *columns), place


def _open(folder: Path) -> dict[str, _File]:
    """Returns the open file of each tensor by name. ValueError for a missing or damaged file."""
    if not (folder / INDEX_FILE).exists():
        file = open_file(folder / SINGLE_FILE, f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}")
        return dict.fromkeys(file[1].keys(), file)
    path = folder / INDEX_FILE
    places = _places(path)
    files = {
        name: open_file(folder / name, f"{path} names {name}, which is not there") for name in set(places.values())
    }
    inside = {name: set(handle.keys()) for name, (_, handle) in files.items()}
    for name, place in places.items():
        if name not in inside[place]:
            raise ValueError(f"{path} says that {name} is in {place}, which does not have it")
    return {name: files[place] for name, place in places.items()}


def _places(path: Path) -> dict[str, str]:
    """Returns the file name of each tensor, according to an index. ValueError if the index cannot be read."""
    try:
        places = json_objects.read(path).get("weight_map")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    if not isinstance(places, dict):
        raise ValueError(f"{path} is not an index: its weight_map is of type {type(places).__name__}")
    for name, place in places.items():
        if not isinstance(place, str) or Path(place).name != place or "\0" in place:
            raise ValueError(f"{path} says that {name} is in {place!r}, which is not the name of a file in its folder")
    return places


def open_file(path: Path, if_missing: str) -> _File:
    """Returns a safetensors file with its handle.

    ValueError if it is damaged, or with the text `if_missing` if missing.
    """
    try:
        open_regular(path).close()  # reading a pipe would block
        return path, safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise ValueError(if_missing) from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error


def _times(shape: tuple[int, ...] | list[int]) -> str:
    return " x ".join(map(str, shape)) or "()"
