"""The compiled program of each strategy has the collectives of docs/concepts.md, and a single device's losses."""

import math
from collections import Counter
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from support import workload
from support.suite import SLOW

from sharding.hlo import Collective, bytes_per_step, read_collectives

LAYERS, ACCUMULATION, NODES, PER_NODE = 3, 2, 4, 2
N = NODES * PER_NODE
NUM_PARAMETERS = 11  # of the decoder


def sizes() -> dict[str, int]:
    """Elements of each group of parameters; of `layers`, those of one layer."""
    specs = workload.model("decoder", LAYERS).param_specs()
    count = {
        name: sum(math.prod(s.shape) for s in jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "dims")))
        for name, tree in specs.items()
    }
    return count | {"layers": count["layers"] // LAYERS}


def model_elements() -> int:
    return sum(m * (LAYERS if name == "layers" else 1) for name, m in sizes().items())


@cache
def read(**how: Any) -> list[Collective]:
    sh = workload.plan("decoder", nodes=NODES, per_node=PER_NODE, num_layers=LAYERS, **how)
    step, *begin = workload.compiled_step("decoder", sh, accumulation=ACCUMULATION, num_layers=LAYERS)
    losses = workload.run_steps(step, *begin, workload.NUM_STEPS)[0]
    np.testing.assert_allclose(losses, workload.single_device_losses("decoder", num_layers=LAYERS), rtol=1e-5)
    return read_collectives(step.as_text(), sh.layout.shape)


def is_scalar(c: Collective) -> bool:
    """The loss, the sum of weights, the norms of gradient and update: at most two numbers for each parameter."""
    return c.kind == "all-reduce" and c.num_elements <= 2 * NUM_PARAMETERS


def traffic(collectives: list[Collective]) -> dict[tuple, int]:
    """Elements a step (payload times executions) by label, kind and axes, without the scalars."""
    total: Counter = Counter()
    for c in collectives:
        if not is_scalar(c):
            total[c.label, c.kind, c.axes] += c.num_elements * c.times
    return dict(total)


def gathered(label: str, kind: str, elements: int, levels: list[tuple[tuple[str, ...], int]]) -> dict[tuple, int]:
    """Elements of a gather (or reduce-scatter) of `elements` in several levels, given innermost first with its size."""
    out = {}
    for axes, size in levels:
        out[label, kind, axes] = elements
        elements //= size
    return out


INTRA, INTER = (("shard_intra",), 2), ("shard_inter",)


def levels_of(p: int, *, hierarchical: bool) -> list[tuple[tuple[str, ...], int]]:
    """The levels of a gather in a partition group of p devices on 4 nodes of 2."""
    if p == 1:
        return []
    if p == 2:
        return [INTRA]
    return [INTRA, (INTER, p // 2)] if hierarchical else [(("shard_inter", "shard_intra"), p)]


def expected_mics(p: int, *, hierarchical: bool = True, gather: str = "layer") -> dict[tuple, int]:
    m, total = sizes(), model_elements()
    once = total * ACCUMULATION
    gathers = {
        "layer": ACCUMULATION * (2 * LAYERS * m["layers"] + m["embed"] + m["head"]),
        "micro_step": once,
        "step": total,
    }[gather]
    levels = levels_of(p, hierarchical=hierarchical)
    replicas = ("replica_inter",) if p > 1 else ("replica_inter", "replica_intra")
    loss = int(p == 1)  # XLA combines the sum of the loss with it where both cross the same axes
    all_reduce = {("replica_all_reduce", "all-reduce", replicas): total // p + loss} if p < N else {}
    return (
        gathered("gather", "all-gather", gathers, levels)
        | gathered("group_reduce_scatter", "reduce-scatter", once, levels)
        | all_reduce
    )


@pytest.mark.parametrize(
    ("p", "how"),
    [
        (4, {}),
        *(pytest.param(4, {"gather": how}, marks=SLOW) for how in ("step", "micro_step")),
        *(pytest.param(p, {}, marks=SLOW) for p in (1, 2, 8)),
        *(pytest.param(p, {"hierarchical": False}, marks=SLOW) for p in (4, 8)),
    ],
)
def test_mics_gathers_in_groups_and_all_reduces_between_them(p: int, how: dict[str, Any]) -> None:
    collectives = read(strategy="mics", partition_size=p, **how)
    assert traffic(collectives) == expected_mics(p, **how)
    in_the_loop = [c for c in collectives if c.loop_depth > 0]
    assert all(not axis.startswith("replica") for c in in_the_loop for axis in c.axes)
    assert sum(is_scalar(c) for c in collectives) <= 3


def test_a_level_has_one_collective_of_each_tensor() -> None:
    """mics(4): elements a step of each level, in float32."""
    m = sizes()
    got: Counter = Counter()
    for c in read(strategy="mics", partition_size=4):
        if c.kind != "all-reduce":
            got[c.label, c.kind, c.axes, c.dtype] += c.times * c.num_elements
    expected: Counter = Counter()
    for name, times in (("layers", LAYERS * ACCUMULATION), ("embed", ACCUMULATION), ("head", ACCUMULATION)):
        for axes, elements in ((("shard_intra",), m[name]), (("shard_inter",), m[name] // 2)):
            expected["gather", "all-gather", axes, "f32"] += elements * times * (2 if name == "layers" else 1)
            expected["group_reduce_scatter", "reduce-scatter", axes, "f32"] += elements * times
    assert got == expected


ALL_LEVELS = [(("replica_intra",), 2), (("replica_inter",), 4)]


@pytest.mark.parametrize(
    ("strategy", "label", "times"), [("zero1", "replica_all_reduce", 1), ("zero2", "gradient_scope", ACCUMULATION)]
)
def test_zero1_reduces_once_a_step_and_zero2_every_micro_step(strategy: str, label: str, times: int) -> None:
    total = model_elements()
    assert traffic(read(strategy=strategy)) == (
        gathered(label, "reduce-scatter", times * total, ALL_LEVELS)
        | gathered("parameter_scope", "all-gather", total, ALL_LEVELS)
    )


def test_node_node_all_shards_the_optimizer_over_everything() -> None:
    shard = model_elements() // 2
    wider = [(("replica_inter",), 4)]
    mics2 = expected_mics(2)
    del mics2["replica_all_reduce", "all-reduce", ("replica_inter",)]
    assert traffic(read(parameters="node", gradients="node", optimizer="all")) == (
        mics2
        | gathered("replica_all_reduce", "reduce-scatter", shard, wider)
        | gathered("parameter_scope", "all-gather", shard, wider)
    )


@pytest.mark.slow
def test_without_two_hop_gradients_are_all_reduced_every_micro_step() -> None:
    """MiCS section 3.4: the alternative moves 2 M (n-1)/n in each of the s micro-steps."""
    collectives = read(strategy="mics", partition_size=4, two_hop=False)
    got = traffic(collectives)
    everyone = ("replica_inter", "shard_inter", "shard_intra")
    assert got.pop(("group_reduce_scatter", "all-reduce", everyone)) == model_elements() * ACCUMULATION
    assert got == {key: value for key, value in expected_mics(4).items() if key[0] == "gather"}


@pytest.mark.parametrize(
    ("p", "hierarchical"),
    [(4, True), *(pytest.param(*how, marks=SLOW) for how in ((2, True), (8, True), (4, False), (8, False)))],
)
def test_sent_bytes_match_the_formulas(p: int, hierarchical: bool) -> None:
    """Gather and reduce-scatter: (p-1)M/p, between nodes (p-k)M/p with hierarchy; replica all-reduce: 2(M/p)(R-1)/R."""
    m = {name: 4 * elements for name, elements in sizes().items()}
    gathered_bytes = ACCUMULATION * (
        3 * LAYERS * m["layers"] + 2 * m["embed"] + 2 * m["head"]
    )  # gathers and the group reduce-scatter
    replicas, k = N // p, PER_NODE
    all_reduce = 2 * (4 * model_elements() / p) * (replicas - 1) / replicas
    how = {} if hierarchical else {"hierarchical": False}
    got = bytes_per_step([c for c in read(strategy="mics", partition_size=p, **how) if not is_scalar(c)])
    if hierarchical:  # each level moves its own share: nothing crosses that is needed only inside
        between_nodes = gathered_bytes * (p - k) / p
        inside = gathered_bytes * (k - 1) / k
    else:  # one ring over all: each node has one edge out
        between_nodes = gathered_bytes * (p - 1) / p
        inside = gathered_bytes * (p - 1) / p - between_nodes / k
    assert got["collective_inter_bytes"] * k == pytest.approx(between_nodes + all_reduce * k, abs=8)
    assert got["collective_intra_bytes"] == pytest.approx(inside, abs=8)


def test_tensor_axis_divides_the_gathered_bytes() -> None:
    """With tensor=2 on nodes of 2, a group of 4 devices gathers between its two nodes, each device half of a matrix."""
    collectives = read(strategy="mics", partition_size=4, tensor=2)
    specs = workload.model("decoder", LAYERS).param_specs()
    layer = jax.tree.leaves(specs["layers"], is_leaf=lambda x: hasattr(x, "dims"))
    split = sum(math.prod(s.shape[1:]) // (2 if len(s.shape) > 2 else 1) for s in layer)
    other = sum(
        math.prod(s.shape) // (2 if "vocab" in s.dims else 1)
        for name in ("embed", "head")
        for s in jax.tree.leaves(specs[name], is_leaf=lambda x: hasattr(x, "dims"))
    )
    got = {key: value for key, value in traffic(collectives).items() if key[2] != ("tensor",)}
    whole = LAYERS * split + other  # what the two devices of a tensor group hold of the model, each
    assert got == {
        ("replica_all_reduce", "all-reduce", ("replica_inter",)): whole // 2,
        ("gather", "all-gather", ("shard_inter",)): ACCUMULATION * (2 * LAYERS * split + other),
        ("group_reduce_scatter", "reduce-scatter", ("shard_inter",)): ACCUMULATION * (LAYERS * split + other),
    }
