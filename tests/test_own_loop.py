"""The replica all-reduce in a user's loop gives a run's updates; the state of registered optimizers."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.examples import example_methods  # noqa: F401 (fixture)
from support.extending_page import LOOP
from support.planning import tiny_config

from compression.codecs import Blockwise
from compression.exchange import exchange
from configs.base import typed
from configs.register import register
from configs.schema.own import OWN
from sharding.gradients import accumulated, replica_gradients
from training.experiment import Experiment, make_experiment
from training.optimizer_chain import make_chain


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    OWN["optimizer"].clear()


@pytest.mark.slow
def test_the_listing_trains() -> None:
    found: dict[str, Any] = {}
    exec(LOOP, found)
    losses = [float(found["step"](found["params"], found["state"], found["batch"])[2])]
    for _ in range(2):
        found["params"], found["state"], loss = found["step"](found["params"], found["state"], found["batch"])
        losses.append(float(loss))
    assert losses[-1] < losses[0] < np.log(256)
    assert isinstance(found["tx"], optax.GradientTransformationExtraArgs)


@pytest.mark.slow
def test_in_a_plain_chain_it_gives_the_updates_of_a_run() -> None:
    """With AdamW behind it, without clipping and decay, three steps of a decoder's gradients."""
    plain = {"clip_norm": 0.0, "weight_decay": 0.0, "warmup_steps": 0, "schedule": "constant"}
    after = {
        "compression.all_reduce": "int8",
        "sharding.overlap": "off",
    }  # exchanged after the micro-steps, as in a loop
    experiment = small(after | {f"optimizer.{key}": value for key, value in plain.items()})
    config, plan, model = experiment.config, experiment.plan, experiment.model
    c = config.optimizer
    theirs = make_chain(config, plan, model.param_specs())
    codec = Blockwise(bits=8, block=config.compression.block)
    ours = optax.chain(exchange(plan, codec), optax.adamw(c.learning_rate, c.b1, c.b2, c.eps, weight_decay=0.0))
    params = experiment.init_state().params
    batch = {name: np.ones(x.shape, x.dtype) for name, x in experiment.batches.shapes.items()}
    states = [tx.init(params) for tx in (theirs, ours)]
    gradients_of = jax.jit(lambda p: replica_gradients(accumulated(model.objective), plan, p, batch)[0])
    update = [jax.jit(tx.update) for tx in (theirs, ours)]
    for scale in (1, 2, 3):
        grads_R = jax.tree.map(lambda g, scale=scale: g * scale, gradients_of(params))
        both = [update[i](grads_R, states[i], params) for i in (0, 1)]
        (updates, _), (other, _) = both
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), updates, other)
        states = [state for _, state in both]
        params = optax.apply_updates(params, updates)


def small(changes: dict[str, Any]) -> Experiment:
    config = tiny_config(partition_size=2)
    config.update_from_flattened_dict(changes)
    return make_experiment(typed(config))


def keeps_squares(cut: Any = "undeclared") -> Any:
    """An optimizer that keeps an array `[2 n, 2 n]` of each tensor `[n, ...]`."""

    def squares(config: Any, schedule: Any, mask: Any) -> optax.GradientTransformation:
        def init(params: Any) -> Any:
            return {"squares": jax.tree.map(lambda p: jax.numpy.zeros((2 * p.shape[0],) * 2), params)}

        return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))

    if cut != "undeclared":
        squares.cut = cut  # pyright: ignore[reportFunctionMemberAccess]
    return squares


@pytest.mark.usefixtures("forgotten", "example_methods")
def test_what_a_registered_optimizer_keeps_is_cut_as_it_declares_or_refused() -> None:
    register("optimizer", "squares", keeps_squares())
    with pytest.raises(ValueError, match="^optimizer.name=squares keeps .* no parameter.s shape .* squares.cut = "):
        _ = small({"optimizer.name": "squares"}).state_shapes
    OWN["optimizer"].clear()
    register("optimizer", "squares", keeps_squares(lambda path, shape: len(shape) - 1))
    kept = [x for x in jax.tree.leaves(small({"optimizer.name": "squares"}).state_shapes.opt_state) if x.ndim > 1]
    assert kept and all(x.sharding.shard_shape(x.shape)[-1] == x.shape[-1] // 2 for x in kept)
    all_reduce = small({"optimizer.name": "squares", "compression.all_reduce": "power_sgd"}).state_shapes.all_reduce
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(all_reduce.factors))
