"""A pipeline over the mesh axis `stage`: its stages hold consecutive layers, and micro-batches travel through them.

The schedule is 1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473) in
lockstep: in a tick every stage runs one micro-batch forward and another one backward, and hands the results to its
neighbours. With S stages, stage s runs micro-batch i forward in tick `i + s` and backward in tick `i + 2 (S - 1) - s`.
So only forwards fill the pipeline, S - 1 ticks; only backwards empty it, S - 1 ticks; and between them lie A ticks with
both, for A micro-batches. A stage keeps the inputs of `2 S - 3` micro-batches at most, however large A is; the first
one has its rows as input.

A step therefore gathers every layer of a stage 3 (A + S - 1) times, reduce-scatters it A + S - 1 times, and computes as
much as 5 (A + S - 1) forward passes (`model.remat=full`); without a pipeline these are 2 A, A and 4 A.

A stage without a micro-batch in a tick runs on any available input, because the time is lost anyway. The first stage
runs on the nearest micro-batch, the others on zeros, on an old input or on the output of an idle neighbour. This adds
nothing to the gradients, because the cotangents of these outputs are zeros. Everything here runs inside a `shard_map`
whose axis `stage` is manual.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sharding.coded import as_integers
from sharding.collectives import vary
from sharding.experts import Gather
from sharding.gradients import MicroStepLoop, PlainLoop, accumulating, before_micro_steps, micro_loss, tied
from sharding.mesh import STAGE
from sharding.plan import ShardingPlan
from sharding.trees import Axes, Batch, Grads, Means, Params, PyTree

Forward = Callable[[jax.Array, Batch, jax.Array], jax.Array]  # (input, micro-batch, tick) -> output
# (sums, input, its micro-batch, cotangent of the output, 1 if its loss counts or else 0, tick)
# -> (sums, cotangent of the input, the loss)
Backward = Callable[[Grads, jax.Array, Batch, jax.Array, jax.Array, jax.Array], tuple[Grads, jax.Array, jax.Array]]


@dataclass(frozen=True, kw_only=True)
class StagedLoss:
    """A loss in three pieces around a stack of layers, so that the stages of a pipeline can share it.

    The parameters outside the stack are on every stage; `first` and `last` name the groups of them that the first stage
    needs for its rows, and the last one for the loss.
    """

    first: tuple[str, ...]
    last: tuple[str, ...]
    between: Callable[[Batch], jax.ShapeDtypeStruct]  # rows -> the shape and dtype of the stages' outputs
    # (gathered groups of `first`, rows, gather) -> the first input
    begin: Callable[[Mapping[str, PyTree], Batch, Gather], jax.Array]
    # (parameters, input, rows, gather, number of the stage) -> output
    layers: Callable[[Params, jax.Array, Batch, Gather, jax.Array], jax.Array]
    loss: Callable[[Mapping[str, PyTree], jax.Array, Batch], jax.Array]  # (gathered groups of `last`, output, rows)

    def forward(self, params: Params, x: jax.Array, rows: Batch, gather: Gather) -> jax.Array:
        """Returns a stage's output, like its input `[rows, ...]`."""
        return self._output({name: gather(name, params[name]) for name in self.first}, params, x, rows, gather)

    def with_loss(self, params: Params, x: jax.Array, rows: Batch, gather: Gather) -> tuple[jax.Array, jax.Array]:
        """Returns a stage's output `[rows, ...]` and the loss, f32 [], on all but the last stage 0."""
        gathered = {name: gather(name, params[name]) for name in dict.fromkeys(self.first + self.last)}
        y = self._output({name: gathered[name] for name in self.first}, params, x, rows, gather)
        last = {name: gathered[name] for name in self.last}
        axes = jax.typeof(y).manual_axis_type.varying
        loss = lax.cond(
            _is_last(), lambda: vary(self.loss(last, y, rows), tuple(axes)), lambda: vary(jnp.zeros(()), tuple(axes))
        )
        return y, loss

    def zeros(self, batch: Batch, axes: Axes) -> jax.Array:
        """Returns zeros `[rows, ...]` like the stages' outputs, typed as differing over `axes`."""
        like = self.between({name: x[0] for name, x in batch.items()})
        return vary(jnp.zeros(like.shape, like.dtype), axes)

    def _output(
        self, first: Mapping[str, PyTree], params: Params, x: jax.Array, rows: Batch, gather: Gather
    ) -> jax.Array:
        axes = tuple(jax.typeof(x).manual_axis_type.varying)
        stage = lax.axis_index(STAGE)
        x = lax.cond(stage == 0, lambda: vary(self.begin(first, rows, gather), axes), lambda: x)
        return self.layers(params, x, rows, gather, stage)


