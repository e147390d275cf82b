"""A decoder with experts in place of MLPs, in each layer or in every other one (GShard, Switch).

The layer is in `models/experts.py`; embedding, head, attention and sampler are those of `models/decoder.py`.

Shapes: B batch, T positions, D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import MoeConfig
from models.block import Block, BlockConfig
from models.decoder import Decoder
from models.experts import AUX, Aux, MoeBlock
from models.model import Batch, Gather, Params, cross_entropy
from sharding.experts import Exchange, exchange_of


class MoeLayers(nnx.Module):
    """One entry of the stack: a layer with experts, with `moe_every = 2` behind a layer without."""

    def __init__(self, config: MoeConfig, key: Array) -> None:
        dense_key, sparse_key = jax.random.split(key)
        settings = BlockConfig.of(config, causal=True)
        self.dense = Block(settings, dense_key) if config.moe_every == 2 else None
        self.sparse = MoeBlock(settings, config, sparse_key)

    def __call__(
        self,
        carry: tuple[Array, Aux],
        angles_BTH: Array | None,
        segments_BT: Array | None,
        weights_BT: Array,
        *,
        exchange: Exchange,
    ) -> tuple[Array, Aux]:
        """Returns the output `[B, T, D]`, and the auxiliary sums of the layers so far, this one included."""
        x_BTD, before = carry
        if self.dense is not None:
            x_BTD = self.dense(x_BTD, angles_BTH, segments_BT)
        x_BTD, aux = self.sparse(x_BTD, angles_BTH, segments_BT, weights_BT, exchange)
        return x_BTD, jax.tree.map(jnp.add, before, aux)


@dataclass(frozen=True)
class Moe(Decoder):
    """A decoder-only language model with experts."""

    config: MoeConfig

    def make_layer(self, key: Array) -> nnx.Module:
        """Returns an entry of the stack with new parameters."""
        return MoeLayers(self.config, key)

    @property
    def num_entries(self) -> int:
        """Length of the stack."""
        return self.config.num_moe_layers

    @property
    def num_idle_params(self) -> int:
        """Parameters that a token does not use: those of the experts that it does not go to."""
        c = self.config
        of_expert = (3 if c.activation == "swiglu" else 2) * c.hidden * c.intermediate
        return c.num_moe_layers * (c.num_experts - c.experts_per_token) * of_expert

    def logits(self, params: Params, tokens_BT: Array, gather: Gather, segments_BT: Array | None = None) -> Array:
        """Returns float32 logits `[B, T, V]` of the next token at each position; padding ids get probability 0."""
        return self.logits_and_aux(params, tokens_BT, gather, segments_BT, jnp.ones(tokens_BT.shape))[0]

    def logits_and_aux(
        self, params: Params, tokens_BT: Array, gather: Gather, segments_BT: Array | None, weights_BT: Array
    ) -> tuple[Array, Aux]:
        """Returns the logits, and the auxiliary sums over rows, as means over the layers with experts."""
        embed_values = gather("embed", params["embed"])
        x_BTD = self.embed(embed_values, tokens_BT, segments_BT)
        zero = jnp.sum(x_BTD[:, 0, 0]).astype(jnp.float32) * 0  # of data: a shard_map sees it vary like later sums
        x_BTD, aux = self.run_layers(
            params,
            (x_BTD, dict.fromkeys(AUX, zero)),
            gather,
            *self.layer_args(tokens_BT, segments_BT),
            weights_BT,
            exchange=exchange_of(gather),
        )
        means = jax.tree.map(lambda x: x / self.config.num_moe_layers, aux)
        return self.project(gather("head", params["head"]), embed_values, x_BTD), means

    def loss(self, params: Params, batch: Batch, gather: Gather) -> Array:
        """Returns the weighted sum of the tokens' cross-entropies in nats, without the losses of the router."""
        return self.evaluate(params, batch, gather)["loss"]

    def evaluate(self, params: Params, batch: Batch, gather: Gather) -> dict[str, Array]:
        """Returns the weighted sums for a validation: the cross-entropy as `loss`, and `dropped_share`."""
        cross_entropies, aux = self._losses(params, batch, gather)
        return {"loss": cross_entropies, "dropped_share": aux["dropped_share"]}

    def objective(self, params: Params, batch: Batch, gather: Gather) -> tuple[Array, Aux]:
        """Returns the cross-entropy plus the weighted losses of all routers; and it and the layers' means, to log."""
        c = self.config
        cross_entropies, aux = self._losses(params, batch, gather)
        of_routers = c.balance_loss * aux["balance_loss"] + c.z_loss * aux["z_loss"]
        return cross_entropies + c.num_moe_layers * of_routers, {"cross_entropy": cross_entropies} | aux

    def _losses(self, params: Params, batch: Batch, gather: Gather) -> tuple[Array, Aux]:
        logits_BTV, aux = self.logits_and_aux(params, batch["tokens"], gather, batch.get("segments"), batch["weights"])
        return cross_entropy(logits_BTV, batch["targets"], batch["weights"]), aux

    def warning(self, metrics: Mapping[str, float]) -> str:
        """Returns a line if a step dropped more than `max_dropped`."""
        c, dropped = self.config, metrics["dropped_share"]
        if dropped <= c.max_dropped:
            return ""
        return (
            f"warning: {dropped:.1%} of the tokens' choices found no room at their experts (model.max_dropped="
            f"{c.max_dropped}); raise model.capacity_factor={c.capacity_factor} or model.balance_loss={c.balance_loss}"
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Returns the operations per token as of a decoder, with the experts that a token goes to, and no others."""
        return super().flops_per_token(seq_len) - 6 * self.num_idle_params

    def blocks(self, layer: MoeLayers) -> list[Any]:
        """Returns the layers in one entry of the stack."""
        return [block for block in (layer.dense, layer.sparse) if block is not None]

    def finish(self, block: Any, x_BTD: Array, mixed_BTNH: Array, gather: Gather) -> Array:
        """Returns a layer's output from its input and the weighted values of attention."""
        if isinstance(block, Block):
            return block.finish(x_BTD, mixed_BTNH)
        return block.finish(x_BTD, mixed_BTNH, jnp.ones(x_BTD.shape[:2]), exchange_of(gather))[0]
