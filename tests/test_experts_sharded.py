"""Experts on 8 virtual devices, 4 nodes of 2: the dense loop's losses with every strategy, and the bytes sent."""

import math
from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import workload
from support.dense_experts import dense_loop
from support.suite import SLOW
from support.tables import every_row

from compression.codecs import Blockwise
from compression.exchange import exchange
from examples.methods.power_sgd import power_sgd
from sharding.coded import LevelCodecs
from sharding.hlo import Collective, read_collectives
from sharding.plan import ShardingPlan

ZERO3 = {"strategy": "zero3"}
MICS4 = {"strategy": "mics", "partition_size": 4}
HSDP = {"strategy": "hsdp"}
INTRA, INTER = ("shard_intra",), ("shard_inter",)
# strategy and experts (`node` is 2 devices, 4 spans two nodes, `all` four); the axes of each all-to-all of tokens, and
# whether experts are gathered over the nodes
COUNTED = {
    "hsdp, node": (HSDP | {"experts": "node"}, [INTRA], False),
    "mics(4), node": (MICS4 | {"experts": "node"}, [INTRA], True),
    "mics(4), 4": (MICS4 | {"experts": 4}, [INTRA, INTER], False),
    "mics(4), 4, dots": (MICS4 | {"experts": 4, "kind": workload.MOE_DOTS}, [INTRA, INTER], False),
}
QUICK = {name: how for name, (how, _, _) in COUNTED.items()} | {
    "zero3, all": ZERO3 | {"experts": "all"},
    "mics(4), node, overlap": MICS4 | {"experts": "node", "overlap": True},
}
FIRST = ("mics(4), 4",)  # without `make test-all`
RARE = {
    "zero3, 4, two_hop off, flat": ZERO3 | {"experts": 4, "two_hop": False, "hierarchical": False},
    "zero1": {"strategy": "zero1"},
    "zero3, none": ZERO3,
    "mics(4), node, kept a step": MICS4 | {"experts": "node", "gather": "step"},
    "mics(4), node, kept a micro-step": MICS4 | {"experts": "node", "gather": "micro_step"},
    "mics(4), node, kept in the node": MICS4 | {"experts": "node", "gather": "node"},
    "zero3, 4, overlap, kept in the node": ZERO3 | {"experts": 4, "overlap": True, "gather": "node"},
    "zero3, all, overlap": ZERO3 | {"experts": "all", "overlap": True},
    "zero3, all, flat": ZERO3 | {"experts": "all", "hierarchical": False},
    "node/node/all, node": {"parameters": "node", "gradients": "node", "optimizer": "all", "experts": "node"},
    "node/4/all, node": {"parameters": "node", "gradients": 4, "optimizer": 4, "experts": "node"},
    "auto": ZERO3 | {"partitioner": "auto"},
    "hsdp, node, a tensor split": HSDP | {"experts": "node", "nodes": 2, "per_node": 4, "tensor": 2},
    "hsdp, node, one micro-step": HSDP | {"experts": "node", "accumulation": 1},
    "zero3, none, dots": ZERO3 | {"kind": workload.MOE_DOTS},
}
LAYERS, ACCUMULATION, NODES, PER_NODE = 2, 2, 4, 2


@pytest.fixture(scope="module")
def dense_losses() -> np.ndarray:
    with dense_loop():
        return workload.single_device.__wrapped__("moe")[0]  # its cache does not know of the dense loop


@cache
def program(kind: str = "moe", accumulation: int = ACCUMULATION, **how: Any) -> tuple[ShardingPlan, Any]:
    """Returns the plan and the compiled step with its first state and batch; whoever runs it donates the state."""
    sh = workload.plan(kind, **how)
    return sh, workload.compiled_step(kind, sh, accumulation=accumulation)


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(how, id=name, marks=() if name in FIRST else SLOW) for name, how in QUICK.items()),
        *(pytest.param(how, id=name, marks=pytest.mark.slow) for name, how in RARE.items()),
    ],
)
def test_every_strategy_trains_like_the_dense_loop(how: dict[str, Any], dense_losses: np.ndarray) -> None:
    """Five steps of two micro-steps, or one; what finds no room, or is kept for the backward pass, is the same."""
    found = workload.run_steps(*program(**how)[1], workload.NUM_STEPS)[0]
    np.testing.assert_allclose(found, dense_losses, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------ bytes


def read(**how: Any) -> list[Collective]:
    sh, (step, _, _) = program(**how)
    return read_collectives(step.as_text(), sh.layout.shape)


def tokens_elements() -> int:
    """Elements that a device hands to an all-to-all: the slots of its rows at all experts."""
    c = workload.model("moe", LAYERS).config
    rows = workload.ROWS // ACCUMULATION // (NODES * PER_NODE)
    room = math.ceil(c.experts_per_token * workload.SEQ_LEN * c.capacity_factor / c.num_experts)
    return rows * c.num_experts * room * c.hidden


def experts_elements() -> int:
    """Elements of the experts of all layers."""
    c = workload.model("moe", LAYERS).config
    return LAYERS * c.num_experts * 3 * c.hidden * c.intermediate


def other_elements() -> tuple[int, int]:
    """Elements of all layers without their experts, and of embedding and head, which are gathered once."""
    specs = workload.specs("moe", LAYERS)
    size = {
        name: sum(math.prod(s.shape) for s in jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "dims")))
        for name, tree in specs.items()
    }
    return size["layers"] - experts_elements(), size["embed"] + size["head"]


