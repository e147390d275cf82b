"""Which of our parameters is which tensor of transformers: one table per architecture, read in both directions.

Ours are stacked, `[L, ...]`, and multiply from the right, `x @ weight`. Theirs are one per layer; torch's Linear keeps
`[out, in]`, GPT-2's Conv1D `[in, out]` as we do, with query, key and value side by side in one tensor. Heads are in the
same order, and both pair dim `i` of a head with `i + H/2` in rotary positions, so that no tensor is permuted.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from configs.hugging_face import Architecture
from configs.schema import TransformerConfig
from models.model import Model
from sharding.spec import ParamSpec
from sharding.state import by_name


@dataclass(frozen=True, kw_only=True)
class Match:
    """One of our parameters, and the tensor or tensors of transformers that hold it."""

    path: str  # ours
    name: str  # theirs, `{}` for the number of the layer
    transposed: bool = False
    part: int = 0  # theirs has `parts` of ours side by side in its last dim; this is number `part`
    parts: int = 1

    def name_in(self, layer: int | None) -> str:
        """Returns the name of the tensor that holds a layer."""
        return self.name if layer is None else self.name.format(layer)

    def their_shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the tensor that holds one layer of ours."""
        whole = (*ours[:-1], ours[-1] * self.parts)
        return whole[::-1] if self.transposed else whole


@dataclass(frozen=True, kw_only=True)
class Table:
    """The tensors of an architecture."""

    prefix: str  # of all but the head; checkpoints of the bare model lack it
    matches: tuple[Match, ...]
    ignored: str  # a regular expression for names that transformers does not read for this model either


def _module(path: str, name: str, transposed: bool) -> tuple[Match, ...]:
    """A Linear."""
    return (
        Match(path=f"{path}/weight", name=f"{name}.weight", transposed=transposed),
        Match(path=f"{path}/bias", name=f"{name}.bias"),
    )


def _linear(path: str, name: str) -> tuple[Match, ...]:
    """torch's Linear, `[out, in]`."""
    return _module(path, name, transposed=True)


def _conv1d(path: str, name: str) -> tuple[Match, ...]:
    """GPT-2's Conv1D, `[in, out]`."""
    return _module(path, name, transposed=False)


def _fused(paths: Iterable[str], name: str) -> tuple[Match, ...]:
    """Several Linears of ours that are one Conv1D of theirs."""
    paths = tuple(paths)
    return tuple(
        Match(path=f"{path}/{kind}", name=f"{name}.{kind}", part=part, parts=len(paths))
        for kind in ("weight", "bias")
        for part, path in enumerate(paths)
    )


def _norm(path: str, name: str) -> tuple[Match, ...]:
    return (Match(path=f"{path}/scale", name=f"{name}.weight"), Match(path=f"{path}/bias", name=f"{name}.bias"))


def _table(path: str, name: str, *, transposed: bool = False) -> Match:
    return Match(path=path, name=name, transposed=transposed)


_GPT2 = Table(
    prefix="transformer.",
    matches=(
        _table("embed/token", "transformer.wte.weight"),
        _table("embed/position", "transformer.wpe.weight"),
        *_norm("layers/attention_norm", "transformer.h.{}.ln_1"),
        *_fused(("layers/query", "layers/key", "layers/value"), "transformer.h.{}.attn.c_attn"),
        *_conv1d("layers/out", "transformer.h.{}.attn.c_proj"),
        *_norm("layers/mlp_norm", "transformer.h.{}.ln_2"),
        *_conv1d("layers/up", "transformer.h.{}.mlp.c_fc"),
        *_conv1d("layers/down", "transformer.h.{}.mlp.c_proj"),
        *_norm("head/norm", "transformer.ln_f"),
        _table("head/weight", "lm_head.weight", transposed=True),
    ),
    ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
)
_LLAMA = Table(
    prefix="model.",
    matches=(
        _table("embed/token", "model.embed_tokens.weight"),
        *_norm("layers/attention_norm", "model.layers.{}.input_layernorm"),
        *_linear("layers/query", "model.layers.{}.self_attn.q_proj"),
        *_linear("layers/key", "model.layers.{}.self_attn.k_proj"),
        *_linear("layers/value", "model.layers.{}.self_attn.v_proj"),
        *_linear("layers/out", "model.layers.{}.self_attn.o_proj"),
        *_norm("layers/mlp_norm", "model.layers.{}.post_attention_layernorm"),
        *_linear("layers/gate", "model.layers.{}.mlp.gate_proj"),
        *_linear("layers/up", "model.layers.{}.mlp.up_proj"),
        *_linear("layers/down", "model.layers.{}.mlp.down_proj"),
        *_norm("head/norm", "model.norm"),
        _table("head/weight", "lm_head.weight", transposed=True),
    ),
    ignored=r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)


