"""A decoder with experts in place of MLPs, in each layer or in every other one.

For each token the MLP is one of several experts (GShard, arXiv 2006.16668; Switch, arXiv 2101.03961). Embedding, head,
attention and sampler come from `models/decoder.py`.

With a `capacity_factor` a row is a group in GShard's sense: its tokens compete for the same capacity of the experts,
and other rows do not. Without one each expert takes all tokens that choose it (models/dropless.py), as open models do.
The tokens that an expert takes therefore depend neither on the number of devices nor on the split into micro-steps.

Shapes: B rows, T positions, D hidden, F intermediate, E experts, C capacity (tokens of a row that an expert takes),
S = E C slots, k choices of a token, n = k T choices of a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import MoeConfig
from models.block import Attention, Block, BlockConfig, Mlp, gated, gelu, initial_std, normal, residual_std
from models.decoder import Decoder
from models.dropless import send_to_all_chosen
from models.lora import ADAPTERS, Adapter
from models.model import Batch, Gather, GroupParams, Params
from sharding.experts import ALONE, TokenExchange, exchange_of, keep
from sharding.spec import EXPERTS_DIM, is_spec
from sharding.state import by_name

AUX = ("balance_loss", "z_loss", "dropped_share")
Aux = dict[str, Array]  # keys are AUX, values are float32 scalars, summed over rows and layers


class Routes(NamedTuple):
    """The assignment of each row's tokens to slots."""

    token_BS: Array  # int32: the token in each slot, slots in the order of the experts; T: the slot is empty
    slot_BkT: Array  # int32: the slot of each choice; S: the choice is dropped

    @property
    def dropped_BT(self) -> Array:
        """The share of each token's choices that are dropped, float32."""
        return jnp.mean(self.slot_BkT == self.token_BS.shape[-1], axis=1, dtype=jnp.float32)


class Experts(nnx.Module):
    """The MLPs of E experts. Each matrix may have a bias and an adapter (models/lora.py)."""

    up_adapter: Adapter | None = None
    gate_adapter: Adapter | None = None
    down_adapter: Adapter | None = None

    def __init__(self, config: BlockConfig, num_experts: int, key: Array, *, use_bias: bool) -> None:
        c, e = config, num_experts
        up_key, gate_key, down_key = jax.random.split(key, 3)
        std, dims = initial_std(c.hidden), ("experts", "embed", "mlp")
        self.activation = c.activation
        self.up = normal(up_key, (e, c.hidden, c.intermediate), dims, std)
        self.gate = normal(gate_key, (e, c.hidden, c.intermediate), dims, std) if c.is_gated else None
        self.down = normal(down_key, (e, c.intermediate, c.hidden), ("experts", "mlp", "embed"), residual_std(c))

        def bias(size: int, dim: str) -> nnx.Param[Array] | None:
            return nnx.Param(jnp.zeros((e, size)), dims=("experts", dim)) if use_bias else None

        self.up_bias, self.down_bias = bias(c.intermediate, "mlp"), bias(c.hidden, "embed")
        self.gate_bias = bias(c.intermediate, "mlp") if c.is_gated else None

    def __call__(self, x: Array, product: Callable[[Array, Array], Array]) -> Array:
        """Returns the outputs of the local experts for inputs `[..., D]`.

        `product(x, w)` multiplies each row by its expert's matrix. A bias is a `[E, 1, F]` matrix times a column of
        ones.
        """

        def multiply(x: Array, weight: Array, bias: nnx.Param[Array] | None, adapter: Adapter | None) -> Array:
            y = product(x, weight)
            if bias is not None:
                y = y + product(jnp.ones_like(x[..., :1]), bias[...][:, None])
            if adapter is not None:
                y = y + product(product(x, adapter.lora_a[...]), adapter.lora_b[...]) * adapter.lora_scale
            return keep(y)

        h = multiply(x, self.up[...], self.up_bias, self.up_adapter)
        if self.gate is None:
            h = gelu(h, self.activation)
        else:
            h = gated(multiply(x, self.gate[...], self.gate_bias, self.gate_adapter), h, self.activation)
        return multiply(h, self.down[...], self.down_bias, self.down_adapter)


class SharedExpert(Mlp):
    """An MLP that takes all tokens, weighted by a sigmoid that is computed in float32 (Qwen 2, arXiv 2407.10671)."""

    def __init__(self, config: BlockConfig, key: Array) -> None:
        router_key, *keys = jax.random.split(key, 4)
        self.make_mlp(config, iter(keys))
        self.activation = config.activation
        self.router = normal(router_key, (config.hidden, 1), ("embed", "router"), initial_std(config.hidden))

    def __call__(self, y_BTD: Array) -> Array:
        gate_BT1 = jax.nn.sigmoid(y_BTD.astype(jnp.float32) @ self.router[...].astype(jnp.float32))
        return gate_BT1.astype(y_BTD.dtype) * self.mlp(y_BTD, self.activation)


