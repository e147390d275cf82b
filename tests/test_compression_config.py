"""The sections `compression` and `local_sgd` of a config: what they build, and which values are refused."""

from typing import Any

import jax
import pytest
from support.examples import example_methods  # noqa: F401 (fixture)
from support.planning import tiny_config
from support.tables import every_row

from compression.methods import METHODS
from configs.base import typed
from configs.schema.sections import ALL_REDUCE
from configs.schema.sections import METHODS as NAMES
from training.experiment import make_experiment

pytestmark = pytest.mark.usefixtures("example_methods")

LOCAL = {"local_sgd.inner_steps": 2}
STREAMING = {"local_sgd.inner_steps": 10, "local_sgd.streaming": True}
ONE_BIT_ADAM = {"compression.all_reduce": "one_bit_adam", "compression.warmup_steps": 2, "optimizer.clip_norm": 0.0}


def states_of(changes: dict[str, Any]) -> tuple[Any, Any]:
    config = tiny_config(partition_size=2)
    config.update_from_flattened_dict(changes)
    return make_experiment(typed(config)).state_shapes.chain


def test_config_choices_of_all_reduce_are_the_implemented_methods() -> None:
    assert {method.name for method in METHODS} == set(ALL_REDUCE) and len(METHODS) == len(ALL_REDUCE)
    assert {*NAMES} <= {*ALL_REDUCE}


DEMO = {"compression.all_reduce": "demo", "optimizer.name": "sgd"}


@every_row(
    ("changes", "per_replica"),
    [
        (LOCAL | {"compression.all_reduce": "int8"}, ("[1].inner", "[1].drift", "[0].residual")),
        ({"compression.delayed": True}, ("[0].waiting",)),
        (ONE_BIT_ADAM, ("[0].exchange.residual",)),
        (DEMO, ("[0].residual",)),
        ({"compression.all_reduce": "power_sgd"}, ("[0].residual",)),
    ],
)
def test_per_replica_state_is_sharded_over_the_replicas(changes: dict[str, Any], per_replica: tuple[str, ...]) -> None:
    """These fields hold arrays `[R, ...]` of which a device has one entry of R = 4; no other field does."""
    paths = [
        (jax.tree_util.keystr(path), x.shape, x.sharding.shard_shape(x.shape))
        for path, x in jax.tree_util.tree_leaves_with_path(states_of(changes))
    ]
    for prefix in per_replica:
        arrays = [(whole, shard) for path, whole, shard in paths if path.startswith(prefix)]
        assert arrays and all(whole[0] == 4 and shard[0] == 1 for whole, shard in arrays), prefix
    assert not [path for path, whole, _ in paths if whole[:1] == (4,) and not path.startswith(per_replica)]


@every_row(("changes", "key"), [({}, "grad_norm"), (ONE_BIT_ADAM, "update_norm"), (DEMO, "update_norm")])
def test_update_norm_is_logged_where_all_reduce_returns_updates(changes: dict[str, Any], key: str) -> None:
    """one_bit_adam returns Adam's direction, demo signs: neither averages gradients."""
    config = tiny_config(partition_size=2)
    config.update_from_flattened_dict(changes)
    experiment = make_experiment(typed(config))
    _, metrics = jax.eval_shape(experiment.train_step, experiment.state_shapes, experiment.batches.shapes)
    assert {name for name in metrics if name in ("grad_norm", "update_norm")} == {key}


@every_row(
    ("changes", "said"),
    [
        (LOCAL | {"num_steps": 11}, "num_steps=11 must be a multiple of local_sgd.inner_steps=2"),
        (STREAMING | {"num_steps": 10}, "num_steps=10 must be above local_sgd.inner_steps=10, "),
        ({"compression.block": 12}, "compression.block=12 must be a multiple of 8"),
    ],
)
def test_bad_values_are_rejected(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        states_of(changes)
