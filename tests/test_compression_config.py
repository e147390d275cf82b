"""The sections `compression` and `local_sgd` of a config: what they build, and what cannot be together."""

from typing import Any

import jax
import pytest
from test_planner_table import tiny_config

from compression.delayed import DelayedState
from compression.local_sgd import LocalState
from compression.methods import METHODS
from compression.one_bit_adam import OneBitAdamState
from configs.base import typed
from configs.schema.compression import HOP_TWO
from optimizers import GuardState
from sharding.replicas import replica_key
from training.experiment import make_experiment

LOCAL = {"local_sgd.inner_steps": 2}
ONE_BIT_ADAM = {"compression.hop_two": "one_bit_adam", "compression.warmup_steps": 2, "optimizer.clip_norm": 0.0}


def state_of(changes: dict[str, Any]) -> GuardState:
    config = tiny_config(partition_size=2)
    config.update_from_flattened_dict(changes)
    return make_experiment(typed(config)).state_shapes.opt_state


def test_every_value_of_hop_two_is_a_method() -> None:
    assert {method.name for method in METHODS} == set(HOP_TWO) and len(METHODS) == len(HOP_TWO)


def test_what_the_keys_build() -> None:
    assert isinstance(state_of(LOCAL), LocalState)
    assert isinstance(state_of(ONE_BIT_ADAM).exchange, OneBitAdamState)
    late = state_of({"compression.delayed": True, "compression.hop_two": "int8"}).exchange
    assert isinstance(late, DelayedState) and jax.tree.leaves(late.exchange.residual)


def test_all_that_is_a_replicas_own_is_on_its_devices_alone() -> None:
    """Moments, drifts and residuals `[R, ...]`: a device has one of R."""
    for changes in (LOCAL | {"compression.hop_two": "int8"}, {"compression.delayed": True}, ONE_BIT_ADAM):
        state = state_of(changes)
        own = [
            (x.shape, x.sharding.shard_shape(x.shape))
            for path, x in jax.tree_util.tree_leaves_with_path(state)
            if replica_key(path) and len(x.shape) > 1
        ]
        assert own and all(whole[0] == 4 and here[0] == 1 for whole, here in own)


DGC = {"compression.hop_two": "dgc", "optimizer.name": "sgd"}


@pytest.mark.parametrize(("changes", "key"), [({}, "grad_norm"), (ONE_BIT_ADAM, "update_norm"), (DGC, "update_norm")])
def test_the_norm_of_an_update_is_not_called_a_gradients(changes: dict[str, Any], key: str) -> None:
    """Of Adam's direction, or of what dgc has accumulated and sends: no gradient is averaged that could have a norm."""
    config = tiny_config(partition_size=2)
    config.update_from_flattened_dict(changes)
    experiment = make_experiment(typed(config))
    _, metrics = jax.eval_shape(experiment.train_step, experiment.state_shapes, experiment.batches.shapes)
    assert {name for name in metrics if name in ("grad_norm", "update_norm")} == {key}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (LOCAL | {"sharding.strategy": "zero3", "sharding.partition_size": 0}, "local_sgd needs replicas"),
        (LOCAL | {"sharding.strategy": "zero1", "sharding.partition_size": 0}, "a whole optimizer in each replica"),
        (LOCAL | {"num_steps": 11}, "num_steps=11 must be a multiple of local_sgd.inner_steps=2"),
        (LOCAL | {"compression.delayed": True}, "nor with compression.delayed"),
        (LOCAL | {"optimizer.name": "muon"}, "optimizer.name=muon"),
        (LOCAL | ONE_BIT_ADAM, "no compression.hop_two that is one itself (one_bit_adam)"),
        (LOCAL | {"local_sgd.outer_learning_rate": 0.0}, "local_sgd.outer_learning_rate=0.0 must be above 0"),
        (LOCAL | {"local_sgd.outer_momentum": 1.0}, "local_sgd.outer_momentum=1.0 must be at least 0 and below 1"),
        ({"local_sgd.inner_steps": -1}, "local_sgd.inner_steps=-1 must be at least 0"),
        (
            ONE_BIT_ADAM | {"num_steps": 2, "optimizer.warmup_steps": 0},
            "compression.warmup_steps=2 is the whole run of num_steps=2",
        ),
        (ONE_BIT_ADAM | {"optimizer.name": "lamb"}, "does the work of optimizer.name=adamw, not of lamb"),
        (ONE_BIT_ADAM | {"optimizer.clip_norm": 1.0}, "optimizer.clip_norm=1.0; set that to 0"),
        ({"compression.hop_two": "dgc"}, "does the work of optimizer.name=sgd, not of adamw"),
        ({"compression.sampled": 0.0}, "compression.sampled=0.0 must be above 0 and at most 1"),
        (
            {"compression.delayed": True, "sharding.strategy": "zero3", "sharding.partition_size": 0},
            "compression.delayed has nothing to delay",
        ),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        state_of(changes)
    assert said in str(error.value)