class MoeBlock(Attention):
    """One layer with experts in place of the MLP. The router computes in float32 (Switch, section 2.4)."""

    def __init__(self, config: BlockConfig, moe: MoeConfig, key: Array) -> None:
        *keys, router_key, experts_key = jax.random.split(key, 6)
        super().__init__(config, iter(keys))
        self.moe = moe
        self.router = normal(
            router_key, (config.hidden, moe.num_experts), ("embed", "router"), initial_std(config.hidden)
        )
        self.router_bias = nnx.Param(jnp.zeros(moe.num_experts), dims=("router",)) if moe.expert_bias else None
        self.experts = Experts(config, moe.num_experts, experts_key, use_bias=moe.expert_bias)
        shared = replace(config, intermediate=moe.shared_intermediate)
        self.shared = SharedExpert(shared, jax.random.fold_in(key, 6)) if moe.shared_intermediate else None

    def __call__(
        self,
        x_BTD: Array,
        angles_BTH: Array | None,
        segments_BT: Array | None,
        weights_BT: Array,
        real_BT: Array,
        is_global: Array | None = None,
        exchange: TokenExchange = ALONE,
    ) -> tuple[Array, Aux]:
        """Returns the layer's output and its auxiliary sums. Tokens that are not `real` go to no expert."""
        mixed_BTNH = self.mix(x_BTD, angles_BTH, segments_BT, is_global)
        return self.finish(x_BTD, mixed_BTNH, weights_BT, real_BT, exchange)

    def finish(
        self, x_BTD: Array, mixed_BTNH: Array, weights_BT: Array, real_BT: Array, exchange: TokenExchange = ALONE
    ) -> tuple[Array, Aux]:
        """Returns the layer's output, from its input and the weighted values of attention, and its auxiliary sums."""
        x_BTD, y_BTD = self.attend(x_BTD, mixed_BTNH)
        logits_BTE = jnp.einsum("btd,de->bte", y_BTD.astype(jnp.float32), self.router[...].astype(jnp.float32))
        if self.router_bias is not None:
            logits_BTE = logits_BTE + self.router_bias[...].astype(jnp.float32)[None, None]
        probs_BTE = jax.nn.softmax(logits_BTE)
        gates_BTk, choices_BTk = choose(probs_BTE, self.moe)
        if self.moe.capacity_factor:
            routes = route(choices_BTk, real_BT > 0, self.moe.num_experts, self.moe.capacity(x_BTD.shape[1]))
            sent_BTD = self._send(y_BTD, gates_BTk, routes, exchange)
            counted_BTk, dropped_BT = choices_BTk[..., :1], routes.dropped_BT
        else:
            sent_BTD = send_to_all_chosen(self.experts, y_BTD, gates_BTk, choices_BTk, real_BT, exchange)
            counted_BTk, dropped_BT = choices_BTk, jnp.zeros_like(weights_BT)
        if self.shared is not None:
            sent_BTD = sent_BTD + self.shared(y_BTD)
        aux = aux_sums(logits_BTE, probs_BTE, counted_BTk, dropped_BT, weights_BT)
        return self.add(x_BTD, sent_BTD), aux

    def decode(self, x_BTD: Array, mixed_BTNH: Array, gather: Gather) -> Array:
        """Returns the layer's output for tokens of weight 1."""
        ones_BT = jnp.ones(x_BTD.shape[:2])
        return self.finish(x_BTD, mixed_BTNH, ones_BT, ones_BT, exchange_of(gather))[0]

    def _send(self, y_BTD: Array, gates_BTk: Array, routes: Routes, exchange: TokenExchange) -> Array:
        """Returns the weighted sum of the outputs of each token's experts, where a dropped choice contributes zero."""
        (batch, length, hidden), num_experts = y_BTD.shape, self.moe.num_experts
        slots_BSD = _rows(y_BTD, routes.token_BS)
        inputs = exchange.there(slots_BSD.reshape(batch, num_experts, -1, hidden).swapaxes(0, 1))
        assert inputs.shape[0] == self.experts.up.shape[0], "the gather has divided experts, and brings no exchange"
        outputs = self.experts(inputs.reshape(inputs.shape[0], -1, hidden), _batched).reshape(inputs.shape)
        outputs_BSD = exchange.back(outputs).swapaxes(0, 1).reshape(slots_BSD.shape)
        chosen_BnD = _rows(outputs_BSD, routes.slot_BkT.reshape(batch, -1))
        chosen_BkTD = chosen_BnD.reshape(batch, -1, length, hidden)
        gates_BkT = gates_BTk.swapaxes(1, 2)
        return jnp.sum(chosen_BkTD * gates_BkT[..., None].astype(y_BTD.dtype), axis=1)


