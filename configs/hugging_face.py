"""`config.json` and tensors of transformers, and the model that computes the same: GPT-2, Llama, BERT and RoBERTa.

`ARCHITECTURES` has the names, in both directions: a further architecture is one more entry. A config file that starts
from such a checkpoint takes its sizes from there: `config.model = hugging_face.model(DIR)`.
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


@dataclass(frozen=True)
class Field:
    """A value of `config.json`: the same as ours, unless a function says otherwise; without a default it is needed."""

    ours: str  # a key of our model section; "" for a value that is only written
    name: str = ""  # theirs, if it is another
    default: Any = None
    read: Callable[[Values], Any] | None = None  # from the whole of config.json
    write: Callable[[Any], Any] | None = None  # from our whole section

    @property
    def theirs(self) -> str:
        """Its name in `config.json`."""
        return self.name or self.ours

    def of_theirs(self, values: Values) -> Any:
        """Returns our value. KeyError if it is missing."""
        if self.read:
            return self.read(values)
        return values[self.theirs] if self.default is None else values.get(self.theirs, self.default)

    def of_ours(self, config: TransformerConfig) -> Any:
        """Returns the value for `config.json`."""
        return self.write(config) if self.write else getattr(config, self.ours)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What transformers calls the parts of a kind of model."""

    model_type: str
    name: str  # of the class of transformers
    kind: str  # of our model
    fields: tuple[Field, ...]
    always: Values  # our keys that have one value in this architecture
    only: Values  # their keys of which we compute this value alone; it is the default of transformers, too
    tensors: Mapping[str, str]  # their module, `{}` for the layer: ours; several of ours are side by side in theirs
    ignored: str  # a regular expression for tensors that transformers does not read for this model either
    conv1d: bool = False  # layers keep `[in, out]`, as ours do; otherwise torch's Linear, `[out, in]`

    @property
    def prefix(self) -> str:
        """The first part of the names of all tensors but the head's; checkpoints of the bare model lack it."""
        return next(iter(self.tensors)).partition(".")[0] + "."


def _activation(theirs: str, default: str) -> Field:
    def read(values: Values) -> str:
        name = values.get(theirs, default)
        if name not in tuple(ACTIVATIONS):  # it may be a list, which no dict can be asked for
            raise ValueError(f"an activation {name!r} is not supported; one of {', '.join(ACTIVATIONS)} is")
        return ACTIVATIONS[name]

    def write(c: Any) -> str:
        return next((name for name, ours in ACTIVATIONS.items() if ours == c.activation), "gelu_new")

    return Field("activation", theirs, read=read, write=write)


def _number(values: Values, name: str, default: Any = None, *, least: int = 1, kind: Any = int) -> Any:
    """Returns a value to compute with, before our own keys are checked; null is as good as absent."""
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise KeyError(name)
    if not isinstance(value, kind) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, not {'an integer' if kind is int else 'a number'} from {least} on")
    return value


def _rotary_base(values: Values) -> float:
    rope: Any = {}
    for name in ("rope_scaling", "rope_parameters"):  # the latter counts
        rope = values.get(name) or rope
        if not isinstance(rope, dict):
            raise ValueError(f"{name} is {rope!r}, not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rotary positions of rope_type {kind!r} are not supported; those of type 'default' are")
    base = _number(values, "rope_theta", 10_000.0, least=0, kind=(int, float))
    return float(_number(rope, "rope_theta", base, least=0, kind=(int, float)))


def _num_kv_heads(values: Values) -> Any:
    num_heads = _number(values, "num_attention_heads")
    head_dim = _number(values, "hidden_size") // num_heads
    if _number(values, "head_dim", head_dim, least=0) != head_dim:
        raise ValueError(f"head_dim={values['head_dim']} is not hidden_size / num_attention_heads={head_dim}")
    return _number(values, "num_key_value_heads", num_heads)


def _use_bias(values: Values) -> Any:
    if values.get("mlp_bias", False) and not values.get("attention_bias", False):
        raise ValueError("mlp_bias without attention_bias is not supported")
    return values.get("mlp_bias", False)


def _offset(values: Values) -> int:
    """Returns the row of RoBERTa's first position, which follows that of padding."""
    return _number(values, "pad_token_id", 1, least=0) + 1


