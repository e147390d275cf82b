"""`config.json` of transformers, and the model section that computes the same: GPT-2, Llama, BERT and RoBERTa.

A config file that starts from such a checkpoint takes its sizes from there: `config.model = hugging_face.model(DIR)`.
Imports the standard library only, besides ml_collections.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs.schema import MODELS, TransformerConfig, defaults
from configs.schema.keys import keys_of
from files import json_objects

Values = Mapping[str, Any]
CONFIG_FILE = "config.json"
# names of transformers: ours; the first that is the same as ours is the one that is written
ACTIVATIONS = {"gelu_new": "gelu", "gelu": "gelu_exact", "gelu_pytorch_tanh": "gelu"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How a kind of model is described in `config.json`."""

    model_type: str
    name: str  # of the class of transformers
    kind: str  # of our model
    same: Mapping[str, str]  # our key: theirs, with the same value
    always: Values  # our keys that have one value in this architecture
    only: Values  # their keys of which we compute this value alone; it is the default of transformers, too
    read: Callable[[Values], dict[str, Any]]  # our other keys, from config.json
    write: Callable[[Any], dict[str, Any]]  # the inverse, from our model section


def _activation(name: str) -> str:
    if name not in tuple(ACTIVATIONS):  # it may be a list, which no dict can be asked for
        raise ValueError(f"an activation {name!r} is not supported; one of {', '.join(ACTIVATIONS)} is")
    return ACTIVATIONS[name]


def _activation_name(ours: str) -> str:
    return next((name for name, known in ACTIVATIONS.items() if known == ours), "gelu_new")


def _read_gpt2(values: Values) -> dict[str, Any]:
    return {
        "intermediate": values.get("n_inner") or 4 * values["n_embd"],
        "num_kv_heads": values["n_head"],
        "activation": _activation(values.get("activation_function", "gelu_new")),
        "tied_head": values.get("tie_word_embeddings", True),
    }


def _write_gpt2(c: Any) -> dict[str, Any]:
    return {
        "n_inner": c.intermediate,
        "activation_function": _activation_name(c.activation),
        "tie_word_embeddings": c.tied_head,
    }


def _read_llama(values: Values) -> dict[str, Any]:
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rotary positions of rope_type {kind!r} are not supported; those of type 'default' are")
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    if (values.get("head_dim") or head_dim) != head_dim:
        raise ValueError(f"head_dim={values['head_dim']} is not hidden_size / num_attention_heads={head_dim}")
    if values.get("mlp_bias", False) and not values.get("attention_bias", False):
        raise ValueError("mlp_bias without attention_bias is not supported")
    return {
        "num_kv_heads": values.get("num_key_value_heads") or values["num_attention_heads"],
        "rotary_base": float(rope.get("rope_theta", values.get("rope_theta", 10_000.0))),
        "use_bias": values.get("mlp_bias", False),
        "attention_bias": values.get("attention_bias", False),
        "tied_head": values.get("tie_word_embeddings", False),
        "max_len": values.get("max_position_embeddings", 2048),
    }


def _write_llama(c: Any) -> dict[str, Any]:
    return {
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.rotary_base,  # read by versions of transformers before 5
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
        "attention_bias": c.attention_bias or c.use_bias,
        "mlp_bias": c.use_bias,
        "max_position_embeddings": c.max_len,
        "tie_word_embeddings": c.tied_head,
    }


def _write_bert(c: Any) -> dict[str, Any]:
    return {
        "hidden_act": _activation_name(c.activation),
        "max_position_embeddings": c.max_len,
        "type_vocab_size": max(c.token_types, 1),
    }


def _read_bert(values: Values) -> dict[str, Any]:
    return {
        "activation": _activation(values.get("hidden_act", "gelu")),
        "max_len": values["max_position_embeddings"],
        "token_types": values.get("type_vocab_size", 2),
    }


def _read_roberta(values: Values) -> dict[str, Any]:
    offset = values.get("pad_token_id", 1) + 1  # the first token's position follows that of padding
    return {
        "max_len": values["max_position_embeddings"] - offset,
        "position_offset": offset,
        "token_types": values.get("type_vocab_size", 2),
    }


def _write_roberta(c: Any) -> dict[str, Any]:
    offset = max(c.position_offset, 1)
    return {
        "max_position_embeddings": c.max_len + offset,
        "pad_token_id": offset - 1,
        "type_vocab_size": max(c.token_types, 1),
    }


_SIZES = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_ENCODER = {"position_embedding_type": "absolute", "is_decoder": False, "tie_word_embeddings": True}
ARCHITECTURES = (
    Architecture(
        model_type="gpt2",
        name="GPT2LMHeadModel",
        kind="decoder",
        same={
            "vocab_size": "vocab_size",
            "hidden": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "max_len": "n_positions",
            "norm_eps": "layer_norm_epsilon",
        },
        always={"positions": "learned", "norm": "layer", "use_bias": True},
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        read=_read_gpt2,
        write=_write_gpt2,
    ),
    Architecture(
        model_type="llama",
        name="LlamaForCausalLM",
        kind="decoder",
        same=_SIZES | {"norm_eps": "rms_norm_eps"},
        always={"positions": "rotary", "norm": "rms", "activation": "swiglu"},
        only={"hidden_act": "silu"},
        read=_read_llama,
        write=_write_llama,
    ),
    Architecture(
        model_type="bert",
        name="BertForMaskedLM",
        kind="encoder",
        same=_SIZES | {"norm_eps": "layer_norm_eps"},
        always={"norm_first": False, "position_offset": 0},
        only=_ENCODER,
        read=_read_bert,
        write=_write_bert,
    ),
    Architecture(
        model_type="roberta",
        name="RobertaForMaskedLM",
        kind="encoder",
        same=_SIZES | {"norm_eps": "layer_norm_eps"},
        always={"norm_first": False, "activation": "gelu_exact"},
        only=_ENCODER | {"hidden_act": "gelu"},  # the head has exact GELU, whatever hidden_act says
        read=_read_roberta,
        write=_write_roberta,
    ),
)


