"""transformers' architectures without experts, and the model of each that computes the same.

An `Architecture` has the names of transformers, in both directions. A new architecture is a new entry of a table. This
file has GPT-2, Llama and its relatives, BERT and RoBERTa; configs/hugging_face_experts.py has models with experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from configs.hugging_face_fields import (
    PLAIN,
    Field,
    activation_field,
    cap_field,
    dropout_field,
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
from runtime.files.json_objects import JsonMapping, JsonObject


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
    interleaved: bool = False  # columns of our modules alternate in their tensor; otherwise modules follow each other
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
    dropout_field("dropout", "hidden_dropout_prob", 0.1),
    dropout_field("attention_dropout", "attention_probs_dropout_prob", 0.1),
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
RMS = {"positions": "rotary", "norm": "rms", "activation": "swiglu"}
OF_LLAMA = (
    *_SIZES,
    Field("norm_eps", "rms_norm_eps"),
    Field("num_kv_heads", "num_key_value_heads"),
    Field("max_len", "max_position_embeddings"),
    dropout_field("attention_dropout", "attention_dropout"),
    Field("", "rope_theta", write=lambda c: c.rotary_base),  # this and the next: of versions of transformers before 5
    Field("", "rope_scaling", write=scaling_json),
    Field("", "rope_parameters", write=rope_json),
)
UNTIED = Field("tied_head", "tie_word_embeddings", default=False)
LLAMA = Architecture(
    model_type="llama",
    name="LlamaForCausalLM",
    kind="decoder",
    fields=(
        *(field for field in OF_LLAMA if field.ours not in ("num_kv_heads", "max_len")),
        Field(
            "num_kv_heads",
            "num_key_value_heads",
            read=lambda v: number(v, "num_key_value_heads", number(v, "num_attention_heads")),
        ),
        head_dim_field(),
        Field("attention_bias", default=False, write=lambda c: c.attention_bias or c.use_bias),
        Field("use_bias", "mlp_bias", read=use_bias),
        Field("max_len", "max_position_embeddings", 2048),
        UNTIED,
    ),
    always=PLAIN | RMS,
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
    LLAMA,
    model_type="gemma2",
    name="Gemma2ForCausalLM",
    fields=(
        *OF_LLAMA,
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
    always=PLAIN | RMS | {"norm": "rms_1p", "activation": "geglu", "post_norm": True, "scale_embedding": True},
    only={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    more=lambda values: {**read_rope(values), **read_windows(values, every=2)},
    tensors=LLAMA.tensors
    | {
        "model.layers.{}.post_attention_layernorm": "layers/attention_post_norm",
        "model.layers.{}.pre_feedforward_layernorm": "layers/mlp_norm",
        "model.layers.{}.post_feedforward_layernorm": "layers/mlp_post_norm",
    },
)
WITHOUT_EXPERTS = (
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
            dropout_field("dropout", "resid_pdrop", 0.1),
            dropout_field("attention_dropout", "attn_pdrop", 0.1),
            Field("", "embd_pdrop", write=lambda c: c.dropout),
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
    LLAMA,
    replace(
        LLAMA,
        model_type="mistral",
        name="MistralForCausalLM",
        fields=(*OF_LLAMA, head_dim_field(), Field("", "sliding_window", write=lambda c: c.window or None), UNTIED),
        more=read_mistral,
    ),
    replace(
        LLAMA,
        model_type="qwen2",
        name="Qwen2ForCausalLM",
        fields=(*OF_LLAMA, head_dim_field(), UNTIED),
        always=LLAMA.always | {"qkv_bias": True},
        only=LLAMA.only | {"use_sliding_window": False},
    ),
    replace(
        LLAMA,
        model_type="qwen3",
        name="Qwen3ForCausalLM",
        fields=(*OF_LLAMA, head_dim_field(128), Field("attention_bias", default=False), UNTIED),
        always=LLAMA.always | {"qk_norm": True},
        only=LLAMA.only | {"use_sliding_window": False},
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