@pytest.mark.parametrize(
    ("how", "levels", "gathered"),
    [pytest.param(*case, id=name, marks=() if name in FIRST else SLOW) for name, case in COUNTED.items()],
)
def test_tokens_and_experts_send_the_formula(
    how: dict[str, Any], levels: list[tuple[str, ...]], gathered: bool
) -> None:
    """Six all-to-alls a layer and micro-step on each level; experts cross only what does not hold them, as `M_e/2`.

    With `remat=dots` a layer is not computed again, and needs four.
    """
    collectives = read(**how)
    sent: Counter = Counter()
    for c in collectives:
        if c.kind == "all-to-all":
            assert (c.label, c.num_elements) == ("experts", tokens_elements())
            size = math.prod({"shard_intra": 2, "shard_inter": 2}[axis] for axis in c.axes)
            assert c.inter_bytes + c.intra_bytes == pytest.approx(c.payload_bytes * (size - 1) / size)
            sent[c.axes] += c.times
    times = (4 if "kind" in how else 6) * LAYERS * ACCUMULATION
    assert sent == dict.fromkeys(levels, times)
    crossing: Counter = Counter()
    for c in collectives:
        if c.label in ("gather", "group_reduce_scatter") and set(c.axes) & set(INTER):
            crossing[c.label] += c.num_elements * c.times
    if how["strategy"] == "hsdp":
        assert not crossing
        return
    in_layers, ends = other_elements()
    here = in_layers + (experts_elements() if gathered else 0)
    assert crossing == {
        "gather": ACCUMULATION * (2 * here + ends) / 2,
        "group_reduce_scatter": ACCUMULATION * (here + ends) / 2,
    }


@pytest.mark.slow
def test_a_codec_makes_the_tokens_between_nodes_narrow() -> None:
    """Both ways, forward and backward; inside the node they travel as they are."""
    made = Blockwise(bits=8, block=64)
    found = [c for c in read(expert_codecs=LevelCodecs(inter=made), experts=4, **MICS4) if c.kind == "all-to-all"]
    by_level = {axes: {(c.dtype, c.payload_bytes) for c in found if c.axes == axes} for axes in (INTRA, INTER)}
    assert by_level[INTRA] == {("f32", 4 * tokens_elements())}
    assert by_level[INTER] == {("u8", 2 * workload.payload_bytes(made, tokens_elements() // 2))}


@every_row("hierarchical", [True, False])
def test_tokens_reach_the_devices_of_their_experts_and_come_back(hierarchical: bool) -> None:
    """In sixteen bits, which are what travels: entry e of each device goes to the e-th device, in CHUNK_ORDER."""
    sh = workload.plan("moe", experts="all", hierarchical=hierarchical, **ZERO3)
    x = np.arange(8 * 8 * 3).reshape(8, 8, 3)  # [device, expert, ...], devices in CHUNK_ORDER
    spec = jax.P(sh.layout.parameters)

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        there = sh.exchange.there(x[0])
        return there, sh.exchange.back(there)[None]

    mapped = jax.jit(jax.shard_map(run, mesh=sh.mesh, in_specs=spec, out_specs=(spec, spec)))
    compiled = mapped.lower(
        jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=jax.NamedSharding(sh.mesh, spec))
    ).compile()
    there, back = compiled(jax.device_put(x.astype(jnp.bfloat16), jax.NamedSharding(sh.mesh, spec)))
    np.testing.assert_array_equal(there, x.swapaxes(0, 1))
    np.testing.assert_array_equal(back, x)
    sent = [c for c in read_collectives(compiled.as_text(), sh.layout.shape) if c.kind == "all-to-all"]
    assert [c.payload_bytes for c in sent] == [2 * 8 * 3] * (4 if hierarchical else 2)


@pytest.mark.slow
def test_all_reduce_does_not_depend_on_where_experts_are() -> None:
    """PowerSGD approximates whole matrices."""
    found = []
    for experts in ("none", "node"):
        sh = workload.plan("moe", experts=experts, **MICS4)
        found.append(workload.losses("moe", sh, all_reduce=power_sgd(sh, workload.specs("moe"), 1)))
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["tokens", "replica all-reduce"])
def test_training_with_a_codec_stays_near(sent: str, dense_losses: np.ndarray) -> None:
    codec = Blockwise(bits=8, block=64)
    of_tokens = codec if sent == "tokens" else None
    sh = workload.plan("moe", experts=4, expert_codecs=LevelCodecs(intra=of_tokens, inter=of_tokens), **MICS4)
    found = workload.losses("moe", sh, all_reduce=exchange(sh, codec) if sent == "replica all-reduce" else None)
    np.testing.assert_allclose(found, dense_losses, rtol=2e-2)
    assert not np.allclose(found, dense_losses, rtol=1e-7)
