"""Codecs in the micro-steps: gathers and hop one against numpy, their bytes in the program; `sharding.gather=node`."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
import workload
from jax.sharding import PartitionSpec as P

from compression.codecs import Blockwise, make_codecs
from configs import base
from configs.schema import CompressionConfig
from sharding import hlo
from sharding.coded import LevelCodecs
from sharding.collectives import Group, all_gather_chunks, reduce_scatter_chunks
from sharding.mesh import INTER_AXES
from sharding.plan import ShardingPlan
from sharding.spec import Placement
from sharding.step import build_eval_step, in_turn

BLOCK = 32
INT8, INT4 = (Blockwise(bits=bits, block=BLOCK) for bits in (8, 4))
MESH = jax.make_mesh((2, 4), ("shard_inter", "shard_intra"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SCOPE = ("shard_intra", "shard_inter")  # chunk i is at [inter i % 2, intra i // 2]


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """What arrives of rows `[..., N]`, N no multiple of the block."""
    most, size = 2 ** (bits - 1) - 1, x.shape[-1]
    filled = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % BLOCK)])
    blocks = filled.reshape(*x.shape[:-1], -1, BLOCK)
    scales = np.abs(blocks).max(-1, keepdims=True) * np.float32(1 / most)
    values = np.round(blocks / np.where(scales > 0, scales, 1)) * scales
    return values.reshape(filled.shape)[..., :size].astype(np.float32)


@pytest.mark.parametrize("hierarchical", [True, False])
def test_a_coded_gather_is_numpy(hierarchical: bool) -> None:
    """Each level encodes what it gathers; a flat gather between nodes has the codec between nodes."""
    chunks = np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32)
    codecs = LevelCodecs(inter=INT8, intra=INT4)

    def gather(x: jax.Array) -> jax.Array:
        return all_gather_chunks(x.reshape(-1), SCOPE, hierarchical=hierarchical, to="invarying", codecs=codecs)

    got = jax.jit(jax.shard_map(gather, mesh=MESH, in_specs=P(SCOPE), out_specs=P()))(chunks)
    wanted = rounded(chunks, 8)
    if hierarchical:
        pairs = wanted.reshape(4, 2 * 50)  # of one device after the first level
        wanted = rounded(pairs, 4).reshape(8, 50)
    np.testing.assert_allclose(np.asarray(got), wanted, atol=1e-6)


@pytest.mark.parametrize("hierarchical", [True, False])
def test_a_coded_reduce_scatter_is_numpy(hierarchical: bool) -> None:
    """Inside the node first, each level's rows encoded once and summed in f32."""
    given = np.random.default_rng(0).normal(size=(2, 4, 8, 50)).astype(np.float32)  # [inter, intra, chunk, N]
    codecs = LevelCodecs(inter=INT4, intra=INT8)

    def scatter(x: jax.Array) -> jax.Array:
        return reduce_scatter_chunks(x[0, 0], SCOPE, hierarchical=hierarchical, codecs=codecs)

    spec = P("shard_inter", "shard_intra")
    got = jax.jit(jax.shard_map(scatter, mesh=MESH, in_specs=spec, out_specs=P(SCOPE)))(given).reshape(8, 50)
    if hierarchical:
        in_node = rounded(given.reshape(2, 4, 4, 100), 8).sum(1)  # [inter, intra chunk, 2 N]
        wanted = rounded(in_node.reshape(2, 4, 2, 50), 4).sum(0).reshape(8, 50)
    else:
        wanted = rounded(given, 4).sum((0, 1))
    np.testing.assert_allclose(np.asarray(got), wanted, atol=1e-5)


# matrices of sizes that no block divides, the second a thousand times smaller, and a vector, the largest
SHAPES = {"first": (16, 5), "second": (16, 7), "scale": (16,)}
GROUP = Group(
    placements=tuple(Placement(dim=0, tensor_dim=None, ndim=len(shape)) for shape in SHAPES.values()),
    scope=SCOPE,
    hierarchical=True,
    gather_codecs=LevelCodecs(inter=INT4, intra=INT4),
    reduce_scatter_codecs=LevelCodecs(intra=INT4),
)


