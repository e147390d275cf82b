"""What DeMo and 1-bit Adam send, in compiled programs: the numbers of docs/compression.md."""

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from support import workload
from support.numpy_oracles import REPLICAS, program, replicas_on
from support.running import ROOT

from compression.exchange import exchange
from compression.one_bit_adam import ONE_BIT_ADAM
from configs import base
from examples.methods import demo
from sharding.hlo import Collective, read_collectives
from sharding.plan import ShardingPlan
from sharding.spec import ParamSpec, is_spec, place_all

PAGE = " ".join((ROOT / "docs" / "compression.md").read_text().split())
SPECS = {  # whole blocks of 64 x 64 for DeMo, of 1024 values for each of four replicas for 1-bit Adam
    "layers": {"up": ParamSpec(shape=(2, 128, 192), dims=("layers", "embed", "mlp"))},
    "table": ParamSpec(shape=(64, 128), dims=("vocab", "embed")),
}
SIZE = 2 * 128 * 192 + 64 * 128
IS_FINITE = 4  # bytes of a sum that says whether all values are


def claimed(pattern: str) -> list[float]:
    """Returns the numbers that the page has in the place of the groups."""
    found = re.search(pattern, PAGE)
    assert found, pattern
    return [float(number) for number in found.groups()]


def make_plan() -> ShardingPlan:
    plan = replicas_on(REPLICAS)
    return ShardingPlan(mesh=plan.mesh, layout=plan.layout, placements=place_all(SPECS, plan.layout))


def sent(plan: ShardingPlan, all_reduce: Any) -> list[Collective]:
    """Returns the collectives of the replica all-reduce's compiled program."""
    params = jax.tree.map(lambda spec: jnp.ones(spec.shape), SPECS, is_leaf=is_spec)
    states, update = program(plan, optax.chain(all_reduce, optax.identity()), params)
    grads = jax.tree.map(lambda p: jnp.ones((plan.layout.num_replicas, *p.shape)), params)
    return read_collectives(update.lower(grads, states, params).compile().as_text() or "", plan.layout.shape)


@cache
def dense_bytes() -> float:
    """Returns the bytes of an all-reduce in f32, which are those of the program without a codec."""
    formula = 2 * (REPLICAS - 1) / REPLICAS * 4 * SIZE
    assert sum(c.inter_bytes for c in sent(make_plan(), exchange(make_plan()))) == formula
    return formula


def test_demo_sends_13_bits_for_each_value_and_8_bytes_for_each_block() -> None:
    """To all nodes, and nothing else; of 64 of 4096 values it is as many times less than in f32 as the page says."""
    times, sparsity = claimed(
        r"Between R nodes it sends (\d+)/R times fewer bytes at a sparsity of ([\d.]+) \(64 of 4096\)"
    )
    bits, scales = claimed(r"`1 - sparsity` of the values at (\d+) bits each, and (\d+) bytes per block")
    plan = make_plan()
    method = demo.method(sparsity=sparsity)
    found = sent(plan, method.build(workload.setup(plan, method)))
    coded, others = ([c for c in found if (c.dtype == "u8") is is_coded] for is_coded in (True, False))
    payload = SIZE // 4096 * (64 * bits / 8 + scales)
    assert [(c.kind, c.inter_bytes) for c in coded] == [("all-gather", (REPLICAS - 1) * payload)]
    assert sum(c.payload_bytes for c in others) == IS_FINITE
    assert int(dense_bytes() / coded[0].inter_bytes * REPLICAS) == times


def one_bit_adam(plan: ShardingPlan, step: int) -> Any:
    """Returns the method with a warm-up of 10 steps, in a program for one step alone."""
    method = ONE_BIT_ADAM.build(workload.setup(plan, ONE_BIT_ADAM, warmup_steps=10))
    at_step = lambda grads, state, params: method.update(grads, state._replace(step=jnp.int32(step)), params)
    return optax.GradientTransformation(method.init, at_step)


def test_one_bit_adam_sends_a_bit_for_each_value_behind_its_warm_up() -> None:
    """And a scale a block, in both halves of the exchange; f32 before. With a warm-up as advised, the page's ratio."""
    plan, block = make_plan(), base.get_config().compression.block
    warm_up, behind = (sent(plan, one_bit_adam(plan, step)) for step in (9, 10))
    assert {c.dtype for c in warm_up} == {"f32"}
    assert sum(c.inter_bytes for c in warm_up) == dense_bytes()
    coded, others = ([c for c in behind if (c.dtype == "u8") is is_coded] for is_coded in (True, False))
    assert {c.kind for c in coded} == {"all-to-all", "all-gather"}
    moved = sum(c.inter_bytes for c in coded)
    assert moved == 2 * (REPLICAS - 1) / REPLICAS * SIZE * (1 / 8 + 4 / block)
    assert sum(c.payload_bytes for c in others) == IS_FINITE
    least, most = claimed(r"A whole run then sends ([\d.]+) to ([\d.]+) times less than float32")
    short, long = (share / 100 for share in claimed(r"warm-up (\d+) to (\d+) % of the steps"))
    ratios = [1 / (share + (1 - share) * moved / dense_bytes()) for share in (long, short)]
    assert least <= ratios[0] < ratios[1] and round(ratios[1], 1) == most