def _batched(x_END: Array, weight_EDF: Array) -> Array:
    return jnp.einsum("end,edf->enf", x_END, weight_EDF)


def choose(probs_BTE: Array, config: MoeConfig) -> tuple[Array, Array]:
    """Returns the weights and the numbers, int32, of each token's experts `[B, T, k]`, the most probable first.

    The weight of an expert is its probability, divided by the sum of the probabilities of the token's experts if there
    are several and the config has `normalise_gates`.
    """
    gates_BTk, choices_BTk = jax.lax.top_k(probs_BTE, config.experts_per_token)
    if config.normalise_gates and config.experts_per_token > 1:
        gates_BTk = gates_BTk / jnp.sum(gates_BTk, axis=-1, keepdims=True)
    return gates_BTk, choices_BTk


def route(choices_BTk: Array, real_BT: Array, num_experts: int, room: int) -> Routes:
    """Assigns each token to the experts that it chose, as far as their capacity, `room`, allows.

    Experts take the tokens of a row in order, all first choices before all second ones (GShard, algorithm 1, without
    its random dropping of second choices). Tokens that are not `real` are dropped and take no capacity.
    """
    batch, length, per_token = choices_BTk.shape
    choices_Bn = choices_BTk.swapaxes(1, 2).reshape(batch, -1)
    real_Bn = jnp.tile(real_BT, (1, per_token))
    takes_BnE = (choices_Bn[..., None] == jnp.arange(num_experts)[None, None]) & real_Bn[..., None]
    before_BnE = jnp.cumsum(takes_BnE, axis=1, dtype=jnp.int32) - takes_BnE
    before_Bn = jnp.take_along_axis(before_BnE, choices_Bn[..., None], axis=-1)[..., 0]
    num_slots = num_experts * room
    slot_Bn = jnp.where(real_Bn & (before_Bn < room), choices_Bn * room + before_Bn, num_slots)
    tokens_n = jnp.tile(jnp.arange(length, dtype=jnp.int32), per_token)
    empty_BS = jnp.full((batch, num_slots), length, jnp.int32)
    token_BS = empty_BS.at[jnp.arange(batch)[:, None], slot_Bn].set(tokens_n[None], mode="drop")
    return Routes(token_BS, slot_Bn.reshape(batch, per_token, length))


def real_tokens(weights_BT: Array, segments_BT: Array | None) -> Array:
    """Returns float32 `[B, T]`, above 0 for all tokens except padding, whose segment (or token) has no weight at all.

    A token of weight 0 in another segment, for example in a prompt, is real, because weighted tokens attend to it.
    """
    if segments_BT is None:
        return weights_BT
    most_BT = jax.vmap(partial(jax.ops.segment_max, num_segments=weights_BT.shape[1]))(weights_BT, segments_BT)
    return jnp.take_along_axis(most_BT, segments_BT, axis=1)


def aux_sums(logits_BTE: Array, probs_BTE: Array, counted_BTk: Array, dropped_BT: Array, weights_BT: Array) -> Aux:
    """Returns a layer's sums, weighted by the tokens' weights: `balance_loss`, `z_loss` and `dropped_share`.

    Balance (Switch, equations 4 to 6; GShard's `l_aux` is this divided by E): E times the sum over experts of the
    fraction of the `counted` choices, times its mean probability. Both are over the tokens of a row, and the loss is 1
    if all experts are equal. The first choices count with a capacity, as in GShard, and all choices without (Mixtral's
    and Qwen's in transformers, divided by k). z (ST-MoE, arXiv 2202.08906, equation 5): the square of the logsumexp of
    the logits.
    """
    num_experts = probs_BTE.shape[-1]
    is_counted_BTkE = counted_BTk[..., None] == jnp.arange(num_experts)[None, None, None]
    chosen_BE = jnp.einsum("bt,bte->be", weights_BT, jnp.mean(is_counted_BTkE, axis=2, dtype=jnp.float32))
    likely_BE = jnp.einsum("bt,bte->be", weights_BT, probs_BTE)
    total_B = jnp.maximum(jnp.sum(weights_BT, axis=-1), jnp.finfo(jnp.float32).tiny)
    return {
        "balance_loss": num_experts * jnp.sum(jnp.sum(chosen_BE * likely_BE, axis=-1) / total_B),
        "z_loss": jnp.sum(weights_BT * jax.nn.logsumexp(logits_BTE, axis=-1) ** 2),
        "dropped_share": jnp.sum(weights_BT * dropped_BT),
    }


