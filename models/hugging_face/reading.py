"""Reads a checkpoint of transformers, in safetensors, into arrays on a mesh.

Each process reads the slices that its devices hold, and each of them once, straight from the mapped file. In host
memory are, beside what is already on the devices, this process' shards of one of our (stacked) parameters and a slice
of one of their tensors.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from configs.hugging_face import check_same
from configs.schema import TransformerConfig
from files import json_objects
from models.hugging_face.names import Tensor, ignored, spellings, tensors
from models.model import Model, Params
from sharding.spec import path_name

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class _File:
    """An open file of tensors."""

    path: Path
    handle: Any  # of safetensors


class Weights:
    """A checkpoint that fits a model: every tensor is there, with the right shape, and no other."""

    def __init__(self, model: Model, folder: str | Path) -> None:
        """Opens the files and reads their headers.

        ValueError for a config.json of another model, a missing or damaged file, and a tensor that is missing, of
        another shape, of no float dtype, or not part of the model.
        """
        assert isinstance(model.config, TransformerConfig)
        self.folder = Path(folder).expanduser()
        architecture = check_same(model.config, self.folder)
        self._files = _open(self.folder)
        self._tensors = tensors(model, architecture)
        self._names: dict[tuple[str, int | None], str] = {}
        unused = {name for name in self._files if not ignored(model, architecture, name)}
        for path, tensor in self._tensors.items():
            for layer in tensor.layers:
                wanted = tensor.name_in(layer)
                name = next((x for x in spellings(architecture, wanted) if x in self._files), None)
                if name is None:
                    raise ValueError(f"{self.folder} has no tensor {wanted}, of shape {_times(tensor.their_shape)}")
                self._check(name, tensor)
                self._names[path, layer] = name
                unused.discard(name)
        if unused:
            first = min(unused)
            shape, more = _times(self._slice(first).get_shape()), f" and {len(unused) - 1} more" * (len(unused) > 1)
            raise ValueError(
                f"{self.folder} has a tensor {first}, of shape {shape}, that the model has no place for{more}"
            )

    def load(self, abstract: Params) -> Params:
        """Returns the parameters, float32, with the shapes and shardings of `abstract` (jax.ShapeDtypeStructs)."""
        return jax.tree_util.tree_map_with_path(lambda path, x: self._load(path_name(path), x), abstract)

    def region(self, path: str, index: Index) -> np.ndarray:
        """Returns a region of one of our parameters, float32; padding of the vocabulary is zero."""
        tensor = self._tensors[path]
        bounds = [part.indices(size)[:2] for part, size in zip(index, tensor.spec.shape, strict=True)]
        out = np.zeros([stop - start for start, stop in bounds], np.float32)
        stacked = tensor.layers != (None,)
        layers = range(*bounds[0]) if stacked else (None,)
        for number, layer in enumerate(layers):
            self._fill(out[number] if stacked else out, tensor, layer, bounds[stacked:])
        return out

    def _load(self, path: str, abstract: Any) -> jax.Array:
        made: dict[tuple[Any, ...], np.ndarray] = {}  # several devices may hold the same region

        def region(index: Index | None) -> np.ndarray:
            assert index is not None
            key = tuple((part.start, part.stop) for part in index)
            if key not in made:
                made[key] = self.region(path, index)
            return made[key]

        array = jax.make_array_from_callback(abstract.shape, abstract.sharding, region)
        return jax.block_until_ready(array)  # then the next parameter may use the memory

    def _fill(self, out: np.ndarray, tensor: Tensor, layer: int | None, bounds: list[tuple[int, int]]) -> None:
        """Copies the region `bounds` of one layer into `out`, as far as it is no padding."""
        stops = [min(stop, size) for (_, stop), size in zip(bounds, tensor.shape, strict=True)]
        wanted = [slice(start, max(start, stop)) for (start, _), stop in zip(bounds, stops, strict=True)]
        inside = tuple(slice(0, part.stop - part.start) for part in wanted)
        if any(part.start == part.stop for part in wanted):
            return  # padding alone
        first = tensor.part * tensor.shape[-1]
        wanted[-1] = slice(wanted[-1].start + first, wanted[-1].stop + first)
        name = self._names[tensor.path, layer]
        theirs = self._slice(name)[tuple(wanted[::-1] if tensor.transposed else wanted)]
        with np.errstate(over="ignore"):  # a float64 may become infinite
            out[inside] = theirs.T if tensor.transposed else theirs
        if not (np.isfinite(out[inside].min()) and np.isfinite(out[inside].max())):  # no array of booleans
            what = "a NaN or an infinity" if not np.isfinite(theirs).all() else "a number beyond float32"
            raise ValueError(f"{self._files[name].path}: {name} has {what}, with which no model can be trained")

    def _slice(self, name: str) -> Any:
        return self._files[name].handle.get_slice(name)

    def _check(self, name: str, tensor: Tensor) -> None:
        found = self._slice(name)
        shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if shape != tensor.their_shape:
            raise ValueError(
                f"{self.folder}: {name} has shape {_times(shape)}, but {_times(tensor.their_shape)} in the model"
            )
        if dtype not in FLOATS:
            raise ValueError(f"{self.folder}: {name} has dtype {dtype}; weights are {', '.join(FLOATS.values())}")


def _open(folder: Path) -> dict[str, _File]:
    """Returns the open file of each tensor by name. ValueError for a missing or damaged file."""
    if not (folder / INDEX_FILE).exists():
        file = _open_file(folder / SINGLE_FILE, f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}")
        return dict.fromkeys(file.handle.keys(), file)
    path = folder / INDEX_FILE
    places = _places(path)
    files = {
        name: _open_file(folder / name, f"{path} names {name}, which is not there") for name in set(places.values())
    }
    inside = {name: set(file.handle.keys()) for name, file in files.items()}
    for name, place in places.items():
        if name not in inside[place]:
            raise ValueError(f"{path} says that {name} is in {place}, which does not have it")
    return {name: files[place] for name, place in places.items()}


def _places(path: Path) -> dict[str, str]:
    """Returns the name of the file of each tensor, by an index. ValueError if that cannot be read."""
    try:
        places = json_objects.read(path).get("weight_map")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    if not isinstance(places, dict):
        raise ValueError(f"{path} is not an index: its weight_map is of type {type(places).__name__}")
    for name, place in places.items():
        if not isinstance(place, str) or Path(place).name != place or "\0" in place:
            raise ValueError(f"{path} says that {name} is in {place!r}, which is no name of a file beside it")
    return places


def _open_file(path: Path, if_missing: str) -> _File:
    try:
        return _File(path=path, handle=safe_open(path, framework="numpy"))
    except FileNotFoundError as error:
        raise ValueError(if_missing) from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error


def _times(shape: tuple[int, ...] | list[int]) -> str:
    return " x ".join(map(str, shape)) or "()"