_SIZES = (
    Field("vocab_size"),
    Field("hidden", "hidden_size"),
    Field("intermediate", "intermediate_size"),
    Field("num_layers", "num_hidden_layers"),
    Field("num_heads", "num_attention_heads"),
)
_OF_ENCODERS = (
    *_SIZES,
    Field("norm_eps", "layer_norm_eps"),
    Field("token_types", "type_vocab_size", 2, write=lambda c: max(c.token_types, 1)),
)
_ENCODER = {"position_embedding_type": "absolute", "is_decoder": False, "tie_word_embeddings": True}
_BODY = {  # of BERT and RoBERTa, behind the prefix
    "embeddings.word_embeddings.weight": "embed/token",
    "embeddings.position_embeddings.weight": "embed/position",
    "embeddings.token_type_embeddings.weight": "embed/token_type",
    "embeddings.LayerNorm": "embed/norm",
    "encoder.layer.{}.attention.self.query": "layers/query",
    "encoder.layer.{}.attention.self.key": "layers/key",
    "encoder.layer.{}.attention.self.value": "layers/value",
    "encoder.layer.{}.attention.output.dense": "layers/out",
    "encoder.layer.{}.attention.output.LayerNorm": "layers/attention_norm",
    "encoder.layer.{}.intermediate.dense": "layers/up",
    "encoder.layer.{}.output.dense": "layers/down",
    "encoder.layer.{}.output.LayerNorm": "layers/mlp_norm",
}
ARCHITECTURES = (
    Architecture(
        model_type="gpt2",
        name="GPT2LMHeadModel",
        kind="decoder",
        fields=(
            Field("vocab_size"),
            Field("hidden", "n_embd"),
            Field("num_layers", "n_layer"),
            Field("num_heads", "n_head"),
            Field("max_len", "n_positions"),
            Field("norm_eps", "layer_norm_epsilon"),
            Field("intermediate", "n_inner", read=lambda v: _number(v, "n_inner", 4 * _number(v, "n_embd"))),
            _activation("activation_function", "gelu_new"),
            Field("tied_head", "tie_word_embeddings", True),
            Field("num_kv_heads", "n_head", write=lambda c: c.num_heads),
        ),
        always={"positions": "learned", "norm": "layer", "use_bias": True},
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        tensors={
            "transformer.wte.weight": "embed/token",
            "transformer.wpe.weight": "embed/position",
            "transformer.h.{}.ln_1": "layers/attention_norm",
            "transformer.h.{}.attn.c_attn": "layers/query layers/key layers/value",
            "transformer.h.{}.attn.c_proj": "layers/out",
            "transformer.h.{}.ln_2": "layers/mlp_norm",
            "transformer.h.{}.mlp.c_fc": "layers/up",
            "transformer.h.{}.mlp.c_proj": "layers/down",
            "transformer.ln_f": "head/norm",
            "lm_head": "head",
        },
        ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
        conv1d=True,
    ),
    Architecture(
        model_type="llama",
        name="LlamaForCausalLM",
        kind="decoder",
        fields=(
            *_SIZES,
            Field("norm_eps", "rms_norm_eps"),
            Field("num_kv_heads", "num_key_value_heads", read=_num_kv_heads),
            Field("", "head_dim", write=lambda c: c.head_dim),
            Field("rotary_base", "rope_theta", read=_rotary_base),  # of versions of transformers before 5
            Field("", "rope_parameters", write=lambda c: {"rope_type": "default", "rope_theta": c.rotary_base}),
            Field("attention_bias", default=False, write=lambda c: c.attention_bias or c.use_bias),
            Field("use_bias", "mlp_bias", read=_use_bias),
            Field("max_len", "max_position_embeddings", 2048),
            Field("tied_head", "tie_word_embeddings", default=False),
        ),
        always={"positions": "rotary", "norm": "rms", "activation": "swiglu"},
        only={"hidden_act": "silu"},
        tensors={
            "model.embed_tokens.weight": "embed/token",
            "model.layers.{}.input_layernorm": "layers/attention_norm",
            "model.layers.{}.self_attn.q_proj": "layers/query",
            "model.layers.{}.self_attn.k_proj": "layers/key",
            "model.layers.{}.self_attn.v_proj": "layers/value",
            "model.layers.{}.self_attn.o_proj": "layers/out",
            "model.layers.{}.post_attention_layernorm": "layers/mlp_norm",
            "model.layers.{}.mlp.gate_proj": "layers/gate",
            "model.layers.{}.mlp.up_proj": "layers/up",
            "model.layers.{}.mlp.down_proj": "layers/down",
            "model.norm": "head/norm",
            "lm_head": "head",
        },
        ignored=r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    ),
    Architecture(
        model_type="bert",
        name="BertForMaskedLM",
        kind="encoder",
        fields=(
            *_OF_ENCODERS,
            _activation("hidden_act", "gelu"),
            Field("max_len", "max_position_embeddings"),
        ),
        always={"norm_first": False, "position_offset": 0},
        only=_ENCODER,
        tensors={f"bert.{theirs}": ours for theirs, ours in _BODY.items()}
        | {
            "cls.predictions.transform.dense": "head/transform",
            "cls.predictions.transform.LayerNorm": "head/transform_norm",
            "cls.predictions": "head",
        },
        ignored=r"(bert\.)?(pooler\..*|embeddings\.position_ids)|cls\.(seq_relationship\..*|predictions\.decoder\..*)",
    ),
    Architecture(
        model_type="roberta",
        name="RobertaForMaskedLM",
        kind="encoder",
        fields=(
            *_OF_ENCODERS,
            Field(
                "max_len",
                "max_position_embeddings",
                read=lambda v: _number(v, "max_position_embeddings") - _offset(v),
                write=lambda c: c.max_len + max(c.position_offset, 1),
            ),
            Field("position_offset", "pad_token_id", read=_offset, write=lambda c: max(c.position_offset, 1) - 1),
        ),
        always={"norm_first": False, "activation": "gelu_exact"},
        only=_ENCODER | {"hidden_act": "gelu"},  # the head has exact GELU, whatever hidden_act says
        tensors={f"roberta.{theirs}": ours for theirs, ours in _BODY.items()}
        | {"lm_head.dense": "head/transform", "lm_head.layer_norm": "head/transform_norm", "lm_head": "head"},
        ignored=r"(roberta\.)?(pooler\..*|embeddings\.position_ids)|lm_head\.decoder\..*",
    ),
)


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
        **{field.theirs: field.of_ours(config) for field in architecture.fields},
    }


def _section(architecture: Architecture, values: Values) -> dict[str, Any]:
    """Returns the keys of our model section. KeyError for a missing key, ValueError for what we cannot compute."""
    for name, value in architecture.only.items():
        if values.get(name, value) != value:
            raise ValueError(f"{name}={values[name]!r} is not supported; {value!r} is")
    found = {field.ours: field.of_theirs(values) for field in architecture.fields if field.ours}
    return {"kind": architecture.kind, **architecture.always, **found}


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
