"""LoRA's adapters in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`, read and written.

A tensor is named after the matrix that it adapts, `base_model.model.NAME.lora_A.weight` `[rank, in]` and
`lora_B.weight` `[out, rank]`, one for each layer. Embedding and head, if they are trained (`modules_to_save` in PEFT),
have the names and shapes of the base. The file's metadata hold a hash of the names and shapes of the base.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import numpy as np
from jax.tree_util import KeyPath
from safetensors.numpy import save_file

from configs.hugging_face import architecture_of
from configs.schema import TransformerConfig
from models.hugging_face import FLOATS, StackIndex, TensorMapping, open_file, tensors
from models.lora import EMBEDDINGS, adapter_paths
from models.model import Model, Params
from runtime.files import atomic, json_objects
from runtime.files.paths import user_path
from sharding.padding import from_regions
from sharding.spec import is_spec, path_name
from sharding.state import by_name

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX, ENDS = "base_model.model.", ("lora_A.weight", "lora_B.weight")
# the settings that we implement, by PEFT's names: its defaults, which may be absent
ONLY = {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False}
ONLY |= {"rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None}
# older versions of PEFT do not know these
NOT_WRITTEN = {"alora_invocation_tokens": None, "layer_replication": None, "target_parameters": None}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # prefixes of `init_lora_weights`


class Adapters:
    """A folder of adapters that fits a model."""

    def __init__(self, model: Model, folder: str | Path) -> None:
        """Opens the files and checks every tensor.

        ValueError for a missing or damaged file, another rank or alpha, unsupported adapters or adapters of another
        base, and a tensor that is missing, of another shape, not finite, or not part of the model.
        """
        assert isinstance(model.config, TransformerConfig)
        self._folder, c = user_path(folder), model.config
        self._whole = _whole(model)
        _check_config(self._folder / CONFIG_FILE, c, _modules(self._whole.values()))
        file = self._folder / WEIGHTS_FILE
        _, self._file = open_file(file, f"{self._folder} has no {WEIGHTS_FILE}")
        self._tensors = _adapted(model)
        base = (self._file.metadata() or {}).get("base")
        if base not in (None, base_hash(model)):
            raise ValueError(f"{file} holds adapters of another base: its names or shapes are not those of this model")
        left = set(self._file.keys())
        for path, tensor in self._tensors.items():
            for end, shape in zip(ENDS, _their_shapes(tensor, c.lora_rank), strict=True):
                for place in tensor.places:
                    self._check(file, _name(tensor, place, end), shape, left, path)
        for path, tensor in self._whole.items():
            self._check(file, PREFIX + tensor.name, tensor.their_shape, left, path)
        if left:
            raise ValueError(f"{file} has a tensor {min(left)}, for which model.lora_targets has no place")

    def load(self, abstract: Params) -> Params:
        """Returns the adapters, float32, with the shapes and shardings of `abstract` (jax.ShapeDtypeStructs)."""
        adapters = {
            adapter: (tensor, end)
            for path, tensor in self._tensors.items()
            for adapter, end in zip(adapter_paths(path), ENDS, strict=True)
        }

        def load(path: KeyPath, x: jax.ShapeDtypeStruct) -> jax.Array:
            if (whole := self._whole.get(path_name(path))) is not None:
                values = self._file.get_tensor(PREFIX + whole.name).astype(np.float32)
                values = values.T if whole.transposed else values
                values = np.pad(values, [(0, n - m) for n, m in zip(x.shape, values.shape, strict=True)])
                return from_regions(x, lambda index: values[index])
            tensor, end = adapters[path_name(path)]
            stack = np.stack([self._read(_name(tensor, place, end)) for place in tensor.places])
            stack = stack.reshape(*tensor.spec.shape[:-2], *stack.shape[-2:])
            return from_regions(x, lambda index: stack[index])

        return jax.tree_util.tree_map_with_path(load, abstract)

    def _read(self, name: str) -> np.ndarray:
        """Returns an adapter of one layer in our layout, float32."""
        with np.errstate(over="ignore"):  # a float64 may become infinite
            return self._file.get_tensor(name).astype(np.float32).T

    def _check(self, file: Path, name: str, shape: tuple[int, ...], left: set[str], path: str) -> None:
        if name not in left:
            raise ValueError(f"{file} has no tensor {name}; model.lora_targets names {path.split('/')[-2]}")
        left.remove(name)
        tensor = self._file.get_slice(name)
        if (found := tuple(tensor.get_shape())) != shape:
            raise ValueError(f"{file}: {name} has shape {found}, but {shape} in the model")
        if (dtype := tensor.get_dtype()) not in FLOATS:
            raise ValueError(f"{file}: {name} has dtype {dtype}; adapters are {', '.join(FLOATS.values())}")
        if not np.isfinite(self._read(name)).all():
            raise ValueError(f"{file}: {name} has a NaN or an infinity, with which no model can be trained")


def write(model: Model, folder: Path, read: Callable[[str], np.ndarray], base: str) -> Path:
    """Writes the adapters into the existing `folder`, and returns the path of their file.

    `read(path)` returns our whole parameter at a path, f32 `[L, ...]`. `base` is the folder or name of the base's
    checkpoint.
    ValueError if PEFT has no such layout, or if the folder already holds adapters.
    """
    assert isinstance(model.config, TransformerConfig)
    if (file := folder / WEIGHTS_FILE).exists():
        raise ValueError(f"{folder} holds adapters already; choose an empty folder")
    found, c = _adapted(model), model.config
    if getattr(c, "shared_intermediate", 0) and "experts" in c.lora_targets.split():
        raise ValueError("PEFT does not find adapters of experts next to a shared expert; use --to_hugging_face")
    content = {
        _name(tensor, place, end): np.ascontiguousarray(value.T, np.float32)
        for path, tensor in found.items()
        for end, adapter, shape in zip(ENDS, adapter_paths(path), _their_shapes(tensor, c.lora_rank), strict=True)
        for place, value in zip(tensor.places, read(adapter).reshape(-1, *shape[::-1]), strict=True)
    }
    whole = _whole(model)
    for path, tensor in whole.items():
        value = read(path)[tuple(map(slice, tensor.shape))]  # without the padding of the vocabulary
        content[PREFIX + tensor.name] = np.ascontiguousarray(value.T if tensor.transposed else value, np.float32)
    unfinished = file.with_suffix(".unfinished")
    save_file(content, unfinished, metadata={"format": "pt", "base": base_hash(model)})
    unfinished.replace(file)
    config = ONLY | {
        "r": c.lora_rank,
        "lora_alpha": c.lora_alpha,
        "target_modules": _target_modules(model, found),
        "modules_to_save": _modules(whole.values()) or None,
        "lora_dropout": 0.0,
        "task_type": None if c.kind == "encoder" else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    atomic.replace(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    return file


def base_hash(model: Model) -> str:
    """Returns a hash of the names and shapes of all tensors of a model's checkpoint, without adapters."""
    assert isinstance(model.config, TransformerConfig)
    found = tensors(model, architecture_of(model.config)).values()
    lines = sorted(f"{tensor.name} {tensor.part} {len(tensor.places)} {tensor.their_shape}" for tensor in found)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _adapted(model: Model) -> dict[str, TensorMapping]:
    """Returns the matrices with adapters, by our path. ValueError if their tensors combine several of ours."""
    assert isinstance(model.config, TransformerConfig)
    architecture, parameters = architecture_of(model.config), by_name(model.plain_specs, is_spec)
    found = tensors(model, architecture)
    found = {path: tensor for path, tensor in found.items() if adapter_paths(path)[0] in parameters}
    if architecture.conv1d or any(len(tensor.shape) > 2 for tensor in found.values()):
        raise ValueError(f"{architecture.name} keeps several of our matrices in one: no adapters of PEFT fit them")
    return found