# the types of what is computed with before our own keys are checked; null is as good as absent
_TYPES: dict[str, tuple[type | tuple[type, ...], float, str]] = {
    "n_embd n_head n_inner hidden_size num_attention_heads num_key_value_heads head_dim max_position_embeddings": (
        int,
        1,
        "a positive integer",
    ),
    "pad_token_id": (int, 0, "an integer that is not negative"),
    "rope_theta": ((int, float), 0, "a number that is not negative"),
}


def _check_types(values: Values) -> None:
    """Raises ValueError for a value of another type than we compute with."""
    rope = {name: values.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    for name, found in rope.items():
        if not isinstance(found, dict):
            raise ValueError(f"{name} is {found!r}, not an object")
    for names, (kind, least, what) in _TYPES.items():
        for name in names.split():
            for value in (part.get(name) for part in (values, *rope.values())):
                if value is not None and (not isinstance(value, kind) or isinstance(value, bool) or value < least):
                    raise ValueError(f"{name} is {value!r}, not {what}")


def read(folder: str | Path) -> tuple[Architecture, dict[str, Any]]:
    """Returns the architecture of a checkpoint, and the keys of our model section that its `config.json` determines.

    ValueError for a missing or damaged file, an unknown architecture, and what we cannot compute.
    """
    path = Path(folder).expanduser() / CONFIG_FILE
    try:
        values = json_objects.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); it belongs to the weights") from error
    model_type = values.get("model_type")
    architecture = next((x for x in ARCHITECTURES if x.model_type == model_type), None)
    if architecture is None:
        known = ", ".join(x.model_type for x in ARCHITECTURES)
        raise ValueError(f"{path}: model_type {model_type!r} is not supported; one of {known} is")
    try:
        _check_types(values)
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


def check_same(config: TransformerConfig, folder: str | Path) -> Architecture:
    """Returns the architecture of a checkpoint. ValueError that names the keys in which the model section differs."""
    architecture, section = read(folder)
    differences = _differences(config, architecture, section)
    if differences:
        path = Path(folder) / CONFIG_FILE
        raise ValueError(
            f"the config and {path} are of different models: "
            + ", ".join(f"model.{key}={ours!r}, but {theirs!r} there" for key, (ours, theirs) in differences.items())
        )
    return architecture


def architecture_of(config: TransformerConfig) -> Architecture:
    """Returns the architecture that computes what our model does. ValueError if there is none."""
    objections = []
    for architecture in ARCHITECTURES:
        if architecture.kind != config.kind:
            continue
        differences = _differences(config, architecture, _section(architecture, config_json(config, architecture)))
        if not differences:
            return architecture
        needs = ", ".join(f"model.{key}={theirs!r}" for key, (_, theirs) in differences.items())
        objections.append(f"{architecture.name} needs {needs}")
    why = "; ".join(objections) or f"model.kind={config.kind} is not one of them"
    raise ValueError(f"no architecture that we know of transformers computes this model: {why}")


def config_json(config: TransformerConfig, architecture: Architecture) -> dict[str, Any]:
    """Returns the content of `config.json` for a model."""
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "dtype": "float32",
        "bos_token_id": None,  # the defaults of transformers are ids of other vocabularies
        "eos_token_id": None,
        "pad_token_id": None,
        **architecture.only,
        **{theirs: getattr(config, ours) for ours, theirs in architecture.same.items()},
        **architecture.write(config),
    }


def _section(architecture: Architecture, values: Values) -> dict[str, Any]:
    """Returns the keys of our model section. KeyError for a missing key, ValueError for what we cannot compute."""
    for name, value in architecture.only.items():
        if values.get(name, value) != value:
            raise ValueError(f"{name}={values[name]!r} is not supported; {value!r} is")
    same = {ours: values[theirs] for ours, theirs in architecture.same.items()}
    return {"kind": architecture.kind, **architecture.always, **same, **architecture.read(values)}


def _differences(config: TransformerConfig, architecture: Architecture, section: Values) -> dict[str, tuple[Any, Any]]:
    """Returns our value and that of `config.json` for each key in which they differ."""
    if config.kind != architecture.kind:
        return {"kind": (config.kind, architecture.kind)}
    ours = {key: getattr(config, key) for key in section}
    if section.get("positions") == "rotary":
        ours["max_len"] = section["max_len"]  # no parameter depends on it
    if ours.get("use_bias") and section["use_bias"] and "attention_bias" in ours:
        ours["attention_bias"] = True  # use_bias says it already
    return {key: (ours[key], theirs) for key, theirs in section.items() if ours[key] != theirs}
