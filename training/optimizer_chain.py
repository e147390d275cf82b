"""The optax chain of a run: the replica all-reduce, guard, clipping and the optimizer; or local SGD around them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from compression.all_reduce import AllReduceMethod, Setup, unless_not_finite
from compression.exchange import exchange
from compression.local_sgd import IndependentLocalSGD, LocalSGD, StreamingLocalSGD
from compression.methods import method_named
from compression.statistics import RESIDUAL_NORM, State, statistics
from compression.timings import Delayed, Overlapped
from compression.weight_differences import WeightDifferences
from configs.schema import Config
from configs.schema.own import OWN
from sharding.averages import part_averages
from sharding.plan import ShardingPlan
from sharding.redistribute import on_whole_tensors
from sharding.state import Cut, OnTrueShapes
from sharding.step import AfterMicroSteps, AllReduce, Optimizer, States, Timing
from sharding.trees import Specs
from training.loss_scale import first_scale, guard_of, with_loss_scale
from training.optimizers import beside_averages, make_optimizer

# with local SGD the largest value of all replicas is reported (the norm of all residuals), after the last step
WATCHED = ("grad_norm", "update_norm", "skipped_in_a_row", "skipped_steps", RESIDUAL_NORM)


def make_chain(config: Config, plan: ShardingPlan, specs: Specs) -> Timing:
    """Returns the replica all-reduce and the optimizer, or local SGD around both; for float16 with loss scaling.

    Independent replicas average their gradients outside the step, so their chain has no replica all-reduce.
    """
    if config.sharding.replicas == "independent":
        config = replace(config, compression=replace(config.compression, all_reduce="none"))
    timing = _make_timing(config, plan, specs)
    return with_loss_scale(timing, first_scale(config.batch)) if plan.compute_dtype == jnp.float16 else timing


def _make_timing(config: Config, plan: ShardingPlan, specs: Specs) -> Timing:
    compression, optimizer, local = config.compression, config.optimizer, config.local_sgd
    setup = Setup(compression=compression, optimizer=optimizer, plan=plan, specs=specs)
    method = method_named(compression.all_reduce)
    all_reduce, downstream = _all_reduce(method, setup), method.downstream(optimizer)
    whole = partial(on_whole_tensors, plan)
    inner: Optimizer = OnTrueShapes(plan, make_optimizer(downstream, config.num_steps, specs, on_whole=whole))
    if plan.sends_differences:
        inner = WeightDifferences(plan, inner)
    watching = partial(watch, hands_on="update" if method.takes_over else "grad", each=bool(local.inner_steps))
    if local.inner_steps:
        parts = all_reduce, inner, local, plan.layout.num_replicas, watching
        if config.sharding.replicas == "independent":
            return IndependentLocalSGD(*parts)
        return StreamingLocalSGD(*parts, by_group=method.by_group(setup)) if local.streaming else LocalSGD(*parts)
    if not method.runs_in_micro_steps(setup):
        return AfterMicroSteps(all_reduce, inner, watching)
    in_step = Delayed if compression.delayed else Overlapped
    return in_step(all_reduce, inner, watching, by_group=method.by_group(setup))


def cut_of(name: str) -> Cut:
    """Returns how the optimizer `name` cuts its arrays that have no parameter's shape.

    Built-in optimizers keep small ones, whole on every device (Adafactor's factors). A registered optimizer declares
    how, or gets a ValueError.
    """
    if name not in OWN["optimizer"]:
        return lambda path, shape: None

    def refuse(path: str, shape: tuple[int, ...]) -> int | None:
        raise ValueError(
            f"optimizer.name={name} keeps {path} {list(shape)}, which has no parameter's shape and would lie whole on "
            f"every device; declare how it is cut: {name}.cut = lambda path, shape: dim (None: whole)"
        )

    return getattr(OWN["optimizer"][name], "cut", refuse)


def _all_reduce(method: AllReduceMethod, setup: Setup) -> AllReduce:
    """Returns the method's transform for a run; running averages bypass a method that takes the optimizer's place.

    It would give them a momentum. All other methods take their mean as it is, because they are vectors.
    """
    placements, averages = part_averages(setup.plan.placements)
    if not (averages and method.takes_over):
        return method.transform(setup)
    specs, _ = part_averages(setup.specs)
    all_reduce = method.transform(replace(setup, plan=replace(setup.plan, placements=placements), specs=specs))
    plain = exchange(replace(setup.plan, placements=averages))
    # around both: a step is skipped for an average that is not finite too
    return unless_not_finite(beside_averages(all_reduce, lambda updates, params: plain.update(updates, State())[0]))


def watch(states: States, *, hands_on: str = "grad", each: bool = False) -> dict[str, jax.Array]:
    """Returns logged scalars of the replica all-reduce and the optimizer; with `each` per replica, `[R]`.

    `hands_on`: the replica all-reduce's result, whose norm the guard computes: `grad` or `update`.
    """
    all_reduce, opt_state = states
    guard = guard_of(opt_state)
    scalars = {
        f"{hands_on}_norm": guard.grad_norm,
        "skipped_in_a_row": guard.skipped_in_a_row,
        "skipped_steps": guard.skipped,
    }
    return scalars | statistics(all_reduce, each=each)


def of_all_replicas(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the metrics of all replicas from each replica's metrics, `[R]`; a scalar is all replicas' already.

    Results of `watch` have their maximum, residuals their norm, the model's sums the mean by `weight`.
    """
    weight = jnp.sum(metrics["weight"]) if "weight" in metrics else 1.0

    def of_all(name: str, x_R: jax.Array) -> jax.Array:
        if name == RESIDUAL_NORM:
            return jnp.linalg.norm(x_R)
        return jnp.max(x_R) if name in WATCHED else jnp.sum(x_R) / jnp.where(weight > 0, weight, 1)

    return {name: of_all(name, x) if x.ndim else x for name, x in metrics.items() if name != "weight"}