def tensors(*lead: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = zip((1.0, 1e-3, 30.0), SHAPES.values(), strict=True)
    return [(size * rng.normal(size=(*lead, *shape))).astype(np.float32) for size, shape in sizes]


def test_a_tensor_is_gathered_in_blocks_of_its_own_and_a_vector_as_it_is() -> None:
    """Whatever travels beside it; the second level finds the blocks of the first, and loses nothing more."""
    gather = jax.shard_map(
        lambda shards: GROUP.gather(shards, to="invarying"), mesh=MESH, in_specs=([P(SCOPE)] * 3,), out_specs=[P()] * 3
    )
    first, second, scale = given = tensors()
    got = jax.jit(gather)(given)
    for x, wanted in zip(got, (first, second), strict=False):
        each = rounded(wanted.reshape(8, -1), 4).reshape(wanted.shape)
        np.testing.assert_allclose(np.asarray(x), each, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(got[2]), scale)


def test_a_gradient_is_summed_in_blocks_of_its_own_and_a_vector_as_it_is() -> None:
    """Of hop one; coded inside the node alone, where rows of two chunks are sent."""
    spec = P("shard_inter", "shard_intra")
    scatter = jax.shard_map(
        lambda grads: GROUP.reduce_scatter([g[0, 0] for g in grads]),
        mesh=MESH,
        in_specs=([spec] * 3,),
        out_specs=[P(SCOPE)] * 3,
    )
    given = tensors(2, 4)  # [inter, intra, ...]
    got = jax.jit(scatter)(given)
    for x, grad in zip(got[:2], given[:2], strict=True):
        chunks = rounded(grad.reshape(2, 4, 8, -1), 4)
        np.testing.assert_allclose(np.asarray(x), chunks.sum((0, 1)).reshape(grad.shape[2:]), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.asarray(got[2]), given[2].sum((0, 1)), rtol=1e-5, atol=1e-5)


ZERO_PLUS_PLUS = dict(gather_codecs=LevelCodecs(inter=INT8), hop_one_codecs=LevelCodecs(inter=INT4, intra=INT4))


def plan(codecs: dict[str, LevelCodecs], **how: Any) -> ShardingPlan:
    return workload.plan("decoder", **({"strategy": "zero3"} | how), **codecs)


def collectives(sharding: ShardingPlan) -> list[hlo.Collective]:
    compiled = workload.compiled_step("decoder", sharding)[0]
    return hlo.read_collectives(compiled.as_text(), sharding.layout.shape)


def crossing_bytes(found: list[hlo.Collective]) -> float:
    return sum(c.inter_bytes * c.times for c in found)


def test_the_program_sends_bytes() -> None:
    """Every large collective of a coded level is of bytes, the others of floats."""
    large = [c for c in collectives(plan(ZERO_PLUS_PLUS)) if c.payload_bytes >= 200]
    assert {c.label for c in large} == {"gather", "hop_one"} and {c.dtype for c in large} == {"u8", "f32"}
    for c in large:
        coded = bool(set(c.axes) & set(INTER_AXES)) or c.label == "hop_one"
        assert c.dtype == ("u8" if coded else "f32"), c


def test_a_coded_gather_sends_whole_blocks_of_each_matrix_and_vectors_apart() -> None:
    """Of each of two layers in each micro-step, in zero3: what the codec claims for each matrix, f32 for the norms."""
    found = collectives(plan(dict(gather_codecs=LevelCodecs(inter=INT8))))
    crossing = [c for c in found if set(c.axes) & set(INTER_AXES) and c.label == "gather" and c.times == 2 * 2]
    layer = jax.tree.leaves(workload.specs("decoder")["layers"], is_leaf=lambda x: hasattr(x, "dims"))
    shards = [int(np.prod(spec.shape[1:])) // 8 for spec in layer if len(spec.shape) > 2]
    vectors = sum(spec.shape[1] for spec in layer if len(spec.shape) == 2) // 8
    coded = sum(workload.payload_bytes(INT8, size + -size % BLOCK) for size in shards)
    assert len(shards) == 7 and any(size % BLOCK for size in shards) and vectors
    assert {(c.dtype, c.payload_bytes) for c in crossing} == {("u8", 4 * coded), ("f32", 4 * 4 * vectors)}


def single_device_loss(params: Any) -> float:
    data = workload.batch()
    return float(workload.model("decoder").loss(params, data, workload.whole) / data["weights"].sum())


def as_gathered(sharding: ShardingPlan, bits: int, degree: int) -> Any:
    """The parameters, each layer's matrix rounded in `degree` times `tensor` parts: those of a device."""
    tensor = sharding.layout.shape.tensor

    def round_parts(p: Placement, x: jax.Array) -> np.ndarray:
        whole = np.array(x)
        for layer in () if p.is_vector else whole if p.stacked else (whole,):
            for row in np.split(layer, degree, p.dim - p.stacked):
                for part in [row] if p.tensor_dim is None else np.split(row, tensor, p.tensor_dim - p.stacked):
                    part[...] = rounded(part.reshape(-1), bits).reshape(part.shape)
        return whole

    return sharding.map(round_parts, workload.params("decoder"))


# a layer's matrices are cut by `degree` when they are encoded; with tensor=2 a node of 4 is two of its 2
IN_A_LAYER = {
    "layer": (4, dict(), "both"),
    "layer, tensor": (4, dict(tensor=2, nodes=2, per_node=4), "both"),
    "node, tensor": (2, dict(tensor=2, nodes=2, per_node=4, gather="node"), "intra"),
    "group in a node, tensor": (2, dict(strategy="mics", partition_size=4, tensor=2, nodes=2, per_node=4), "intra"),
}


QUICK = {("layer, tensor", 4), ("node, tensor", 8)}


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param(name, bits, marks=() if (name, bits) in QUICK else pytest.mark.slow)
        for name in IN_A_LAYER
        for bits in (8, 4)
    ],
)
def test_a_rematerialised_layer_takes_codecs(name: str, bits: int) -> None:
    """The first loss is that of a single device with rounded matrices; hop one's codec is in those after it."""
    degree, how, where = IN_A_LAYER[name]
    codec = Blockwise(bits=bits, block=BLOCK)
    codecs = LevelCodecs(inter=codec, intra=codec) if where == "both" else LevelCodecs(intra=codec)
    how = dict(strategy="mics", partition_size=8 if "tensor" in how else 4) | how
    sharding = plan(dict(gather_codecs=codecs, hop_one_codecs=codecs), **how)
    got = workload.losses("decoder", sharding)
    np.testing.assert_allclose(got[0], single_device_loss(as_gathered(sharding, bits, degree)), rtol=1e-6)
    np.testing.assert_allclose(got, workload.single_device_losses("decoder"), rtol={8: 3e-3, 4: 0.04}[bits])


