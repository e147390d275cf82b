"""Checkpoints of transformers for the tests: read, changed, exported, and runs that start from them."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

import models
from configs import hugging_face
from configs.schema import MODELS as KINDS
from configs.schema import TransformerConfig
from models.hugging_face import Weights
from models.model import Params
from support.hugging_face_reference import FOLDER, VOCAB, reference
from support.running import ROOT, SMALL
from training import convert

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def section(folder: Path) -> TransformerConfig:
    values = hugging_face.model(folder).to_dict()
    found = KINDS[values["kind"]](**values)
    assert isinstance(found, TransformerConfig)
    return found


def loaded(folder: Path, config: TransformerConfig) -> tuple[Any, Params]:
    """Returns the model and its parameters on one device."""
    model = models.build(config)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HERE), model.param_specs())
    return model, Weights(model, folder).load(abstract)


def our_logits(folder: Path, tokens: np.ndarray, config: TransformerConfig | None = None) -> np.ndarray:
    model, params = loaded(folder, config or section(folder))
    ids = tokens.astype(np.int32)
    return np.asarray(jax.jit(lambda p: model.logits(p, ids, lambda _, tree: tree))(params))[..., :VOCAB]


def changed(folder: Path, target: Path, **changes: Any) -> Path:
    """Copies a checkpoint and changes keys of its config.json; None removes one."""
    shutil.copytree(folder, target)
    values = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: x for key, x in values.items() if x is not None}))
    return target


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Returns every tensor, as the library itself reads it."""
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def flags(name: str, folder: Path | None = None, **changes: Any) -> list[str]:
    """Returns the flags of a run of 2 steps with the sizes of a checkpoint, which starts from it unless changed."""
    values = {f"model.{key}": x for key, x in model_section(name).items()}
    values |= {"model.dropout": 0.0, "model.attention_dropout": 0.0}  # so that a loss is the checkpoint's
    values |= {key: x for key, x in SMALL.items() if not key.startswith("model.")}
    if section(FOLDER / name).kind == "moe":
        values["sharding.experts"] = "none"
    values |= {"num_steps": 2, "optimizer.warmup_steps": 1, "model.weights": str(folder or FOLDER / name)}
    values |= {key.replace("__", "."): x for key, x in changes.items()}
    files = {"encoder": "tiny.py:bert", "moe": "tiny.py:moe", "decoder": "quickstart.py"}
    config = files[section(FOLDER / name).kind]
    return [f"--config={ROOT}/configs/{config}", *(f"--config.{key}={x}" for key, x in values.items())]


def run_convert(*args: str) -> int:
    return convert.main(args)


def model_section(name: str) -> dict[str, Any]:
    return {key: x for key, x in asdict(section(FOLDER / name)).items() if key != "kind"}


def batch_loss(name: str) -> float:
    """The loss of the first batch, as transformers computed it."""
    return float(reference(name)["batch_loss"])
