"""The section `model`, one dataclass per kind of model; the models are in `models/`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, get_type_hints

from configs.schema.codecs import BASES, COLUMNS
from configs.schema.keys import Section, key, keys_of
from configs.schema.own import OWN

KIND = "kind of model; decides the other keys"
KINDS = ("decoder", "moe", "encoder", "resnet", "vit")
GATED = ("swiglu", "swiglu_clamped", "geglu")  # activations of one product that multiply another
LORA_TARGETS = ("query", "key", "value", "out", "gate", "up", "down", "experts")
ACTIVATION = "activation; gelu and geglu use the tanh approximation"
REMAT = ("full", "attention", "dots", "none", "offload")
REMAT_OF_ATTENTION = ("attention", "offload")  # they name values of a transformer's layer
UNROLL = "write out the loop over layers: fewer copies on GPUs, slow to compile; not with remat=full"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, name="model"):
    """The keys of all models."""

    OBJECTIVE: ClassVar[str] = "causal"  # the value of data.objective that the model learns

    kind: str = key("decoder", KIND, choices=KINDS, topics=("model",))
    compute_dtype: str = key(
        "float32",
        "dtype of activations and gathered parameters, which are stored in float32",
        choices=("float32", "bfloat16", "float16"),
    )
    remat: str = key(
        "full",
        "full: recompute layers; attention: keep attention and MLPs' inputs; dots: keep products, convolutions, "
        "attention, experts' tokens; none: keep all; offload: keep layers' inputs, q, k, v, attention in host memory",
        choices=REMAT,
        resumable=True,
    )

    @property
    def drops(self) -> bool:
        """Whether a training step has dropout."""
        return False


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """The common keys of decoder and encoder.

    Models treat `attention = "auto"` as `xla`; `models.make_model`, which knows the devices, resolves it first.
    """

    vocab_size: int = key(256, "token ids; 0: the tokenizer's, and at least those of model.weights", least=0)
    vocab_multiple: int = key(128, "pads the embedding to a multiple of this", least=1)
    max_len: int = key(256, "longest sequence; rows of learned positions", least=1, unit="tokens")
    num_layers: int = key(4, "number of layers", least=1)
    hidden: int = key(128, "residual width; a multiple of num_heads, unless head_dim is set", least=1)
    intermediate: int = key(512, "MLP width", least=1)
    num_heads: int = key(4, "attention heads per layer", least=1)
    attention: str = key(
        "auto",
        "attention kernel; auto: on GPUs in bfloat16 cudnn, for packed documents pallas; on TPUs splash; else xla",
        choices=("auto", "xla", "cudnn", "pallas", "splash"),
        resumable=True,
    )
    unroll: bool = key(False, UNROLL, resumable=True)
    norm_eps: float = key(1e-5, "added to the variance in norms", above=0, below=1)
    dropout: float = key(0.0, "dropped share of embeddings and branches' outputs", least=0, below=1)
    attention_dropout: float = key(0.0, "dropped share of attention's weights", least=0, below=1)
    weights: str = key("", "folder of a Hugging Face checkpoint from which a new run starts")
    lora_rank: int = key(0, "rank of LoRA adapters on frozen parameters; 0: train all parameters", least=0)
    lora_alpha: float = key(16.0, "adapters count lora_alpha / lora_rank", above=0, below=math.inf)
    lora_targets: str = key(
        "query key value out gate up down", "matrices with adapters, separated by spaces; experts: all of theirs"
    )
    lora_base: str = key(
        "compute",
        f"storage of frozen matrices: compute_dtype, or blocks of {COLUMNS} with 8 or 4 bits (QLoRA)",
        choices=("compute", *BASES),
    )
    lora_embeddings: bool = key(False, "with lora_rank: train the token embedding and an untied head, too, whole")
    lora_weights: str = key("", "folder of PEFT adapters from which a new run starts")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_kept(self.remat, unroll=self.unroll)
        self._check_lora()
        if self.head_size * self.num_heads != self.hidden and not getattr(self, "head_dim", 0):
            require_heads(self.hidden, self.num_heads)
        fits = self.attention != "pallas" or self.has_flash_heads
        name = "head_dim" if getattr(self, "head_dim", 0) else "hidden / num_heads"
        require(fits, name, self.head_size, "attention = 'pallas' needs a power of two from 16 on")
        fused = self.attention != "cudnn" or self.compute_dtype != "float32"
        fix = "cudnn needs model.compute_dtype = 'bfloat16' or 'float16'; otherwise use xla"
        require(fused, "attention", self.attention, fix)
        fix = "windows, capped scores and sinks need another kernel than cudnn; use pallas, xla or auto"
        require(self.attention != "cudnn" or self.is_plain, "attention", self.attention, fix)

    def _check_lora(self) -> None:
        for name in ("lora_targets", "lora_base", "lora_embeddings", "lora_weights"):
            is_default = getattr(self, name) == keys_of(type(self))[name].default
            require(bool(self.lora_rank) or is_default, "lora_rank", 0, f"model.{name} needs a rank from 1 on")
        has_base = bool(self.weights) or not self.lora_weights
        require(has_base, "lora_weights", self.lora_weights, "adapters need model.weights, their base")
        targets = self.lora_targets.split()
        unknown = next((x for x in targets if x not in LORA_TARGETS), "")
        lacks = {"gate": getattr(self, "activation", "") not in GATED, "experts": not hasattr(self, "num_experts")}
        there = [x for x in LORA_TARGETS if not lacks.get(x)]
        fix = f"one of {' '.join(there)} has adapters{f', not {unknown}' if unknown else ''}; spaces separate several"
        require(not unknown and not {*targets}.isdisjoint(there), "lora_targets", self.lora_targets, fix)

    @property
    def drops(self) -> bool:
        """Whether a training step has dropout."""
        return bool(self.dropout or self.attention_dropout)

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.hidden // self.num_heads

    @property
    def is_plain(self) -> bool:
        """Whether attention has no windows, capped scores or sinks, so that kernels of others compute it."""
        return True

    @property
    def has_flash_heads(self) -> bool:
        """Whether models/flash.py takes heads of this size."""
        return self.head_size >= 16 and self.head_size.bit_count() == 1

    def takes_flash(self, length: int, tensor: int = 1) -> bool:
        """Whether models/flash.py takes rows of `length` tokens, and these heads divided among `tensor` devices."""
        are_whole = getattr(self, "num_kv_heads", self.num_heads) % tensor == 0
        return self.has_flash_heads and are_whole and (length in (16, 32) or length % 64 == 0)

    def takes_splash(self, length: int, tensor: int = 1) -> bool:
        """Whether models/splash.py takes rows of `length` tokens, and these heads divided among `tensor` devices."""
        return length % 128 == 0 and getattr(self, "num_kv_heads", self.num_heads) % tensor == 0

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TransformerConfig):
    """A decoder-only language model."""

    kind: str = key("decoder", KIND, choices=KINDS, topics=("model",))
    num_kv_heads: int = key(4, "key and value heads; fewer than num_heads: grouped-query attention", least=1)
    head_dim: int = key(0, "size of a head; 0: hidden / num_heads", least=0)
    positions: str = key("rotary", "position encoding", choices=("learned", "rotary"))
    rotary_base: float = key(10_000.0, "rotary: base of the frequencies (rope_theta)", above=1, below=math.inf)
    rotary_scaling: str = key(
        "none",
        "rotary: divide all frequencies by rotary_factor, or the low ones (llama3: Llama 3.1; yarn: YaRN)",
        choices=("none", "linear", "llama3", "yarn"),
    )
    rotary_factor: float = key(1.0, "rotary_scaling: divisor of frequencies", above=0, below=math.inf)
    rotary_low: float = key(
        1.0, "llama3, yarn: divide frequencies of fewer turns in rotary_original_len", above=0, below=math.inf
    )
    rotary_high: float = key(4.0, "llama3, yarn: keep frequencies of more turns (YaRN: 32)", above=0, below=math.inf)
    rotary_original_len: int = key(8192, "llama3, yarn: longest sequence before the scaling", least=1, unit="tokens")
    rotary_attention: float = key(1.0, "yarn: factor of rotated queries and keys", above=0, below=math.inf)
    rotary_truncate: bool = key(True, "yarn: round the interpolated range to whole dims (gpt-oss: False)")
    window: int = key(0, "positions that a token attends to, with its own; 0: all", least=0, unit="tokens")
    global_every: int = key(0, "with window: every n-th layer attends to all positions; 0: none", least=0)
    rotary_local_base: float = key(
        0.0, "with global_every: unscaled base in layers with a window; 0: rotary_base", least=0
    )
    qk_norm: bool = key(False, "norms of queries and keys per head")
    qk_norm_whole: bool = key(False, "norms of all queries and all keys of a token (OLMoE)")
    query_scalar: int = key(0, "divide attention scores by its square root; 0: the size of a head", least=0)
    attention_cap: float = key(0.0, "attention scores s become cap tanh(s / cap); 0: no cap", least=0)
    attention_sinks: bool = key(
        False, "an extra learned score per head in attention's softmax, without a value (gpt-oss)"
    )
    logit_cap: float = key(0.0, "the same for logits", least=0)
    norm: str = key(
        "rms", "LayerNorm, RMSNorm, or RMSNorm with scales added to 1 (Gemma)", choices=("layer", "rms", "rms_1p")
    )
    post_norm: bool = key(False, "additional norms after attention and MLP")
    activation: str = key("swiglu", f"{ACTIVATION}; swiglu_clamped: gpt-oss's", choices=("gelu", "gelu_exact", *GATED))
    scale_embedding: bool = key(False, "multiply embeddings by the square root of hidden")
    tied_head: bool = key(True, "the head shares the embedding's weights")
    use_bias: bool = key(False, "biases in linear layers and norms")
    attention_bias: bool = key(False, "biases in attention without use_bias")
    qkv_bias: bool = key(False, "biases of queries, keys and values without these two")

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "queries and keys have norms per head or whole; set one of the two to False"
        require(not (self.qk_norm and self.qk_norm_whole), "qk_norm_whole", True, fix)
        fix = f"it must divide model.num_heads = {self.num_heads}"
        require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", self.num_kv_heads, fix)
        even = self.positions != "rotary" or self.head_size % 2 == 0
        fix = f"rotary positions need an even model.hidden / model.num_heads, not {self.head_size}"
        require(even, "num_heads", self.num_heads, fix)
        fix = f"it must be above model.rotary_low = {self.rotary_low}"
        ordered = self.rotary_scaling not in ("llama3", "yarn") or self.rotary_high > self.rotary_low
        require(ordered, "rotary_high", self.rotary_high, fix)
        is_yarn = self.positions == "rotary" and self.rotary_scaling == "yarn"
        fix = "only rotary_scaling = 'yarn' scales queries and keys, in all layers alike; set it to 1"
        scaled = is_yarn and not self.rotary_local_base
        require(scaled or self.rotary_attention == 1, "rotary_attention", self.rotary_attention, fix)
        fix = "without model.window all layers attend to all; set model.window too"
        require(not self.global_every or self.window > 0, "global_every", self.global_every, fix)
        fix = "only with model.global_every have layers different positions; set model.rotary_base"
        require(not self.rotary_local_base or self.global_every > 0, "rotary_local_base", self.rotary_local_base, fix)

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.head_dim or super().head_size

    @property
    def is_plain(self) -> bool:
        """Whether attention has no windows, capped scores or sinks, so that kernels of others compute it."""
        return not self.window and not self.attention_cap and not self.attention_sinks


@dataclass(frozen=True, kw_only=True)
class MoeConfig(DecoderConfig):
    """A decoder whose MLPs are experts, in every layer or in every other one."""

    kind: str = key("moe", KIND, choices=KINDS, topics=("model",))
    num_experts: int = key(8, "experts of a layer; a multiple of the devices of sharding.experts", least=1)
    experts_per_token: int = key(2, "experts of a token: 1 (Switch), 2 (GShard, Mixtral) or more (Qwen)", least=1)
    normalise_gates: bool = key(True, "divide the weights of a token's experts, if several, by their sum")
    shared_intermediate: int = key(
        0, "width of an expert that takes all tokens, weighted by a sigmoid (Qwen 2); 0: none", least=0
    )
    expert_bias: bool = key(False, "biases of experts and router (gpt-oss)")
    moe_every: int = key(1, "experts in every layer or every second", choices=(1, 2))
    capacity_factor: float = key(
        1.25, "room of an expert, in even shares of a row's tokens; 0: for all (dropless)", least=0, below=math.inf
    )
    balance_loss: float = key(0.01, "weight of the loss that balances experts", least=0)
    z_loss: float = key(0.001, "weight of the loss on the router's logits", least=0)
    max_dropped: float = key(0.2, "warn once if a larger share of choices is dropped", least=0, most=1, resumable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = f"it must be at most model.num_experts = {self.num_experts}"
        require(self.experts_per_token <= self.num_experts, "experts_per_token", self.experts_per_token, fix)
        fix = f"it must divide model.num_layers = {self.num_layers}"
        require(self.num_layers % self.moe_every == 0, "moe_every", self.moe_every, fix)
        fix = "layers with and without experts have the same window; set it to 0, or model.moe_every to 1"
        require(not self.global_every or self.moe_every == 1, "global_every", self.global_every, fix)

    @property
    def num_moe_layers(self) -> int:
        """Layers that have experts."""
        return self.num_layers // self.moe_every

    def capacity(self, length: int) -> int:
        """Returns how many tokens of a row of `length` an expert takes: their part times the factor, rounded up."""
        share = self.experts_per_token * length * self.capacity_factor / self.num_experts
        return min(length, math.ceil(share - 1e-9))  # 1e-9: a rounding error above a whole number does not add a token


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TransformerConfig):
    """A BERT / RoBERTa encoder trained by masked language modelling."""

    OBJECTIVE = "masked"

    kind: str = key("encoder", KIND, choices=KINDS, topics=("model",))
    vocab_size: int = key(257, "token ids, with the mask's; 0: the tokenizer's", least=0)
    norm_first: bool = key(
        True,
        "norms before attention and MLP, and at the end; False: after them and the embedding (BERT)",
    )
    activation: str = key("gelu", ACTIVATION, choices=("gelu", "gelu_exact"))
    position_offset: int = key(0, "row of the first token's position (RoBERTa: 2)", least=0)
    token_types: int = key(0, "rows of the token type embedding (BERT: 2)", least=0)


@dataclass(frozen=True, kw_only=True)
class ImageConfig(ModelConfig):
    """The common keys of the models that classify images."""

    OBJECTIVE = "classify"

    channels: int = key(1, "image channels: 1 for grey, 3 for colour", least=1)
    num_classes: int = key(10, "number of classes", least=1)
    class_multiple: int = key(8, "pads the head to a multiple of this", least=1)

    @property
    def padded_classes(self) -> int:
        """Columns of the head: `num_classes` rounded up to a multiple of `class_multiple`."""
        return -(-self.num_classes // self.class_multiple) * self.class_multiple


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(ImageConfig):
    """A ResNet that classifies images."""

    kind: str = key("resnet", KIND, choices=KINDS, topics=("model",))
    stem: str = key("conv3", "first layers, for ImageNet or small images", choices=("conv7_pool", "conv3"))
    version: str = key("1", "bottleneck's stride in the 1x1 or 3x3 convolution", choices=("1", "1.5"))
    block: str = key("basic", "kind of residual block", choices=("basic", "bottleneck"))
    stage_blocks: tuple[int, ...] = key((1, 1, 1), "number of blocks per stage")
    width: int = key(16, "channels of the first stage; each later stage doubles them", least=1)
    widening: int = key(1, "factor of the channels inside bottlenecks (WideResNet)", least=1)
    norm: str = key("group", "group norm or batch norm", choices=("group", "batch"))
    norm_groups: int = key(8, "group: groups of channels; a divisor of width", least=1)
    norm_rows: int = key(
        8,
        "batch: consecutive rows that are normalised together; a divisor of batch.micro_size",
        least=1,
        unit="rows",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = f"without attention choose {remat_other_than(*REMAT_OF_ATTENTION)}"
        require(self.remat not in REMAT_OF_ATTENTION, "remat", self.remat, fix)
        object.__setattr__(self, "stage_blocks", tuple(self.stage_blocks))  # it is a list in configs from JSON
        require(len(self.stage_blocks) > 0, "stage_blocks", self.stage_blocks, "give at least one stage")
        for count in self.stage_blocks:
            require(count > 0, "stage_blocks", count, "give a whole number above zero")
        fits = self.widening == 1 or self.block == "bottleneck"
        fix = "only bottlenecks are widened inside; set model.block='bottleneck', or widen basic blocks by model.width"
        require(fits, "widening", self.widening, fix)
        fix = f"groups must divide model.width = {self.width}"
        fits = self.norm == "batch" or self.width % self.norm_groups == 0
        require(fits, "norm_groups", self.norm_groups, fix)


@dataclass(frozen=True, kw_only=True)
class ViTConfig(ImageConfig):
    """A vision transformer that classifies images."""

    kind: str = key("vit", KIND, choices=KINDS, topics=("model",))
    image_size: int = key(8, "height and width of images, as data.image_size", least=1, unit="pixels")
    patch_size: int = key(2, "height and width of a patch; a divisor of image_size", least=1, unit="pixels")
    num_layers: int = key(4, "number of layers", least=1)
    hidden: int = key(64, "residual width; a multiple of num_heads", least=1)
    intermediate: int = key(256, "MLP width", least=1)
    num_heads: int = key(4, "attention heads per layer", least=1)
    activation: str = key("gelu", ACTIVATION, choices=("gelu", "gelu_exact"))
    unroll: bool = key(False, UNROLL, resumable=True)
    norm_eps: float = key(1e-6, "added to the variance in norms", above=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_kept(self.remat, unroll=self.unroll)
        require_heads(self.hidden, self.num_heads)
        fix = f"patches must divide model.image_size = {self.image_size}"
        require(self.image_size % self.patch_size == 0, "patch_size", self.patch_size, fix)

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2


MODELS: Mapping[str, type[ModelConfig]] = {
    "decoder": DecoderConfig,
    "moe": MoeConfig,
    "encoder": EncoderConfig,
    "resnet": ResNetConfig,
    "vit": ViTConfig,
}


def model_sections() -> dict[str, type[ModelConfig]]:
    """Returns the section of each kind of model, including kinds that the config file registered."""
    return {**MODELS, **{kind: get_type_hints(model)["config"] for kind, model in OWN["model"].items()}}


def require(holds: bool, name: str, value: object, fix: str) -> None:
    """Raises a one-line ValueError with the key, its value and `fix`, unless `holds`."""
    if not holds:
        raise ValueError(f"model.{name} = {value!r}: {fix}")


def remat_other_than(*names: str) -> str:
    """Returns the other choices of `model.remat`, in words."""
    *others, last = (name for name in REMAT if name not in names)
    return f"{', '.join(others)} or {last}"


def require_heads(hidden: int, num_heads: int) -> None:
    """Raises ValueError, with the nearest number of heads that fits, unless `num_heads` divides `hidden`."""
    divisors = [n for n in range(1, hidden + 1) if hidden % n == 0]
    nearest = min(divisors, key=lambda n: abs(n - num_heads))
    fix = f"heads must divide model.hidden = {hidden}; the nearest divisor is {nearest}"
    require(hidden % num_heads == 0, "num_heads", num_heads, fix)


def require_kept(remat: str, *, unroll: bool) -> None:
    """Raises a one-line ValueError for layers that are written out though the backward pass keeps nothing of them."""
    fix = f"with model.remat = 'full' no loop keeps more than layers' inputs; use {remat_other_than('full')}"
    require(remat != "full" or not unroll, "unroll", unroll, fix)
