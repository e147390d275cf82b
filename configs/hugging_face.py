"""`config.json` and tensors of transformers, and the model that computes the same.

GPT-2, Llama (up to 3.x), Mistral, Qwen 2 (2.5) and 3, Gemma 2 and 3 (text), BERT and RoBERTa: `ARCHITECTURES` has the
names, in both directions; a new architecture is a new entry. A config file that starts from such a checkpoint
takes its sizes from there: `config.model = hugging_face.model(DIR)`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs.schema import MODELS, DecoderConfig, TransformerConfig, defaults
from configs.schema.keys import keys_of
from runtime.files import json_objects
from runtime.files.json_objects import JsonMapping, JsonObject
from runtime.files.paths import user_path

CONFIG_FILE = "config.json"
# transformers' name: our name; the first name with our value is written
ACTIVATIONS = {"gelu_new": "gelu", "gelu": "gelu_exact", "gelu_pytorch_tanh": "gelu"}


@dataclass(frozen=True)
class Field:
    """A value of `config.json`: equal to ours, unless a function converts it; without a default it is required."""

    ours: str  # a key of our model section; "" for a value that is only written
    name: str = ""  # transformers' key, if it differs
    default: Any = None
    read: Callable[[JsonMapping], Any] | None = None  # from the whole of config.json
    write: Callable[[TransformerConfig], object] | None = None  # from our whole section

    @property
    def theirs(self) -> str:
        """Its name in `config.json`."""
        return self.name or self.ours

    def of_theirs(self, values: JsonMapping) -> Any:
        """Returns our value. KeyError if it is missing."""
        if self.read:
            return self.read(values)
        return values[self.theirs] if self.default is None else values.get(self.theirs, self.default)

    def of_ours(self, config: TransformerConfig) -> Any:
        """Returns the value for `config.json`."""
        return self.write(config) if self.write else getattr(config, self.ours)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The names that transformers uses for the parts of a kind of model."""

    model_type: str
    name: str  # class in transformers
    kind: str  # of our model
    fields: tuple[Field, ...]
    always: JsonObject  # our keys that have one value in this architecture
    only: JsonObject  # transformers' keys with the only value that we support, which is also transformers' default
    # transformers' module (`{}` is the layer): ours; several of our modules may be concatenated in one of theirs
    tensors: dict[str, str]
    ignored: str  # a regular expression for tensors that transformers does not read for this model
    more: Callable[[JsonMapping], JsonMapping] = (
        lambda values: {}
    )  # our keys that are read together, from the whole config.json
    conv1d: bool = False  # layers keep `[in, out]`, as ours do; otherwise torch's Linear, `[out, in]`

    @property
    def prefix(self) -> str:
        """The first part of the names of all tensors except the head's; checkpoints of the bare model lack it."""
        return next(iter(self.tensors)).partition(".")[0] + "."


def _activation(theirs: str, default: str) -> Field:
    def read(values: JsonMapping) -> str:
        name = values.get(theirs, default)
        if name not in tuple(ACTIVATIONS):  # it may be a list, which is not hashable
            raise ValueError(f"an activation {name!r} is not supported; one of {', '.join(ACTIVATIONS)} is")
        return ACTIVATIONS[name]

    def write(c: TransformerConfig) -> str:
        return next((name for name, ours in ACTIVATIONS.items() if ours == c.activation), "gelu_new")

    return Field("activation", theirs, read=read, write=write)


def _number(values: JsonMapping, name: str, default: Any = None, *, least: int = 1, kind: Any = int) -> Any:
    """Returns a value to compute with, before our own keys are checked; null counts as absent."""
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise KeyError(name)
    if not isinstance(value, kind) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, not {'an integer' if kind is int else 'a number'} from {least} on")
    return value


def _real(values: JsonMapping, name: str, default: float | None = None) -> float:
    return float(_number(values, name, default, least=0, kind=(int, float)))


def _object(values: JsonMapping, name: str) -> JsonMapping:
    """Returns an object of `config.json`; null and absent ones are empty."""
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {found!r}, not an object")
    return found


def _rope(values: JsonMapping) -> JsonMapping:
    """Returns our keys of rotary positions, equal for all layers; as in transformers the older object wins."""
    return _rotary(values, _object(values, "rope_scaling") or _object(values, "rope_parameters"))


