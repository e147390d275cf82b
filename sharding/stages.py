"""The micro-steps of a pipeline: micro-batches that travel through the stages (sharding/pipeline.py)."""

from functools import partial

import jax
from jax import lax

from sharding.collectives import vary
from sharding.experts import Gather
from sharding.gradients import Means, MicroSteps, Params, accumulating, before_micro_steps, micro_loss, tied
from sharding.hop_two import Early, Sums
from sharding.mesh import STAGE
from sharding.pipeline import Batch, StagedLoss, forward_and_backward, only_forward
from sharding.plan import ShardingPlan


def through_stages(loss: StagedLoss) -> MicroSteps:
    """Returns the micro-steps of a loss in pieces; they exchange nothing early."""
    return partial(_micro_steps, loss)


def _micro_steps(
    loss: StagedLoss, plan: ShardingPlan, params: Params, batch: Batch, total: jax.Array, early: Early | None = None
) -> tuple[Sums, Means]:
    assert early is None
    gathered, sums = before_micro_steps(plan, params)

    def forward(x: jax.Array, rows: Batch, tick: jax.Array) -> jax.Array:
        run = lambda params, rows, gather: loss.forward(params, x, rows, gather)
        return micro_loss(run, plan, tied(plan, gathered, tick), rows)

    def backward(
        sums: Sums, x: jax.Array, rows: Batch, g: jax.Array, counts: jax.Array, tick: jax.Array
    ) -> tuple[Sums, jax.Array, jax.Array]:
        used = tied(plan, gathered, tick)

        def stage(sums: Sums, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            run = lambda params, rows, gather: loss.with_loss(params, x, rows, gather)
            y, value = micro_loss(run, plan, accumulating(plan, used, sums, None), rows)
            return y, value / total

        (_, value), pullback = jax.vjp(stage, sums, x)
        sums, g = pullback((g, vary(counts, plan.layout.varying_axes)))
        return sums, g, value

    zeros = loss.zeros(batch, plan.layout.varying_axes)
    sums, value = forward_and_backward(forward, backward, sums, batch, zeros)
    grads = plan.map(lambda p, g: g if p.staged else _sum_of_stages(g), sums.grads)
    return sums._replace(grads=grads), {"loss": value}


@jax.named_scope("pipeline")
def _sum_of_stages(grad: jax.Array) -> jax.Array:
    """Returns the gradient of a parameter that is on every stage: the first and the last one add to it."""
    return lax.psum(grad, STAGE)


def evaluated(
    loss: StagedLoss, plan: ShardingPlan, params: Params, batch: Batch, gather: Gather
) -> dict[str, jax.Array]:
    """Returns the sum of the losses of all micro-batches, run through the stages; all but the last know 0."""
    zeros = loss.zeros(batch, plan.layout.varying_axes)
    return {"loss": only_forward(lambda x, rows: loss.with_loss(params, x, rows, gather), batch, zeros)}