def forward_and_backward(
    forward: Forward, backward: Backward, sums: Grads, batch: Batch, zeros: jax.Array
) -> tuple[Grads, jax.Array]:
    """Runs micro-batches `[accum, rows, ...]` through the stages and back; returns the sums, and the loss on the last.

    `zeros` are like the stages' outputs.
    """
    num_stages, count = lax.axis_size(STAGE), batch["weights"].shape[0]
    stage, slots = lax.axis_index(STAGE), 2 * num_stages - 3

    def run_forward(x: jax.Array, kept: jax.Array, tick: jax.Array) -> tuple[jax.Array, jax.Array]:
        i = tick - stage
        kept = lax.dynamic_update_index_in_dim(kept, x, i % slots, 0)
        return hand_on(forward(x, rows_of(batch, i), tick), 1), kept

    def run_backward(g: jax.Array, kept: jax.Array, sums: Grads, tick: jax.Array) -> tuple[jax.Array, Grads, jax.Array]:
        i = tick - (2 * (num_stages - 1) - stage)
        x = lax.dynamic_index_in_dim(kept, i % slots, keepdims=False)
        counts = _is_last() & (i >= 0) & (i < count)
        sums, g, loss = backward(sums, x, rows_of(batch, i), g, counts.astype(jnp.float32), tick)
        return hand_on(g, -1), sums, jnp.where(counts, loss, 0)

    def fill(carry: tuple[jax.Array, jax.Array], tick: jax.Array) -> tuple[PyTree, None]:
        return run_forward(*carry, tick), None

    def both(carry: tuple[PyTree, ...], tick: jax.Array) -> tuple[PyTree, None]:
        x, kept, g, sums, value = carry
        x, kept = run_forward(x, kept, tick)
        g, sums, loss = run_backward(g, kept, sums, tick)
        return (x, kept, g, sums, value + loss), None

    def empty(carry: tuple[PyTree, ...], tick: jax.Array) -> tuple[PyTree, None]:
        kept, g, sums = carry
        g, sums, _ = run_backward(g, kept, sums, tick)
        return (kept, g, sums), None

    value = vary(jnp.zeros(()), tuple(jax.typeof(zeros).manual_axis_type.varying))
    kept = jnp.broadcast_to(zeros, (slots, *zeros.shape))
    full, end = num_stages - 1, count + num_stages - 1
    (x, kept), _ = lax.scan(fill, (zeros, kept), jnp.arange(full))
    (_, kept, g, sums, value), _ = lax.scan(both, (x, kept, zeros, sums, value), jnp.arange(full, end))
    (_, _, sums), _ = lax.scan(empty, (kept, g, sums), jnp.arange(end, end + full))
    return sums, value


def only_forward(
    forward: Callable[[jax.Array, Batch], tuple[jax.Array, jax.Array]], batch: Batch, zeros: jax.Array
) -> jax.Array:
    """Runs micro-batches `[accum, rows, ...]` through the stages; returns the losses' sum on the last stage."""
    num_stages, count = lax.axis_size(STAGE), batch["weights"].shape[0]

    def run(carry: tuple[jax.Array, jax.Array], tick: jax.Array) -> tuple[PyTree, None]:
        x, value = carry
        i = tick - lax.axis_index(STAGE)
        y, loss = forward(x, rows_of(batch, i))
        return (hand_on(y, 1), value + jnp.where(_is_last() & (i >= 0), loss, 0)), None

    value = vary(jnp.zeros(()), tuple(jax.typeof(zeros).manual_axis_type.varying))
    return lax.scan(run, (zeros, value), jnp.arange(count + num_stages - 1))[0][1]


def rows_of(batch: Batch, i: jax.Array) -> Batch:
    """Returns micro-batch `i`, `[rows, ...]`, or the nearest that exists."""
    last = batch["weights"].shape[0] - 1
    return {name: lax.dynamic_index_in_dim(x, jnp.clip(i, 0, last), keepdims=False) for name, x in batch.items()}


@jax.named_scope("pipeline")
def hand_on(x: jax.Array, by: int) -> jax.Array:
    """Sends `x` `[...]` to the stage `by` further on; the stage to which none sends gets zeros."""
    stages = range(lax.axis_size(STAGE))
    pairs = [(s, s + by) for s in stages if s + by in stages]
    return as_integers(lambda x: lax.ppermute(x, STAGE, pairs), x)


def _is_last() -> jax.Array:
    return lax.axis_index(STAGE) == lax.axis_size(STAGE) - 1


def through_stages(
    loss: StagedLoss, plan: ShardingPlan, params: Params, batch: Batch, total: jax.Array, loop: MicroStepLoop
) -> tuple[Grads, Means]:
    """Runs the micro-steps of a loss in pieces: micro-batches travel through the stages, and no gradient is sent.

    `partial(through_stages, loss)` are MicroSteps.
    """
    assert isinstance(loop, PlainLoop)
    gathered, sums = before_micro_steps(plan, params)

    def forward(x: jax.Array, rows: Batch, tick: jax.Array) -> jax.Array:
        run = lambda params, rows, gather: loss.forward(params, x, rows, gather)
        return micro_loss(run, plan, tied(plan, gathered, tick), rows)

    def backward(
        sums: Grads, x: jax.Array, rows: Batch, g: jax.Array, counts: jax.Array, tick: jax.Array
    ) -> tuple[Grads, jax.Array, jax.Array]:
        used = tied(plan, gathered, tick)

        def stage(sums: Grads, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            run = lambda params, rows, gather: loss.with_loss(params, x, rows, gather)
            y, value = micro_loss(run, plan, accumulating(plan, used, sums), rows)
            return y, value / total

        (_, value), pullback = jax.vjp(stage, sums, x)
        sums, g = pullback((g, vary(counts, plan.layout.varying_axes)))
        return sums, g, value

    zeros = loss.zeros(batch, plan.layout.varying_axes)
    sums, value = forward_and_backward(forward, backward, sums, batch, zeros)
    with jax.named_scope("pipeline"):  # what is on every stage: the first and the last one add to it
        grads = plan.map(lambda p, g: g if p.staged else lax.psum(g, STAGE), sums)
    return grads, {"loss": value}


def evaluated(loss: StagedLoss) -> Callable[[ShardingPlan, Params, Batch, Gather], Means]:
    """Returns the sum, f32 [], of the losses of all micro-batches, run through the stages; all but the last know 0."""

    def sums(plan: ShardingPlan, params: Params, batch: Batch, gather: Gather) -> Means:
        zeros = loss.zeros(batch, plan.layout.varying_axes)
        return {"loss": only_forward(lambda x, rows: loss.with_loss(params, x, rows, gather), batch, zeros)}

    return sums