def _encoder(prefix: str) -> tuple[Match, ...]:
    """BERT and RoBERTa, without the head."""
    layer = f"{prefix}encoder.layer.{{}}"
    return (
        _table("embed/token", f"{prefix}embeddings.word_embeddings.weight"),
        _table("embed/position", f"{prefix}embeddings.position_embeddings.weight"),
        _table("embed/token_type", f"{prefix}embeddings.token_type_embeddings.weight"),
        *_norm("embed/norm", f"{prefix}embeddings.LayerNorm"),
        *_linear("layers/query", f"{layer}.attention.self.query"),
        *_linear("layers/key", f"{layer}.attention.self.key"),
        *_linear("layers/value", f"{layer}.attention.self.value"),
        *_linear("layers/out", f"{layer}.attention.output.dense"),
        *_norm("layers/attention_norm", f"{layer}.attention.output.LayerNorm"),
        *_linear("layers/up", f"{layer}.intermediate.dense"),
        *_linear("layers/down", f"{layer}.output.dense"),
        *_norm("layers/mlp_norm", f"{layer}.output.LayerNorm"),
    )


_BERT = Table(
    prefix="bert.",
    matches=(
        *_encoder("bert."),
        *_linear("head/transform", "cls.predictions.transform.dense"),
        *_norm("head/transform_norm", "cls.predictions.transform.LayerNorm"),
        _table("head/bias", "cls.predictions.bias"),
    ),
    ignored=r"(bert\.)?(pooler\..*|embeddings\.position_ids)|cls\.(seq_relationship\..*|predictions\.decoder\..*)",
)
_ROBERTA = Table(
    prefix="roberta.",
    matches=(
        *_encoder("roberta."),
        *_linear("head/transform", "lm_head.dense"),
        *_norm("head/transform_norm", "lm_head.layer_norm"),
        _table("head/bias", "lm_head.bias"),
    ),
    ignored=r"(roberta\.)?(pooler\..*|embeddings\.position_ids)|lm_head\.decoder\..*",
)
TABLES: Mapping[str, Table] = {"gpt2": _GPT2, "llama": _LLAMA, "bert": _BERT, "roberta": _ROBERTA}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A parameter of a model, its match, and its shape without the padding of the vocabulary."""

    match: Match
    spec: ParamSpec
    shape: tuple[int, ...]  # of one layer, if stacked

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The numbers of the layers of a stack, else one None."""
        return tuple(range(self.spec.shape[0])) if self.spec.dims[0] == "layers" else (None,)

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of each tensor of transformers."""
        return self.match.their_shape(self.shape)


def tensors(model: Model, architecture: Architecture) -> dict[str, Tensor]:
    """Returns the parameters of a model by our path, in the order of the table."""
    assert isinstance(model.config, TransformerConfig)
    specs: dict[str, ParamSpec] = by_name(model.param_specs(), lambda x: isinstance(x, ParamSpec))
    vocab_size, found = model.config.vocab_size, {}
    for match in TABLES[architecture.model_type].matches:
        spec = specs.get(match.path)
        if spec is not None:  # a bias, or an untied head, is not in every model
            shape = tuple(vocab_size if dim == "vocab" else n for dim, n in zip(spec.dims, spec.shape, strict=True))
            found[match.path] = Tensor(match=match, spec=spec, shape=shape[1:] if spec.dims[0] == "layers" else shape)
    assert found.keys() == specs.keys(), found.keys() ^ specs.keys()
    return found


def ignored(model: Model, architecture: Architecture, name: str) -> bool:
    """Whether a tensor of a checkpoint is none of the model's: buffers, heads of other tasks, copies of a tied head."""
    tied = getattr(model.config, "tied_head", True) and name == "lm_head.weight"
    return tied or re.fullmatch(TABLES[architecture.model_type].ignored, name) is not None


def spellings(architecture: Architecture, name: str) -> tuple[str, ...]:
    """Returns the names under which a tensor may be found: without the prefix, and with TensorFlow's names of norms."""
    short = name.removeprefix(TABLES[architecture.model_type].prefix)
    found = [name, short]
    for ours, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        found += [x.removesuffix(ours) + old for x in (name, short) if x.endswith(ours)]
    return tuple(found)