def _rows(x_BND: Array, index_BM: Array) -> Array:
    """Returns the rows of `x` `[B, N, D]` at `index`, `[B, M, D]`, with zeros at the index N."""
    return jnp.take_along_axis(x_BND, index_BM[..., None], axis=1, mode="fill", fill_value=0)


class MoeLayers(nnx.Module):
    """One entry of the stack: a layer with experts, preceded by a layer without if `moe_every = 2`."""

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
        real_BT: Array,
        is_global: Array | None = None,
        *,
        exchange: TokenExchange,
    ) -> tuple[Array, Aux]:
        """Returns the output `[B, T, D]`, and the auxiliary sums of the layers up to and including this one."""
        x_BTD, before = carry
        if self.dense is not None:
            x_BTD = self.dense(x_BTD, angles_BTH, segments_BT)
        x_BTD, aux = self.sparse(x_BTD, angles_BTH, segments_BT, weights_BT, real_BT, is_global, exchange)
        return x_BTD, jax.tree.map(jnp.add, before, aux)

    def blocks(self) -> list[Attention]:
        """Returns the layers of the entry."""
        return [self.sparse] if self.dense is None else [self.dense, self.sparse]


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

    def run(self, params: Params, embed_values: GroupParams, rows: Batch, gather: Gather) -> Array:
        """Returns the last layer's output `[B, T, D]` for tokens that all have weight 1."""
        ones_BT = jnp.ones(rows["tokens"].shape)
        return self._run(params, embed_values, rows, gather, ones_BT, ones_BT)[0]

    def _run(
        self, params: Params, embed_values: GroupParams, rows: Batch, gather: Gather, weights_BT: Array, real_BT: Array
    ) -> tuple[Array, Aux]:
        """Returns the last layer's output, and the auxiliary sums over rows, averaged over the layers with experts."""
        x_BTD = self.embed(embed_values, rows)
        zero = jnp.sum(x_BTD[:, 0, 0]).astype(jnp.float32) * 0  # from data: a shard_map sees it vary like later sums
        x_BTD, aux = self.run_layers(
            params,
            (x_BTD, dict.fromkeys(AUX, zero)),
            gather,
            *self.layer_args(rows),
            weights_BT,
            real_BT,
            exchange=exchange_of(gather),
        )
        return x_BTD, jax.tree.map(lambda x: x / self.config.num_moe_layers, aux)

    def loss(self, params: Params, batch: Batch, gather: Gather) -> Array:
        """Returns the weighted sum of the tokens' cross-entropies in nats, without the losses of the router."""
        return self.evaluate(params, batch, gather)["loss"]

    def evaluate(self, params: Params, batch: Batch, gather: Gather) -> dict[str, Array]:
        """Returns the weighted sums for a validation: the cross-entropy as `loss`, and `dropped_share`."""
        cross_entropies, aux = self._losses(params, batch, gather)
        return {"loss": cross_entropies, "dropped_share": aux["dropped_share"]}

    def objective(self, params: Params, batch: Batch, gather: Gather) -> tuple[Array, Aux]:
        """Returns the cross-entropy plus the weighted losses of all routers, and the metrics to log, as layer means."""
        c = self.config
        cross_entropies, aux = self._losses(params, batch, gather)
        of_routers = c.balance_loss * aux["balance_loss"] + c.z_loss * aux["z_loss"]
        return cross_entropies + c.num_moe_layers * of_routers, {"cross_entropy": cross_entropies} | aux

    def _losses(self, params: Params, batch: Batch, gather: Gather) -> tuple[Array, Aux]:
        embed_values, weights_BT = gather("embed", params["embed"]), batch["weights"]
        real_BT = real_tokens(weights_BT, batch.get("segments"))
        x_BTD, aux = self._run(params, embed_values, batch, gather, weights_BT, real_BT)
        return self.cross_entropy(gather("head", params["head"]), embed_values, x_BTD, batch), aux

    def warning(self, metrics: Mapping[str, float]) -> str:
        """Returns a warning if a step dropped more than `max_dropped`."""
        c, dropped = self.config, metrics.get("dropped_share", 0.0)  # missing in a start's first step, if delayed
        if dropped <= c.max_dropped:
            return ""
        return (
            f"warning: {dropped:.1%} of the tokens' choices found no room at their experts (model.max_dropped="
            f"{c.max_dropped}); raise model.capacity_factor={c.capacity_factor} or model.balance_loss={c.balance_loss}"
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Returns the floating-point operations per token as in a decoder, counting only the chosen experts."""
        c, of_all = self.config, 0
        for path, spec in by_name(self.plain_specs, is_spec).items():
            if EXPERTS_DIM in spec.dims:
                of_all += (4 if c.lora_rank and not path.endswith(ADAPTERS) else 6) * prod(spec.shape)
        return super().flops_per_token(seq_len) - of_all * (c.num_experts - c.experts_per_token) / c.num_experts
