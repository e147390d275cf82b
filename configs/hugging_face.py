"""`config.json` and tensors of transformers, and the model that computes the same.

GPT-2, Llama (up to 3.x), Mistral and Mixtral, Qwen 2 (2.5) and 3 (with experts, too), Gemma 2 and 3 (text), BERT and
RoBERTa: `ARCHITECTURES` has the names, in both directions; a new architecture is a new entry. A config file that starts
from such a checkpoint takes its sizes from there: `config.model = hugging_face.model(DIR)`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs.hugging_face_fields import (
    PLAIN,
    ROTARY,
    UNUSED_FROM,
    Field,
    activation_field,
    cap_field,
    gemma3_rope_json,
    head_dim_field,
    layer_types,
    local_base,
    number,
    position_offset,
    query_scalar,
    read_gemma3,
    read_mistral,
    read_rope,
    read_windows,
    rope_json,
    scaling_json,
    use_bias,
)
from configs.schema import MODELS, TransformerConfig, defaults
from configs.schema.keys import keys_of
from runtime.files import json_objects
from runtime.files.json_objects import JsonMapping, JsonObject
from runtime.files.paths import user_path

CONFIG_FILE = "config.json"


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
_NOT_ROTARY = {name: value for name, value in PLAIN.items() if not name.startswith("rotary")}
_RMS = {"positions": "rotary", "norm": "rms", "activation": "swiglu"}
_OF_LLAMA = (
    *_SIZES,
    Field("norm_eps", "rms_norm_eps"),
    Field("num_kv_heads", "num_key_value_heads"),
    Field("max_len", "max_position_embeddings"),
    Field("", "rope_theta", write=lambda c: c.rotary_base),  # this and the next: of versions of transformers before 5
    Field("", "rope_scaling", write=scaling_json),
    Field("", "rope_parameters", write=rope_json),
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
            read=lambda v: number(v, "num_key_value_heads", number(v, "num_attention_heads")),
        ),
        head_dim_field(),
        Field("attention_bias", default=False, write=lambda c: c.attention_bias or c.use_bias),
        Field("use_bias", "mlp_bias", read=use_bias),
        Field("max_len", "max_position_embeddings", 2048),
        _UNTIED,
    ),
    always=PLAIN | _RMS,
    only={"hidden_act": "silu"},
    more=read_rope,
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
        head_dim_field(256),
        Field("attention_bias", default=False),
        Field(
            "query_scalar", "query_pre_attn_scalar", read=query_scalar, write=lambda c: c.query_scalar or c.head_size
        ),
        Field("", "sliding_window", write=lambda c: c.window or 4096),  # it makes a mask even if no layer has one
        Field("", "layer_types", write=layer_types),
        Field("tied_head", "tie_word_embeddings", default=True),
        cap_field("logit_cap", "final_logit_softcapping", 30.0),
        cap_field("attention_cap", "attn_logit_softcapping", 50.0),
    ),
    always=PLAIN | _RMS | {"norm": "rms_1p", "activation": "geglu", "post_norm": True, "scale_embedding": True},
    only={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    more=lambda values: {**read_rope(values), **read_windows(values, every=2)},
    tensors=_LLAMA.tensors
    | {
        "model.layers.{}.post_attention_layernorm": "layers/attention_post_norm",
        "model.layers.{}.pre_feedforward_layernorm": "layers/mlp_norm",
        "model.layers.{}.post_feedforward_layernorm": "layers/mlp_post_norm",
    },
)


def _with_experts(router: str, experts: str, matrices: tuple[str, str, str]) -> dict[str, str]:
    """Returns the tensors of a Llama with experts, by the names of its router, experts and matrices in a layer."""
    others = {
        theirs: ours.replace("layers/", "layers/sparse/")
        for theirs, ours in _LLAMA.tensors.items()
        if ".mlp." not in theirs
    }
    ours = {name: f"layers/sparse/experts/{part}" for name, part in zip(matrices, ("gate", "up", "down"), strict=True)}
    found = {f"model.layers.{{}}.{experts}.{{}}.{name}.weight": part for name, part in ours.items()}
    return others | {f"model.layers.{{}}.{router}.weight": "layers/sparse/router"} | found


_OF_EXPERTS = (
    Field("experts_per_token", "num_experts_per_tok"),
    Field("balance_loss", "router_aux_loss_coef", default=0.001),
)
_MIXTRAL = replace(
    _LLAMA,
    model_type="mixtral",
    name="MixtralForCausalLM",
    kind="moe",
    fields=(
        *_OF_LLAMA,
        *_OF_EXPERTS,
        Field("num_experts", "num_local_experts"),
        head_dim_field(),
        Field("", "sliding_window", write=lambda c: c.window or None),
        _UNTIED,
    ),
    always=PLAIN | _RMS | {"capacity_factor": 0.0, "moe_every": 1, "normalise_gates": True, "z_loss": 0.0},
    only=_LLAMA.only | {"router_jitter_noise": 0.0},
    more=lambda v: read_mistral({"sliding_window": None, "rope_theta": 1e6, **v}),
    tensors=_with_experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
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
            Field("intermediate", "n_inner", read=lambda v: number(v, "n_inner", 4 * number(v, "n_embd"))),
            activation_field("activation_function", "gelu_new"),
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
        fields=(*_OF_LLAMA, head_dim_field(), Field("", "sliding_window", write=lambda c: c.window or None), _UNTIED),
        more=read_mistral,
    ),
    replace(
        _LLAMA,
        model_type="qwen2",
        name="Qwen2ForCausalLM",
        fields=(*_OF_LLAMA, head_dim_field(), _UNTIED),
        always=_LLAMA.always | {"qkv_bias": True},
        only=_LLAMA.only | {"use_sliding_window": False},
    ),
    replace(
        _LLAMA,
        model_type="qwen3",
        name="Qwen3ForCausalLM",
        fields=(*_OF_LLAMA, head_dim_field(128), Field("attention_bias", default=False), _UNTIED),
        always=_LLAMA.always | {"qk_norm": True},
        only=_LLAMA.only | {"use_sliding_window": False},
    ),
    _MIXTRAL,
    replace(
        _MIXTRAL,
        model_type="qwen3_moe",
        name="Qwen3MoeForCausalLM",
        fields=(
            *(field for field in _OF_LLAMA if field.ours != "intermediate"),
            *_OF_EXPERTS,
            Field("intermediate", "moe_intermediate_size"),
            Field("num_experts", read=lambda v: number(v, "num_experts", v.get("num_local_experts"))),
            Field("", "num_local_experts", write=lambda c: c.num_experts),  # of transformers 5
            Field("normalise_gates", "norm_topk_prob", default=False),
            head_dim_field(),
            Field("attention_bias", default=False),
            _UNTIED,
        ),
        always=_MIXTRAL.always | {"qk_norm": True},
        only=_LLAMA.only | {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        more=read_rope,
        tensors=_with_experts("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    ),
    _GEMMA2,
    replace(
        _GEMMA2,
        model_type="gemma3_text",
        name="Gemma3ForCausalLM",
        fields=(
            *(field for field in _GEMMA2.fields if field.ours not in ("attention_cap", "logit_cap")),
            cap_field("logit_cap", "final_logit_softcapping", 0.0),
            Field("", "rope_local_base_freq", write=local_base),
            Field("", "rope_parameters", write=gemma3_rope_json),
        ),
        always=_GEMMA2.always | {"qk_norm": True},
        more=read_gemma3,
    ),
    Architecture(
        model_type="bert",
        name="BertForMaskedLM",
        kind="encoder",
        fields=(
            *_OF_ENCODERS,
            activation_field("hidden_act", "gelu"),
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
                read=lambda v: number(v, "max_position_embeddings") - position_offset(v),
                write=lambda c: c.max_len + max(c.position_offset, 1),
            ),
            Field(
                "position_offset", "pad_token_id", read=position_offset, write=lambda c: max(c.position_offset, 1) - 1
            ),
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
    for key in ours.keys() & {"balance_loss", "z_loss"}:
        ours[key] = section[key]  # losses are not part of the model
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