def _rotary(values: JsonMapping, rope: JsonMapping, base: float = 10_000.0) -> dict[str, object]:
    """Returns our keys of rotary positions, from transformers' `rope` object and, for missing keys, `config.json`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rotary positions of rope_type {kind!r} are not supported; default, linear and llama3 are")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']} is not supported; 1 is")
    found: JsonObject = {name: PLAIN[name] for name in ROTARY}
    found["rotary_base"] = _real(rope, "rope_theta", _real(values, "rope_theta", base))
    if kind != "default":
        found |= {"rotary_scaling": kind, "rotary_factor": _real(rope, "factor")}
    if kind == "llama3":
        found |= {"rotary_low": _real(rope, "low_freq_factor"), "rotary_high": _real(rope, "high_freq_factor")}
        length = "original_max_position_embeddings"
        found["rotary_original_len"] = _number(rope, length, values.get("max_position_embeddings"))
    return found


def _scaling_json(c: TransformerConfig) -> dict[str, object] | None:
    """Returns `rope_scaling`, which versions of transformers before 5 read."""
    if c.rotary_scaling == "none":
        return None
    found = {"rope_type": c.rotary_scaling, "factor": c.rotary_factor}
    if c.rotary_scaling == "llama3":
        found |= {"low_freq_factor": c.rotary_low, "high_freq_factor": c.rotary_high}
        found["original_max_position_embeddings"] = c.rotary_original_len
    return found


def _rope_json(c: TransformerConfig) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": c.rotary_base} | (_scaling_json(c) or {})


def _gemma3_rope(values: JsonMapping) -> JsonMapping:
    """Returns our keys of rotary positions, of layers with a window and others."""
    rope = _object(values, "rope_parameters")
    full = {**_object(rope, FULL), **_object(values, "rope_scaling")}
    local = _rotary({}, _object(rope, SLIDING), _real(values, "rope_local_base_freq", 10_000.0))
    if local["rotary_scaling"] != "none":
        raise ValueError(f"{SLIDING} of rope_type {local['rotary_scaling']!r} is not supported; default is")
    return _rotary(values, full, 1e6) | {"rotary_local_base": local["rotary_base"]}


def _gemma3(values: JsonMapping) -> JsonMapping:
    """Returns our keys of rotary positions and windows; layers with a window have a separate base.

    If all layers are alike, they share one base.
    """
    rope, windows = _gemma3_rope(values), _windows(values, _number(values, "sliding_window_pattern", 6))
    if windows["window"] and not windows["global_every"]:
        rope = {name: PLAIN[name] for name in ROTARY} | {"rotary_base": rope["rotary_local_base"]}
    return {**rope, **windows} | ({} if windows["global_every"] else {"rotary_local_base": 0.0})


def _local_base(c: TransformerConfig) -> float:
    return c.rotary_local_base or c.rotary_base


def _gemma3_rope_json(c: TransformerConfig) -> dict[str, object]:
    return {FULL: _rope_json(c), SLIDING: {"rope_type": "default", "rope_theta": _local_base(c)}}


def _windows(values: JsonMapping, every: int = 0) -> JsonMapping:
    """Returns our keys of windows; every `every`-th layer has none, unless `layer_types` differs."""
    window, count = values.get("sliding_window", 4096), _number(values, "num_hidden_layers")
    is_global = [every > 0 and i % every == 0 for i in range(1, count + 1)]
    if types := values.get("layer_types"):
        if not isinstance(types, list) or any(kind not in (FULL, SLIDING) for kind in types):
            raise ValueError(f"layer_types is {types!r}, not a list of {FULL} and {SLIDING}")
        is_global = [kind == FULL for kind in types]
    if all(is_global) or (window is None and not every):
        return {"window": 0, "global_every": 0}
    if window is None:  # which transformers does not compute either
        raise KeyError("sliding_window")
    every = is_global.index(True) + 1 if True in is_global else 0
    if is_global != [every > 0 and i % every == 0 for i in range(1, count + 1)]:
        raise ValueError(f"layer_types is not supported in which {FULL} is not in each layer of a multiple of a number")
    return {"window": window, "global_every": every}


def _mistral(values: JsonMapping) -> JsonMapping:
    """Returns our keys of rotary positions and windows, which all layers have: transformers ignores `layer_types`."""
    windows = _windows({**values, "layer_types": None})
    if values.get("layer_types") and _windows(values) != windows:
        raise ValueError("layer_types is not supported with another sliding_window: all layers of mistral have it")
    return {**_rope(values), **windows}


def _layer_types(c: TransformerConfig) -> list[str]:
    is_global = [not c.window or (c.global_every and i % c.global_every == 0) for i in range(1, c.num_layers + 1)]
    return [FULL if it_is else SLIDING for it_is in is_global]


def _head_dim(default: int = 0) -> Field:
    """Returns the field of the size of a head; our 0 is hidden / heads, as in transformers without a `default`."""

    def read(values: JsonMapping) -> int:
        num_heads, hidden = _number(values, "num_attention_heads"), _number(values, "hidden_size")
        size = _number(values, "head_dim", default or hidden // num_heads)
        return 0 if size == hidden // num_heads else size

    return Field("head_dim", read=read, write=lambda c: c.head_size)


def _query_scalar(values: JsonMapping) -> int:
    scalar = _number(values, "query_pre_attn_scalar", 256)
    return 0 if scalar == _number(values, "head_dim", 256) else scalar


def _cap(ours: str, theirs: str, default: float) -> Field:
    def read(values: JsonMapping) -> float:
        return 0.0 if values.get(theirs, default) is None else _real(values, theirs, default)

    return Field(ours, theirs, read=read, write=lambda c: getattr(c, ours) or None)


def _use_bias(values: JsonMapping) -> object:
    if values.get("mlp_bias", False) and not values.get("attention_bias", False):
        raise ValueError("mlp_bias without attention_bias is not supported")
    return values.get("mlp_bias", False)


def _offset(values: JsonMapping) -> int:
    """Returns the row of RoBERTa's first position, which follows the row of padding."""
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
_BODY = {  # BERT and RoBERTa, after the prefix
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
FULL, SLIDING = "full_attention", "sliding_attention"
ROTARY = ("rotary_base", "rotary_scaling", "rotary_factor", "rotary_low", "rotary_high", "rotary_original_len")
UNUSED_FROM = {"none": 2, "linear": 3, "llama3": 6}  # by rotary_scaling: the first of ROTARY that has no effect
# a decoder without anything that only some architectures have
PLAIN = {
    name: declared.default
    for name, declared in keys_of(DecoderConfig).items()
    if name in ("head_dim", "window", "global_every", "qk_norm", "query_scalar", "attention_cap", "logit_cap")
    or name in ("post_norm", "scale_embedding", "qkv_bias", "attention_bias", "use_bias", "rotary_local_base", *ROTARY)
}
_NOT_ROTARY = {name: value for name, value in PLAIN.items() if not name.startswith("rotary")}
_RMS = {"positions": "rotary", "norm": "rms", "activation": "swiglu"}
_OF_LLAMA = (
    *_SIZES,
    Field("norm_eps", "rms_norm_eps"),
    Field("num_kv_heads", "num_key_value_heads"),
    Field("max_len", "max_position_embeddings"),
    Field("", "rope_theta", write=lambda c: c.rotary_base),  # this and the next: of versions of transformers before 5
    Field("", "rope_scaling", write=_scaling_json),
    Field("", "rope_parameters", write=_rope_json),
)
_UNTIED = Field("tied_head", "tie_word_embeddings", default=False)
_LLAMA = Architecture(
    model_type="llama",
    name="LlamaForCausalLM",
    kind="decoder",
    fields=(
        *(field for field in _OF_LLAMA if field.ours not in ("num_kv_heads", "max_len")),
        Field(
            "num_kv_heads",
            "num_key_value_heads",
            read=lambda v: _number(v, "num_key_value_heads", _number(v, "num_attention_heads")),
        ),
        _head_dim(),
        Field("attention_bias", default=False, write=lambda c: c.attention_bias or c.use_bias),
        Field("use_bias", "mlp_bias", read=_use_bias),
        Field("max_len", "max_position_embeddings", 2048),
        _UNTIED,
    ),
    always=PLAIN | _RMS,
    only={"hidden_act": "silu"},
    more=_rope,
    tensors={
        "model.embed_tokens.weight": "embed/token",
        "model.layers.{}.input_layernorm": "layers/attention_norm",
        "model.layers.{}.self_attn.q_proj": "layers/query",
        "model.layers.{}.self_attn.k_proj": "layers/key",
        "model.layers.{}.self_attn.v_proj": "layers/value",
        "model.layers.{}.self_attn.q_norm": "layers/query_norm",
        "model.layers.{}.self_attn.k_norm": "layers/key_norm",
        "model.layers.{}.self_attn.o_proj": "layers/out",
        "model.layers.{}.post_attention_layernorm": "layers/mlp_norm",
        "model.layers.{}.mlp.gate_proj": "layers/gate",
        "model.layers.{}.mlp.up_proj": "layers/up",
        "model.layers.{}.mlp.down_proj": "layers/down",
        "model.norm": "head/norm",
        "lm_head": "head",
    },
    ignored=r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
_GEMMA2 = replace(
    _LLAMA,
    model_type="gemma2",
    name="Gemma2ForCausalLM",
    fields=(
        *_OF_LLAMA,
        _head_dim(256),
        Field("attention_bias", default=False),
        Field(
            "query_scalar", "query_pre_attn_scalar", read=_query_scalar, write=lambda c: c.query_scalar or c.head_size
        ),
        Field("", "sliding_window", write=lambda c: c.window or 4096),  # it makes a mask even if no layer has one
        Field("", "layer_types", write=_layer_types),
        Field("tied_head", "tie_word_embeddings", default=True),
        _cap("logit_cap", "final_logit_softcapping", 30.0),
        _cap("attention_cap", "attn_logit_softcapping", 50.0),
    ),
    always=PLAIN | _RMS | {"norm": "rms_1p", "activation": "geglu", "post_norm": True, "scale_embedding": True},
    only={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    more=lambda values: {**_rope(values), **_windows(values, every=2)},
    tensors=_LLAMA.tensors
    | {
        "model.layers.{}.post_attention_layernorm": "layers/attention_post_norm",
        "model.layers.{}.pre_feedforward_layernorm": "layers/mlp_norm",
        "model.layers.{}.post_feedforward_layernorm": "layers/mlp_post_norm",
    },
)
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
        always=_NOT_ROTARY | {"positions": "learned", "norm": "layer", "use_bias": True},
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
    _LLAMA,
    replace(
        _LLAMA,
        model_type="mistral",
        name="MistralForCausalLM",
        fields=(*_OF_LLAMA, _head_dim(), Field("", "sliding_window", write=lambda c: c.window or None), _UNTIED),
        more=_mistral,
    ),
    replace(
        _LLAMA,
        model_type="qwen2",
        name="Qwen2ForCausalLM",
        fields=(*_OF_LLAMA, _head_dim(), _UNTIED),
        always=_LLAMA.always | {"qkv_bias": True},
        only=_LLAMA.only | {"use_sliding_window": False},
    ),
    replace(
        _LLAMA,
        model_type="qwen3",
        name="Qwen3ForCausalLM",
        fields=(*_OF_LLAMA, _head_dim(128), Field("attention_bias", default=False), _UNTIED),
        always=_LLAMA.always | {"qk_norm": True},
        only=_LLAMA.only | {"use_sliding_window": False},
    ),
    _GEMMA2,
    replace(
        _GEMMA2,
        model_type="gemma3_text",
        name="Gemma3ForCausalLM",
        fields=(
            *(field for field in _GEMMA2.fields if field.ours not in ("attention_cap", "logit_cap")),
            _cap("logit_cap", "final_logit_softcapping", 0.0),
            Field("", "rope_local_base_freq", write=_local_base),
            Field("", "rope_parameters", write=_gemma3_rope_json),
        ),
        always=_GEMMA2.always | {"qk_norm": True},
        more=_gemma3,
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
        only=_ENCODER | {"hidden_act": "gelu"},  # the head has exact GELU for any hidden_act
        tensors={f"roberta.{theirs}": ours for theirs, ours in _BODY.items()}
        | {"lm_head.dense": "head/transform", "lm_head.layer_norm": "head/transform_norm", "lm_head": "head"},
        ignored=r"(roberta\.)?(pooler\..*|embeddings\.position_ids)|lm_head\.decoder\..*",
    ),
)


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
        path = user_path(folder) / CONFIG_FILE
        raise ValueError(
            f"the config and {path} are of different models: "
            + ", ".join(f"model.{key}={ours!r}, but {theirs!r} there" for key, (ours, theirs) in differences.items())
        )
    return architecture


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