def _whole(model: Model) -> dict[str, TensorMapping]:
    """Returns the embedding and the head, if they are trained, by our path. ValueError if they are the same tensor."""
    assert isinstance(model.config, TransformerConfig)
    if not model.config.lora_embeddings:
        return {}
    found = {path: x for path, x in tensors(model, architecture_of(model.config)).items() if path in EMBEDDINGS}
    if len(found) < len(EMBEDDINGS):
        raise ValueError("PEFT's layout cannot hold a tied head that was trained; use --to_hugging_face")
    return found


def _modules(found: Iterable[TensorMapping]) -> list[str]:
    """Returns PEFT's names of modules that are trained whole."""
    return sorted(tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in found)


def _target_modules(model: Model, found: dict[str, TensorMapping]) -> list[str]:
    """Returns the names by which PEFT finds the matrices: the last word, or the full name if the word is ambiguous."""
    assert isinstance(model.config, TransformerConfig)

    def modules(tensors: Iterable[TensorMapping]) -> set[str]:
        return {tensor.name_in(place).rpartition(".")[0] for tensor in tensors for place in tensor.places}

    adapted = modules(found.values())
    others = modules(tensors(model, architecture_of(model.config)).values()) - adapted
    last = {name.rpartition(".")[2] for name in others}
    return sorted({name if (word := name.rpartition(".")[2]) in last else word for name in adapted})


def _name(tensor: TensorMapping, place: StackIndex, end: str) -> str:
    return f"{PREFIX}{tensor.name_in(place).removesuffix('weight')}{end}"


def _their_shapes(tensor: TensorMapping, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes `[rank, in]` and `[out, rank]`."""
    rows, columns = tensor.shape
    return (rank, rows), (columns, rank)


def _check_config(path: Path, config: TransformerConfig, whole: list[str]) -> None:
    try:
        values = json_objects.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); it belongs to the adapters") from error
    for name, ours, key in (("r", config.lora_rank, "lora_rank"), ("lora_alpha", config.lora_alpha, "lora_alpha")):
        if values.get(name) != ours:
            raise ValueError(f"{path} has {name}={values.get(name)!r}, but model.{key}={ours}; set it to that")
    for name, only in (ONLY | NOT_WRITTEN).items():
        if (value := values.get(name, only) or only) != only:
            raise ValueError(f"{path}: {name}={value!r} is not supported; {only!r} is")
    if sorted(values.get("modules_to_save") or []) != whole:
        raise ValueError(
            f"{path} has modules_to_save={values.get('modules_to_save')}, but model.lora_embeddings="
            f"{config.lora_embeddings} trains {' and '.join(whole) or 'none'} whole"
        )
    init = values.get("init_lora_weights")
    if str(init).lower().startswith(CHANGES_BASE):
        raise ValueError(
            f"{path}: init_lora_weights={init!r} changes the base; give plain ones, to which PEFT converts "
            "all but LoftQ's (save_pretrained with path_initial_model_for_weight_conversion)"
        )
