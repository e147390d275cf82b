"""Writes weights in the layout of transformers: config.json and safetensors files.

The headers are written first, then each parameter at its offsets. Memory holds at most a single parameter in float32
and a single tensor of transformers.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from configs.hugging_face import CONFIG_FILE, architecture_of, config_json
from configs.schema import TransformerConfig
from models.hugging_face import FLOATS, INDEX_FILE, SINGLE_FILE, TensorMapping, tensors
from models.model import Model
from runtime.files import atomic

UNFINISHED = ".unfinished"  # suffix of files that are being written
MAX_FILE_BYTES = 5_000_000_000  # as in transformers


class _NewFile:
    """A safetensors file whose tensors are written in any order, whole or some columns at a time."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        self.path, self._dtype, self._shapes = path, jnp.dtype(dtype), shapes
        self._begins: dict[str, int] = {}
        (theirs,) = (name for name, ours in FLOATS.items() if ours == dtype)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # without it, transformers refuses the file
        end = 0
        for name, shape in shapes.items():
            self._begins[name] = end
            begin, end = end, end + prod(shape) * self._dtype.itemsize
            header[name] = {"dtype": theirs, "shape": shape, "data_offsets": (begin, end)}
        content = json.dumps(header, separators=(",", ":")).encode()
        content += b" " * (-len(content) % 8)
        self._data = 8 + len(content)
        self._file = open(f"{path}{UNFINISHED}", "w+b")  # noqa: SIM115
        self._file.write(len(content).to_bytes(8, "little") + content)
        self._file.truncate(self._data + end)

    def write(self, name: str, value: np.ndarray) -> None:
        """Writes a tensor at its offset. ValueError if a number exceeds the range of the dtype."""
        with np.errstate(over="ignore"):
            content = np.ascontiguousarray(value, self._dtype)
        if not (np.isfinite(content.min()) and np.isfinite(content.max())):
            raise ValueError(f"{self.path}: {name} has a number beyond {self._dtype}, in which the model is written")
        self._file.seek(self._data + self._begins[name])
        self._file.write(content.view(np.uint8).data)

    def write_columns(self, name: str, columns: slice, value: np.ndarray) -> None:
        """Writes some columns of a tensor, like `write`; the others stay as they are, at first zero."""
        content = np.empty(self._shapes[name], self._dtype)
        self._file.seek(self._data + self._begins[name])
        self._file.readinto(content.view(np.uint8).data)
        with np.errstate(over="ignore"):
            content[..., columns] = value
        self.write(name, content)

    def close(self) -> None:
        """Makes sure that the content is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def write(
    model: Model,
    folder: Path,
    read: Callable[[str], np.ndarray],
    *,
    dtype: str = "float32",
    max_file_bytes: int = MAX_FILE_BYTES,
    token_ids: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes config.json and the weights into the existing `folder`, and returns the paths of the weights' files.

    `read(path)` returns our whole parameter at a path (`layers/query/weight`), and is called once for each.
    A file has at most `max_file_bytes` of tensors, or a single tensor. Files get their names only when they are
    complete. config.json comes last and contains `token_ids` (`eos_token_id`). ValueError if no architecture of
    transformers computes the same function as the model, if the folder already holds weights, or if a number exceeds
    the range of the dtype.
    """
    assert isinstance(model.config, TransformerConfig)
    architecture = architecture_of(model.config)
    if there := sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        raise ValueError(f"{folder} holds weights already ({there[0].name}); choose an empty folder")
    found = [*tensors(model, architecture).values()]
    item_bytes = jnp.dtype(dtype).itemsize
    files = _files(folder, found, max_file_bytes // item_bytes)
    total = sum(prod(shape) * item_bytes for _, shape in _theirs(found))
    with ExitStack() as stack:
        opened = {path: stack.enter_context(closing(_NewFile(path, x, dtype))) for path, x in files.items()}
        place = {name: opened[path] for path, shapes in files.items() for name in shapes}
        for tensor in found:
            _write_parameter(tensor, read(tensor.path), place)
    for path in files:
        os.replace(f"{path}{UNFINISHED}", path)
    if len(files) > 1:
        places = {name: path.name for path, shapes in files.items() for name in shapes}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        atomic.replace(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    config = config_json(model.config, architecture) | {"dtype": dtype} | dict(token_ids or {})
    atomic.replace(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    return [*files]


def _write_parameter(tensor: TensorMapping, value: np.ndarray, place: Mapping[str, _NewFile]) -> None:
    """Writes our parameter into the tensors, one per layer (and expert), that hold it."""
    used = tuple(slice(size) for size in tensor.shape)  # without the padding of the vocabulary
    for at in tensor.places:
        name, part = tensor.name_in(at), value[(*at, *used)]
        if tensor.parts == 1:
            place[name].write(name, part.T if tensor.transposed else part)
        else:
            assert not tensor.transposed
            place[name].write_columns(name, tensor.columns(slice(0, tensor.shape[-1])), part)


def _theirs(found: list[TensorMapping]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of each of their tensors: layer by layer, between embedding and head."""
    rank = {"embed": 0, "layers": 1, "head": 2}
    at = [(rank[tensor.path.partition("/")[0]], place, tensor) for tensor in found for place in tensor.places]
    for _, place, tensor in sorted(at, key=lambda x: (x[0], x[1][:1])):
        if tensor.part == 0:
            yield tensor.name_in(place), tensor.their_shape


def _files(folder: Path, found: list[TensorMapping], max_values: int) -> dict[Path, dict[str, tuple[int, ...]]]:
    """Returns the tensor shapes of each file, by path. A file has at most `max_values` values, or a single tensor."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in _theirs(found):
        size = prod(shape)
        if files[-1] and used + size > max_values:
            files.append({})
            used = 0
        files[-1][name] = shape
        used += size
    if len(files) == 1:
        return {folder / SINGLE_FILE: files[0]}
    return {
        folder / f"model-{number:05}-of-{len(files):05}.safetensors": shapes
        for number, shapes in enumerate(files, start=1)
    }
