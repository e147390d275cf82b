"""`config.json` of transformers, and the model section that computes the same, in both directions.

The tables of architectures are in configs/hugging_face_architectures.py and configs/hugging_face_experts.py. A config
file that starts from a checkpoint takes its sizes from there: `config.model = hugging_face.model(DIR)`.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs.hugging_face_architectures import WITHOUT_EXPERTS, Architecture
from configs.hugging_face_experts import MISSING, WITH_EXPERTS
from configs.hugging_face_fields import ROTARY, UNUSED_FROM
from configs.schema import MODELS, TransformerConfig, defaults
from configs.schema.keys import keys_of
from runtime.files import json_objects
from runtime.files.json_objects import JsonMapping, JsonObject
from runtime.files.paths import user_path

CONFIG_FILE = "config.json"
ARCHITECTURES = (*WITHOUT_EXPERTS, *WITH_EXPERTS)


def read(folder: str | Path) -> tuple[Architecture, JsonObject]:
    """Returns the architecture of a checkpoint, and the keys of our model section that its `config.json` determines.

    ValueError for a missing or damaged file, an unknown architecture, and unsupported settings.
    """
    path = user_path(folder) / CONFIG_FILE
    try:
        values = json_objects.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); it belongs to the weights") from error
    model_type = values.get("model_type")
    architecture = next((x for x in ARCHITECTURES if x.model_type == model_type), None)
    if architecture is None:
        known, missing = ", ".join(x.model_type for x in ARCHITECTURES), MISSING.get(str(model_type))
        why = f", because {missing} are missing here" if missing else ""
        raise ValueError(f"{path}: model_type {model_type!r} is not supported{why}; one of {known} is")
    try:
        section = _section(architecture, values)
        for name, declared in keys_of(MODELS[architecture.kind]).items():
            if name in section:
                declared.check(f"model.{name}", section[name])
        return architecture, section
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]}") from error
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{path}: {error}") from error


def model(folder: str | Path) -> ConfigDict:
    """Returns the model section of a run that starts from a checkpoint of transformers, for config files."""
    architecture, section = read(folder)
    return ConfigDict(defaults(architecture.kind)["model"] | section | {"weights": str(folder)})


def check_same(config: TransformerConfig, folder: str | Path) -> tuple[Architecture, int]:
    """Returns the architecture of a checkpoint and its number of token ids, of which the model may have more.

    ValueError that names the keys in which the model section differs.
    """
    architecture, section = read(folder)
    num_ids: Any = section["vocab_size"]
    differences = _differences(config, architecture, section)
    if config.vocab_size > num_ids:
        differences.pop("vocab_size", None)
    if differences:
        path = user_path(folder) / CONFIG_FILE
        raise ValueError(
            f"the config and {path} are of different models: "
            + ", ".join(f"model.{key}={ours!r}, but {theirs!r} there" for key, (ours, theirs) in differences.items())
        )
    return architecture, num_ids


def architecture_of(config: TransformerConfig) -> Architecture:
    """Returns the architecture equivalent to our model. ValueError if none is."""
    found = [
        (_differences(config, architecture, _section(architecture, config_json(config, architecture))), architecture)
        for architecture in ARCHITECTURES
        if architecture.kind == config.kind
    ]
    unknown = "no architecture that we know of transformers computes this model: "
    if not found:
        raise ValueError(f"{unknown}model.kind={config.kind} is not one of them")
    fewest = min(len(differences) for differences, _ in found)
    nearest = [(differences, architecture) for differences, architecture in found if len(differences) == fewest]
    if not fewest:
        return nearest[0][1]
    needs = (
        f"{architecture.name} needs " + ", ".join(f"model.{key}={theirs!r}" for key, (_, theirs) in differences.items())
        for differences, architecture in nearest
    )
    raise ValueError(unknown + "; ".join(needs))


def config_json(config: TransformerConfig, architecture: Architecture) -> dict[str, object]:
    """Returns the content of `config.json` for a model."""
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "bos_token_id": None,  # the defaults of transformers are ids of other vocabularies
        "eos_token_id": None,
        "pad_token_id": None,
        **architecture.only,
        **{field.theirs: field.of_ours(config) for field in architecture.fields},
    }


def _section(architecture: Architecture, values: JsonMapping) -> dict[str, object]:
    """Returns the keys of our model section. KeyError for a missing key, ValueError for unsupported settings."""
    for name, value in architecture.only.items():
        if values.get(name) not in (None, value):
            raise ValueError(f"{name}={values[name]!r} is not supported; {value!r} is")
    found = {field.ours: field.of_theirs(values) for field in architecture.fields if field.ours}
    return {"kind": architecture.kind, **architecture.always, **architecture.more(values), **found}


def _differences(
    config: TransformerConfig, architecture: Architecture, section: JsonMapping
) -> dict[str, tuple[object, object]]:
    """Returns our value and the value in `config.json` for each key in which they differ."""
    if config.kind != architecture.kind:
        return {"kind": (config.kind, architecture.kind)}
    ours = {key: getattr(config, key) for key in section}
    if section.get("positions") == "rotary":
        ours["max_len"] = section["max_len"]  # no parameter depends on it
    for key in ours.keys() & {"balance_loss", "z_loss", "dropout", "attention_dropout"}:
        ours[key] = section[key]  # losses and dropout are not part of the model
    for key in ("attention_bias", "qkv_bias"):
        if ours.get("use_bias") or (key == "qkv_bias" and ours.get("attention_bias")):
            ours[key] = section.get(key)  # these say it already
    for key, same in (("head_dim", config.hidden / config.num_heads), ("query_scalar", config.head_size)):
        if ours.get(key) == same:
            ours[key] = 0
    ours |= _rotary_alike(ours, section, config.num_layers)
    return {key: (ours[key], theirs) for key, theirs in section.items() if ours[key] != theirs}


def _rotary_alike(ours: JsonMapping, section: JsonMapping, num_layers: int) -> JsonObject:
    """Returns our keys of rotary positions and windows in the words of `section` where these say the same."""
    found = {key: ours[key] for key in ours.keys() & {"global_every", "rotary_local_base", *ROTARY}}
    if found.get("global_every", 0) > num_layers:
        found["global_every"] = 0
        if local := found.get("rotary_local_base"):
            found |= {"rotary_base": local, "rotary_scaling": "none", "rotary_local_base": 0.0}
    scaling = found.get("rotary_scaling")
    if scaling and scaling == section["rotary_scaling"]:
        found |= {key: section[key] for key in ROTARY[UNUSED_FROM[scaling] :]}
    if scaling == "none" and not found["rotary_local_base"] and section["rotary_local_base"] == found["rotary_base"]:
        found["rotary_local_base"] = found["rotary_base"]
    return found
