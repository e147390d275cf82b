"""transformers' architectures with experts: Mixtral, Qwen 2 and 3 with experts, OLMoE, and gpt-oss.

Each layer has experts, which take all tokens that choose them. Tensors are named by layer and expert; gpt-oss has all
experts of a layer in one tensor.
"""

from dataclasses import replace

from configs.hugging_face_architectures import LLAMA, OF_LLAMA, RMS, UNTIED
from configs.hugging_face_fields import (
    PLAIN,
    Field,
    head_dim_field,
    layer_types,
    number,
    read_mistral,
    read_rope,
    read_windows,
)

# the parts that this code lacks, by the model_type of well-known models with experts
MISSING = {
    "deepseek_v2": "latent attention and layers without experts",
    "deepseek_v3": "latent attention and layers without experts",
    "glm4_moe": "partial rotary positions and layers without experts",
    "qwen3_next": "layers of linear attention",
    "granitemoe": "scales of embeddings, residuals and logits",
}


def _with_experts(router: str, experts: str, matrices: tuple[str, str, str]) -> dict[str, str]:
    """Returns the tensors of a Llama with experts, by the names of its router, experts and matrices in a layer."""
    others = {
        theirs: ours.replace("layers/", "layers/sparse/")
        for theirs, ours in LLAMA.tensors.items()
        if ".mlp." not in theirs
    }
    ours = {name: f"layers/sparse/experts/{part}" for name, part in zip(matrices, ("gate", "up", "down"), strict=True)}
    found = {f"model.layers.{{}}.{experts}.{{}}.{name}.weight": part for name, part in ours.items()}
    return others | {f"model.layers.{{}}.{router}.weight": "layers/sparse/router"} | found


_ROUTING = (
    Field("experts_per_token", "num_experts_per_tok"),
    Field("balance_loss", "router_aux_loss_coef", default=0.001),
)
_OF_MIXTRAL = (
    *OF_LLAMA,
    *_ROUTING,
    Field("num_experts", "num_local_experts"),
    head_dim_field(),
    Field("", "sliding_window", write=lambda c: c.window or None),
    UNTIED,
)
_MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    name="MixtralForCausalLM",
    kind="moe",
    fields=_OF_MIXTRAL,
    always=PLAIN
    | RMS
    | {"capacity_factor": 0.0, "moe_every": 1, "normalise_gates": True, "z_loss": 0.0, "shared_intermediate": 0}
    | {"expert_bias": False},
    only=LLAMA.only | {"router_jitter_noise": 0.0},
    more=lambda v: read_mistral({"sliding_window": None, "rope_theta": 1e6, **v}),
    tensors=_with_experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
)
_OLMOE = replace(
    _MIXTRAL,
    model_type="olmoe",
    name="OlmoeForCausalLM",
    fields=(
        *OF_LLAMA,
        *_ROUTING,
        Field("num_experts", read=lambda v: number(v, "num_experts", v.get("num_local_experts"))),
        Field("normalise_gates", "norm_topk_prob", default=False),
        head_dim_field(),
        Field("attention_bias", default=False),
        UNTIED,
    ),
    always=_MIXTRAL.always | {"qk_norm_whole": True},
    only=LLAMA.only | {"clip_qkv": None},
    more=read_rope,
    tensors=_with_experts("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
)
_QWEN3 = replace(
    _OLMOE,
    model_type="qwen3_moe",
    name="Qwen3MoeForCausalLM",
    fields=(
        *(field for field in _OLMOE.fields if field.ours != "intermediate"),
        Field("intermediate", "moe_intermediate_size"),
        Field("", "num_local_experts", write=lambda c: c.num_experts),  # of transformers 5
    ),
    always=_MIXTRAL.always | {"qk_norm": True},
    only=LLAMA.only | {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
_SHARED = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_QWEN2 = replace(
    _QWEN3,
    model_type="qwen2_moe",
    name="Qwen2MoeForCausalLM",
    fields=(
        *(field for field in _QWEN3.fields if field.ours != "attention_bias"),
        Field("qkv_bias", default=True),
        Field("shared_intermediate", "shared_expert_intermediate_size"),
    ),
    always=_MIXTRAL.always,
    tensors=_QWEN3.tensors
    | {f"model.layers.{{}}.mlp.shared_expert.{name}": f"layers/sparse/shared/{ours}" for name, ours in _SHARED.items()}
    | {"model.layers.{}.mlp.shared_expert_gate.weight": "layers/sparse/shared/router"},
)
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_ROPE_OF_GPT_OSS = {"rope_theta": 150_000.0, "rope_parameters": _YARN}
_IN_GPT_OSS = {
    "self_attn.sinks": "layers/sparse/sinks",
    "mlp.router.weight": "layers/sparse/router",
    "mlp.router.bias": "layers/sparse/router_bias",
    "mlp.experts.gate_up_proj": "layers/sparse/experts/gate layers/sparse/experts/up",
    "mlp.experts.gate_up_proj_bias": "layers/sparse/experts/gate_bias layers/sparse/experts/up_bias",
    "mlp.experts.down_proj": "layers/sparse/experts/down",
    "mlp.experts.down_proj_bias": "layers/sparse/experts/down_bias",
}
_GPT_OSS = replace(
    _MIXTRAL,
    model_type="gpt_oss",
    name="GptOssForCausalLM",
    fields=(
        *OF_LLAMA,
        Field("experts_per_token", "num_experts_per_tok"),
        Field("num_experts", "num_local_experts"),
        head_dim_field(64),
        Field("attention_bias", default=True),
        Field("", "sliding_window", write=lambda c: c.window or 128),  # it makes a mask even if no layer has one
        Field("", "layer_types", write=layer_types),
        UNTIED,
    ),
    # the published coefficient of the balance loss, 0.9, is of a loss that transformers adds only if asked
    always=_MIXTRAL.always
    | {"activation": "swiglu_clamped", "attention_sinks": True, "expert_bias": True, "balance_loss": 0.0},
    only=LLAMA.only | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    more=lambda v: {
        **read_rope({**v, **{name: v.get(name) or default for name, default in _ROPE_OF_GPT_OSS.items()}}),
        **read_windows({"sliding_window": 128, **v}, every=2),
    },
    tensors={name: ours for name, ours in _MIXTRAL.tensors.items() if "block_sparse_moe" not in name}
    | {f"model.layers.{{}}.{theirs}": ours for theirs, ours in _IN_GPT_OSS.items()},
    interleaved=True,
)
WITH_EXPERTS = (_MIXTRAL, _QWEN3, _QWEN2, _OLMOE, _GPT_OSS)
