"""Writes a model as a checkpoint of transformers, in safetensors, file by file up to a size.

The headers are written first, then each tensor at its place. So in memory is no more than one of our (stacked)
parameters, of GPT-2's query, key and value three, and one of their tensors.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np

from configs.hugging_face import CONFIG_FILE, architecture_of, config_json
from configs.schema import TransformerConfig
from files import atomic
from models.hugging_face.names import Tensor, tensors
from models.hugging_face.reading import INDEX_FILE, SINGLE_FILE
from models.model import Model

UNFINISHED = ".unfinished"  # suffix of files that are being written
ITEM_BYTES = 4  # float32
MAX_FILE_BYTES = 5_000_000_000  # what transformers writes, too


class _File:
    """A safetensors file whose tensors are written in any order."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        self._begins: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # without it, transformers refuses the file
        end = 0
        for name, shape in shapes.items():
            self._begins[name] = end
            begin, end = end, end + prod(shape) * ITEM_BYTES
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, end)}
        content = json.dumps(header, separators=(",", ":")).encode()
        content += b" " * (-len(content) % 8)
        self._data = 8 + len(content)
        self._file = open(f"{path}{UNFINISHED}", "wb")  # noqa: SIM115
        self._file.write(len(content).to_bytes(8, "little") + content)
        self._file.truncate(self._data + end)

    def write(self, name: str, value: np.ndarray) -> None:
        """Writes a tensor at its place."""
        self._file.seek(self._data + self._begins[name])
        self._file.write(np.ascontiguousarray(value, "<f4").data)

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
    max_file_bytes: int = MAX_FILE_BYTES,
    token_ids: Mapping[str, int] | None = None,
) -> list[Path]:
    """Writes config.json and the weights into `folder`, an existing one, and returns the paths of the weights' files.

    `read(path)` returns one of our parameters whole, by its path (`layers/query/weight`); each is read once. A file has
    at most `max_file_bytes` of tensors, or a single tensor. Nothing has its name before it is whole; config.json comes
    last, with `token_ids` (`eos_token_id`) in it. ValueError if no architecture of transformers computes what the model
    does, or if the folder holds weights.
    """
    assert isinstance(model.config, TransformerConfig)
    architecture = architecture_of(model.config)
    if there := sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        raise ValueError(f"{folder} holds weights already ({there[0].name}); choose an empty folder")
    found = [*tensors(model, architecture).values()]
    files = _files(folder, found, max_file_bytes)
    total = sum(prod(shape) * ITEM_BYTES for _, shape in _theirs(found))
    opened = {path: _File(path, shapes) for path, shapes in files.items()}
    place = {name: opened[path] for path, shapes in files.items() for name in shapes}
    for _, group in groupby(found, key=lambda tensor: tensor.name):
        _write_tensors([*group], read, place)
    for file in opened.values():
        file.close()
        os.replace(f"{file.path}{UNFINISHED}", file.path)
    if len(files) > 1:
        places = {name: path.name for path, shapes in files.items() for name in shapes}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        atomic.replace(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    config = config_json(model.config, architecture) | dict(token_ids or {})
    atomic.replace(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    return [*files]


def _write_tensors(parts: list[Tensor], read: Callable[[str], np.ndarray], place: Mapping[str, _File]) -> None:
    """Writes the tensors, one per layer, that hold some of our parameters side by side."""
    values = [read(tensor.path) for tensor in parts]
    used = tuple(slice(size) for size in parts[0].shape)  # without the padding of the vocabulary
    for layer in parts[0].layers:
        of_layer = values if layer is None else [value[layer] for value in values]
        whole = np.concatenate([value[used] for value in of_layer], axis=-1)
        name = parts[0].name_in(layer)
        place[name].write(name, whole.T if parts[0].transposed else whole)


def _theirs(found: list[Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each of their tensors: layer by layer, between embedding and head."""
    rank = {"embed": 0, "layers": 1, "head": 2}
    at = [(rank[tensor.path.partition("/")[0]], layer or 0, tensor) for tensor in found for layer in tensor.layers]
    for _, layer, tensor in sorted(at, key=lambda place: place[:2]):
        if tensor.part == 0:
            yield tensor.name_in(layer), tensor.their_shape


def _files(folder: Path, found: list[Tensor], max_bytes: int) -> dict[Path, dict[str, tuple[int, ...]]]:
    """Returns the shapes of the tensors of each file, by path."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in _theirs(found):
        size = prod(shape) * ITEM_BYTES
        if files[-1] and used + size > max_bytes:
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