def test_validation_is_of_the_parameters_as_they_are_stored() -> None:
    """Those of a checkpoint, not what a coded gather makes of them."""
    sharding = plan(dict(gather_codecs=LevelCodecs(inter=INT4, intra=INT4)))
    state = workload.first_state("decoder", sharding, optax.chain(optax.identity(), optax.identity()))
    evaluate = jax.jit(build_eval_step(in_turn(workload.model("decoder").evaluate), sharding))
    sums = evaluate(state.params, workload.put_batch(sharding, 1))
    np.testing.assert_allclose(sums["loss"] / sums["weight"], single_device_loss(workload.params("decoder")), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [dict(), dict(strategy="mics", partition_size=4), dict(strategy="zero2")])
@pytest.mark.parametrize("gather", ["layer", "node", "micro_step"])
def test_training_with_codecs_stays_near(strategy: dict, gather: str) -> None:
    codecs = ZERO_PLUS_PLUS
    if strategy.get("strategy") == "zero2":
        codecs = dict(hop_one_codecs=LevelCodecs(inter=INT8, intra=INT8))
    got = workload.losses("decoder", plan(codecs, gather=gather, **strategy))
    np.testing.assert_allclose(got, workload.single_device_losses("decoder"), rtol=0.03)
    assert (got != workload.losses("decoder", plan({}, gather=gather, **strategy))).any()


def test_gathering_once_a_node_crosses_nodes_once() -> None:
    """Between nodes one gather and one reduce-scatter a micro-step, of all layers; two thirds of the bytes (hpZ)."""
    by_layer, by_node = (collectives(plan({}, gather=gather)) for gather in ("layer", "node"))
    crossing = [c for c in by_node if set(c.axes) & set(INTER_AXES) and c.payload_bytes > 200]
    assert {(c.label, c.times) for c in crossing} == {("gather", 2), ("hop_one", 2)}
    assert 0.6 < crossing_bytes(by_node) / crossing_bytes(by_layer) < 0.75


def test_codecs_by_the_config() -> None:
    changes = {"gather_inter": "int8", "hop_one_inter": "int4", "rounding": "stochastic", "block": 64}
    config = CompressionConfig(**(base.get_config().compression.to_dict() | changes))
    gather_codecs, hop_one_codecs, _ = make_codecs(config)
    assert gather_codecs == LevelCodecs(inter=Blockwise(bits=8, block=64)) and hop_one_codecs == LevelCodecs(
        inter=Blockwise(bits=4, block=64)
    )
