"""Common bases of transformers: a scan over the stacked layers; for decoder and encoder, loss and FLOPs per token."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import Config, DecoderConfig, EncoderConfig, ModelConfig, TransformerConfig, ViTConfig
from models.block import ALONE, Block, BlockConfig, Norm, initial_std, normal
from models.chunked_loss import piece_length, sum_of_pieces
from models.dropout import Dropout
from models.lora import add_adapters
from models.model import (
    Batch,
    Gather,
    GroupParams,
    Model,
    ParameterGroup,
    Params,
    cross_entropy,
    mask_padding,
)
from models.remat import INPUT, named, rematerialise
from sharding.accumulation import length, scan_layers
from sharding.context import Context
from sharding.experts import context_of
from sharding.pipeline import StagedLoss
from sharding.trees import PyTree


def with_attention(config: Config) -> ModelConfig:
    """Returns the section `model`, with `attention=auto` replaced by a kernel: on GPUs in bfloat16 a fused one.

    That is cuDNN's for the heads that it supports. Windows, capped scores and rows packed with documents need our own
    kernel (`models/flash.py`), as do sinks. On TPUs it is jax's splash attention (`models/splash.py`), but not with
    sinks. Where none fits, where weights are dropped, and where XLA's partitioner has to cut the kernel, XLA computes
    it.
    """
    model, is_packed = config.model, config.data.packing != "stream"
    if not isinstance(model, TransformerConfig) or model.attention != "auto":
        return model
    if model.attention_dropout:
        return replace(model, attention="xla")
    has_partitioner = config.ablation.partitioner == "auto"
    if jax.default_backend() == "tpu" and not has_partitioner:
        has_sinks = isinstance(model, DecoderConfig) and model.attention_sinks
        takes_splash = not has_sinks and model.takes_splash(config.data.seq_len, config.mesh.tensor)
        return replace(model, attention="splash" if takes_splash else "xla")
    if jax.default_backend() != "gpu" or model.compute_dtype != "bfloat16":
        return replace(model, attention="xla")
    has_cudnn_heads = model.head_size % 8 == 0 and model.head_size <= 128
    if has_cudnn_heads and model.is_plain and not is_packed:
        return replace(model, attention="cudnn")
    takes_ours = not has_partitioner and model.takes_flash(config.data.seq_len, config.mesh.tensor)
    return replace(model, attention="pallas" if takes_ours else "xla")


class Embedding(nnx.Module):
    """Embeddings of tokens `[V, D]`, of learned positions, optionally of token types, and optionally a norm."""

    def __init__(self, config: TransformerConfig, num_positions: int, key: Array) -> None:
        c, std = config, initial_std(config.hidden)
        offset, token_types, norm_first = 0, 0, True
        if isinstance(c, EncoderConfig):
            offset, token_types, norm_first = c.position_offset, c.token_types, c.norm_first
        self.offset = offset
        token_key, position_key = jax.random.split(key)

        def table(key: Array, rows: int, dim: str) -> nnx.Param[Array] | None:
            return normal(key, (rows, c.hidden), (dim, "embed"), std) if rows else None

        self.token = normal(token_key, (c.padded_vocab, c.hidden), ("vocab", "embed"), std)
        self.position = table(position_key, num_positions, "position")
        self.token_type = table(jax.random.fold_in(key, 2), token_types, "token_type")
        self.norm = None if norm_first else Norm(c.hidden, "layer", c.norm_eps, use_bias=True)
        self.scale = c.hidden**0.5 if isinstance(c, DecoderConfig) and c.scale_embedding else 1.0

    def __call__(self, tokens_BT: Array, positions_BT: Array | None, context: Context = ALONE) -> Array:
        """Returns `[B, T, D]`. Positions are row numbers of their table, counted from `offset` by default."""
        x_BTD = self.token[...][tokens_BT]
        x_BTD = x_BTD if self.scale == 1 else x_BTD * self.scale
        if self.position is None:
            return x_BTD
        if positions_BT is None:
            end = self.offset + tokens_BT.shape[1] * context.size
            x_BTD = x_BTD + context.own(self.position[None, self.offset : end])
        else:
            x_BTD = x_BTD + self.position[...][positions_BT]
        x_BTD = x_BTD if self.token_type is None else x_BTD + self.token_type[None, :1]
        return x_BTD if self.norm is None else self.norm(x_BTD)


@dataclass(frozen=True)
class Stack(Model):
    """An embedding, a stack of layers and a head, each a parameter group. Subclasses name their modules."""

    config: TransformerConfig | ViTConfig
    HEAD: ClassVar[Callable[..., nnx.Module]]  # made from the config and a key

    @abstractmethod
    def make_embedding(self, key: Array) -> nnx.Module:
        """Returns the embedding with new parameters."""

    def make_layer(self, key: Array) -> nnx.Module:
        """Returns an entry of the stack with new parameters."""
        return Block(BlockConfig.of(self.config), key)

    def make_groups(self) -> dict[str, ParameterGroup[nnx.Module]]:
        """Returns the parameter groups by their top-level key."""
        lora = self.config if isinstance(self.config, TransformerConfig) and self.config.lora_rank else None

        def make_layer(key: Array) -> nnx.Module:
            layer: Any = self.make_layer(key)
            if lora:
                for number, block in enumerate(layer.blocks()):
                    add_adapters(block, lora, jax.random.fold_in(key, 1 + number))
            return layer

        return {
            "embed": ParameterGroup(self.make_embedding, lora=lora),
            "layers": ParameterGroup(make_layer, self.num_entries, lora=lora),
            "head": ParameterGroup(partial(self.HEAD, self.config), lora=lora),
        }

    @property
    def num_entries(self) -> int:
        """Length of the stack."""
        return self.config.num_layers

    def run_layers(
        self, params: Params, x: PyTree, gather: Gather, *args: Array | None, stage: Array | int = 0, **how: Any
    ) -> PyTree:
        """Returns `x` after all layers, each gathered right before its use. `args` and `how` are passed to every layer.

        `x` is passed from layer to layer, an array `[B, T, D]` or a tree of arrays. `args` are float arrays. `stage` is
        the pipeline stage of the layers, which matters if layers differ.
        """
        del stage

        def body(x: PyTree, values: GroupParams, *args: Array | None) -> PyTree:
            x = jax.tree.map(lambda y: named(y, INPUT) if y.ndim else y, x)
            return self.run_layer(values, x, *args, **how)

        return scan_layers(
            body,
            x,
            params["layers"],
            *args,
            gather=partial(gather, "layers"),
            rematerialise=partial(rematerialise, policy=self.config.remat, in_scan=not self.config.unroll),
            unroll=self.config.unroll,
        )

    def run_layer(self, values: GroupParams, x: PyTree, *args: Array | None, **how: Any) -> PyTree:
        """Returns the output of an entry of the stack with the gathered parameters `values` for the input `x`."""
        return self.module("layers", values)(x, *args, **how)


@dataclass(frozen=True)
class Transformer(Stack):
    """A stack of layers between an embedding and a head."""

    config: TransformerConfig

    def check_length(self, length: int) -> None:
        """Raises ValueError for a sequence with more tokens than positions."""
        if length > self.config.max_len:
            raise ValueError(f"a sequence of {length} tokens is longer than model.max_len = {self.config.max_len}")

    @property
    @abstractmethod
    def num_positions(self) -> int:
        """Number of learned positions, 0 if they are not learned."""

    @property
    @abstractmethod
    def num_lookup_params(self) -> int:
        """Number of parameters that are looked up by index and take no part in matrix products."""

    @abstractmethod
    def positions(self, tokens_BT: Array, segments_BT: Array | None) -> Array | None:
        """Returns the position of each token, or None for the positions of a row with a single document."""

    def make_embedding(self, key: Array) -> nnx.Module:
        """Returns the embedding with new parameters."""
        return Embedding(self.config, self.num_positions, key)

    def embed(self, values: GroupParams, rows: Batch, context: Context = ALONE) -> Array:
        """Returns the input `[B, T, D]` of the first layer. `values` are the gathered parameters `embed`."""
        tokens_BT, noise_BT2 = rows["tokens"], rows.get("noise")
        self.check_length(tokens_BT.shape[1] * context.size)
        x_BTD = self.module("embed", values)(tokens_BT, self.own_positions(rows, context), context)
        if noise_BT2 is None:
            return x_BTD
        return Dropout(self.config, context.whole(noise_BT2), self.config.num_layers, context).values(x_BTD, 0)

    def own_positions(self, rows: Batch, context: Context) -> PyTree:
        """Returns the `positions` of these tokens within their whole rows."""
        return context.own(self.positions(*context.whole((rows["tokens"], rows.get("segments")))))

    def layer_args(self, rows: Batch, context: Context = ALONE) -> tuple[Array | None, ...]:
        """Returns the additional inputs of every layer: noise, the angles of its positions, and the segments.

        These are float32, exact below 2**24, because the arguments of `scan_layers` must be floats.
        """
        noise_BT2, segments_BT = (context.whole(rows.get(name)) for name in ("noise", "segments"))
        return noise_BT2, None, None if segments_BT is None else segments_BT.astype(jnp.float32)

    @property
    def period(self) -> int:
        """Number of layers after which they are the same again; 0: all are the same."""
        return self.config.num_layers if self.config.drops else 0

    def run_layers(
        self, params: Params, x: PyTree, gather: Gather, *args: Array | None, stage: Array | int = 0, **how: Any
    ) -> PyTree:
        """Returns `x` after all layers. Layers that differ also pass on the number of the next entry of the stack."""
        if not self.period:
            return super().run_layers(params, x, gather, *args, **how)
        count = length(params["layers"])
        before = stage * count if count % self.period else 0  # otherwise all stages begin alike
        return super().run_layers(params, (x, jnp.float32(before)), gather, *args, **how)[0]

    def run_layer(self, values: GroupParams, x: PyTree, *args: Array | None, **how: Any) -> PyTree:
        """Returns the output of an entry of the stack."""
        noise_BT2, *others = args
        if not self.period:
            return super().run_layer(values, x, *others, **how)
        (x, number), layer = x, self.module("layers", values)
        if noise_BT2 is not None:
            blocks = layer.blocks()
            for i, block in enumerate(blocks):
                block.dropout = Dropout(self.config, noise_BT2, number * len(blocks) + i, how.get("context", ALONE))
        return layer(x, *self.args_of_layer(number, *others), **how), number + 1

    def args_of_layer(self, number: Array, *args: Array | None) -> tuple[Array | None, ...]:
        """Returns the additional inputs of the layer `number`."""
        del number
        return args

    def project(self, values: GroupParams, embed_values: GroupParams, x_BTD: Array) -> Array:
        """Returns float32 logits `[B, T, V]` for the last layer's output, with probability 0 for padding ids.

        `values` and `embed_values` are the gathered parameters of `head` and `embed`.
        """
        logits_BTV = self.module("head", values)(x_BTD, self.module("embed", embed_values))
        return mask_padding(logits_BTV, self.config.vocab_size)

    def logits(self, params: Params, tokens_BT: Array, gather: Gather, segments_BT: Array | None = None) -> Array:
        """Returns float32 logits `[B, T, V]` for the token to predict at each position; padding ids have probability 0.

        With `segments`, ascending document numbers within a row, each document is a separate sequence: attention stays
        inside it, and its positions begin at 0.
        """
        embed_values = gather("embed", params["embed"])
        rows = {"tokens": tokens_BT} | ({} if segments_BT is None else {"segments": segments_BT})
        x_BTD = self.run(params, embed_values, rows, gather)
        return self.project(gather("head", params["head"]), embed_values, x_BTD)

    def run(self, params: Params, embed_values: GroupParams, rows: Batch, gather: Gather) -> Array:
        """Returns the last layer's output `[B, T, D]`."""
        context = context_of(gather)
        x_BTD = self.embed(embed_values, rows, context)
        return self.run_layers(params, x_BTD, gather, *self.layer_args(rows, context), context=context)

    def loss(self, params: Params, batch: Batch, gather: Gather) -> Array:
        """Returns the weighted sum of the tokens' cross-entropies in nats, a float32 scalar.

        `batch` holds ids `tokens` `[B, T]` and `targets` `[B, T]`, float32 `weights` `[B, T]`, and with a
        `data.packing` of documents `segments` `[B, T]`. With float32 `noise` `[B, T, 2]` the model's dropout applies.
        """
        embed_values = gather("embed", params["embed"])
        x_BTD = self.run(params, embed_values, batch, gather)
        return self.cross_entropy(gather("head", params["head"]), embed_values, x_BTD, batch)

    def cross_entropy(self, values: GroupParams, embed_values: GroupParams, x_BTD: Array, batch: Batch) -> Array:
        """Returns the weighted sum of the cross-entropies of `project`, in chunks if the logits are many."""

        def of_piece(params: tuple[GroupParams, GroupParams], x_BCD: Array, rows: Mapping[str, Array]) -> Array:
            return cross_entropy(self.project(*params, x_BCD), rows["targets"], rows["weights"])

        rows = {name: batch[name] for name in ("targets", "weights")}
        length = piece_length(x_BTD.shape[0], x_BTD.shape[1], self.config.padded_vocab)
        is_frozen = bool(self.config.lora_rank) and not self.config.lora_embeddings
        return sum_of_pieces(of_piece, (values, embed_values), x_BTD, rows, length, frozen=is_frozen)

    def staged_loss(self) -> StagedLoss | None:
        """Returns the loss in parts: the embedding, the layers, the head and the cross-entropies.

        None for a model whose objective has further terms.
        """
        if type(self).objective is not Model.objective:
            return None

        def between(rows: Batch) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*rows["tokens"].shape, self.config.hidden), self.dtype)

        def begin(first: Mapping[str, GroupParams], rows: Batch, gather: Gather) -> Array:
            return self.embed(first["embed"], rows, context_of(gather))

        def layers(params: Params, x_BTD: Array, rows: Batch, gather: Gather, stage: Array) -> Array:
            context = context_of(gather)
            return self.run_layers(params, x_BTD, gather, *self.layer_args(rows, context), stage=stage, context=context)

        def loss(last: Mapping[str, GroupParams], x_BTD: Array, rows: Batch) -> Array:
            return self.cross_entropy(last["head"], last["embed"], x_BTD, rows)

        return StagedLoss(
            first=("embed",), last=("embed", "head"), between=between, begin=begin, layers=layers, loss=loss
        )

    def flops_per_row(self, shape: tuple[int, ...]) -> float:
        """Returns the floating-point operations per sequence `[T]`, forward and backward."""
        (seq_len,) = shape
        return self.flops_per_token(seq_len) * seq_len

    def flops_per_token(self, seq_len: int) -> float:
        """Returns the floating-point operations per token, forward and backward, in sequences of `seq_len` tokens.

        `6 N + 12 L D T` for N parameters in matrix products, L layers, D the width of all heads, T tokens: 2 operations
        per parameter forward, 4 backward. Attention scores and the weighted values cost `4 T D` per layer forward.
        Causality does not halve this (Chowdhery et al. 2022, arXiv 2204.02311, B), but a window shorter than T replaces
        T. Recomputation does not count. For `N = 12 L D^2 + V D` this is the MiCS paper's `96 T l L h^2 (1 + l/6h +
        V/16Lh)` without recomputation. A frozen parameter's gradient is not computed: 4 instead of 6.
        """
        c = self.config
        width = c.num_heads * c.head_size
        frozen = self.num_params - self.num_trained
        of_products = 6 * (self.num_params - self.num_lookup_params)
        if frozen:
            of_products -= 2 * (frozen - self.num_lookup_params)
        return of_products + 12 * width * self.attended(seq_len)

    def attended(self, seq_len: int) -> int:
        """Returns the largest number of positions that a token attends to, summed over the layers."""
        return self.config.num_layers * seq_len
