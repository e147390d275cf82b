"""Codecs in the micro-steps: gradients against numpy, their bytes in the program; `sharding.gather=node`."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import workload
from support.suite import SLOW
from support.tables import every_row

import models
from compression.chosen_codecs import make_codecs
from compression.codecs import Blockwise
from configs import base
from configs.schema import CompressionConfig
from configs.schema.own import OWN
from sharding import hlo
from sharding.coded import LevelCodecs, coded_all_to_all_rows, levels
from sharding.collectives import all_gather_chunks, reduce_scatter_chunks
from sharding.gradients import accumulated, replica_gradients
from sharding.mesh import INTER_AXES, inter_part, intra_part
from sharding.plan import TILE_BYTES, ShardingPlan
from sharding.spec import Placement, pspecs
from sharding.step import build_eval_step, in_turn

BLOCK = 32
LAYERS, MICRO_STEPS = 3, 2
Axes = tuple[str, ...]
AS_WRITTEN = {"xla_allow_excess_precision": False}  # or XLA rounds to 16 bits where it likes
Bits = dict[str, int]  # bits of the codecs `inter` and `intra`; without a codec values are sent unencoded
INT8, INT4 = (Blockwise(bits=bits, block=BLOCK) for bits in (8, 4))


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """The received values of rows `[..., N]`; N is not a multiple of the block."""
    most, size = 2 ** (bits - 1) - 1, x.shape[-1]
    filled = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % BLOCK)])
    blocks = filled.reshape(*x.shape[:-1], -1, BLOCK)
    scales = np.abs(blocks).max(-1, keepdims=True) * np.float32(1 / most)
    values = np.round(blocks / np.where(scales > 0, scales, 1)) * scales
    return values.reshape(filled.shape)[..., :size].astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Numpy:
    """Gathers and reduce-scatters of one layer's tensor: each level rounds the chunks that it sends."""

    plan: ShardingPlan
    gather: Bits
    reduce_scatter: Bits

    def narrow(self, x: np.ndarray) -> np.ndarray:
        """Returns values in the compute dtype, as gathered parameters and the group reduce-scatter's ends are."""
        return x.astype(jnp.dtype(self.plan.compute_dtype)).astype(np.float32)

    def parts(self) -> list[Axes]:
        """The axes of each gather of a layer, in order."""
        scope, policy = self.plan.layout.parameters, self.plan.layout.gather.name
        return [inter_part(scope), intra_part(scope)] if policy == "node" else [scope]

    def levels(self, scope: Axes, bits: Bits) -> list[tuple[Axes, int]]:
        """The axes of each collective over a scope, and the bits of its codec; 0: none."""
        found = levels(scope, hierarchical=self.plan.layout.hierarchical)
        return [(axes, bits.get("inter" if inter_part(axes) else "intra", 0)) for axes in found]

    def size(self, axes: Axes) -> int:
        return self.plan.layout.shape.size(axes)

    def gathered(self, p: Placement, x: np.ndarray) -> np.ndarray:
        """Returns the tensor `[...]` as all devices gather it."""
        x = self.narrow(x)
        if p.dim is None or p.is_vector:
            return x
        degree = self.size(self.plan.layout.parameters)
        for scope in self.parts():
            chunks = np.split(x, degree, p.dim)
            for _, bits in self.levels(scope, self.gather):
                chunks = [self.narrow(rounded_whole(chunk, bits)) for chunk in chunks]
            x, degree = np.concatenate(chunks, p.dim), degree // self.size(scope)
        return x

    def scattered(self, p: Placement, x: np.ndarray) -> np.ndarray:
        """Returns the sums of gradients `[*mesh, ...]` over the gradients' scope: each device's shard of them."""
        for scope in (*self.parts()[::-1], self.plan.layout.gradients_beyond_parameters):
            x = self.narrow(self._scattered(p, x, scope))
        return x

    def _scattered(self, p: Placement, x: np.ndarray, scope: Axes) -> np.ndarray:
        names = list(self.plan.mesh.axis_names)
        if p.dim is None:
            return np.broadcast_to(x.sum(tuple(map(names.index, scope)), keepdims=True), x.shape)
        dim, chunks = len(names) + p.dim, list(scope)  # a dim of chunks for each axis, after the dims of the mesh
        x = x.reshape(*x.shape[:dim], *(self.size((a,)) for a in scope), -1, *x.shape[dim + 1 :])
        x = np.moveaxis(x, range(dim, dim + len(scope)), range(len(names), len(names) + len(scope)))
        for axes, bits in self.levels(scope, self.reduce_scatter)[::-1]:
            if not p.is_vector:
                x = rounded_whole(x, bits, start=len(names) + len(chunks))
            for axis in axes:  # the sum over the devices of an axis has a chunk for each of them
                x = np.moveaxis(x.sum(names.index(axis)), len(names) - 1 + chunks.index(axis), names.index(axis))
                chunks.remove(axis)
        return x


def rounded_whole(x: np.ndarray, bits: int, start: int = 0) -> np.ndarray:
    """The received values of chunks, whose dims begin at `start`, each in separate blocks."""
    return rounded(x.reshape(*x.shape[:start], -1), bits).reshape(x.shape) if bits else x


@cache
def gradient(kind: str, dtype: str) -> Any:
    """Returns the model, and a function of parameters and rows of the batch: the gradients of their share of its loss.

    No row's weight is zero: an integer made from the rows of a single device gives ties in another codec.
    """
    model = models.build(replace(workload.model(kind, LAYERS).config, compute_dtype=dtype))
    data = {name: jnp.asarray(x) for name, x in heavier(workload.batch(kind=kind)).items()}
    total = data["weights"].sum()

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        return model.loss(params, {name: x[rows] for name, x in data.items()}, workload.whole) / total

    return model, jax.jit(jax.grad(loss), compiler_options=AS_WRITTEN)


def heavier(data: Any) -> Any:
    return {**data, "weights": data["weights"] + 0.1}


def on_layers(function: Any, p: Placement, x: np.ndarray, axis: int) -> np.ndarray:
    """Returns the function of a tensor; for a stack of layers along `axis`, of each layer."""
    if not p.stacked:
        return function(p, x)
    return np.stack([function(p.without_layers(), layer) for layer in np.moveaxis(x, axis, 0)], axis)


def gradients_by_numpy(wanted: Numpy, used: Any, grad: Any) -> Any:
    """Returns each device's shards `[*mesh, ...]` of the gradients at the parameters `used`, of all micro-steps."""
    plan, mesh = wanted.plan, wanted.plan.mesh.devices
    rows = np.arange(workload.ROWS).reshape(MICRO_STEPS, -1)
    placed = jax.device_put(rows, jax.NamedSharding(plan.mesh, plan.batch_spec))
    of_devices = {shard.device: np.asarray(shard.data) for shard in placed.addressable_shards}
    found = []
    for i in range(MICRO_STEPS):
        each = [jax.tree.map(np.float32, grad(used, of_devices[device][i])) for device in mesh.flat]
        grads = jax.tree.map(lambda *xs: np.stack(xs).reshape(*mesh.shape, *xs[0].shape), *each)
        found.append(plan.map(lambda p, x: on_layers(wanted.scattered, p, x, mesh.ndim), grads))
    return jax.tree.map(np.add, *found)


INTER_INT8, INTRA_INT8 = dict(inter=8, intra=4), dict(inter=4, intra=8)
ZERO_PLUS_PLUS: dict[str, Any] = dict(strategy="zero3", gather="node")
CASES = {  # the model, the bits of gathers and of the group reduce-scatter, and the layout
    "zero3": ("decoder", INTER_INT8, INTRA_INT8, dict(strategy="zero3")),
    "zero3, flat, not pipelined": ("encoder", INTER_INT8, INTRA_INT8, dict(strategy="zero3", hierarchical=False)),
    "zero++": ("decoder", dict(inter=8), dict(inter=4, intra=4), ZERO_PLUS_PLUS),
    "zero2": ("encoder", {}, INTRA_INT8, dict(strategy="zero2")),
    "node/all/all": ("decoder", dict(intra=4), INTRA_INT8, dict(parameters="node", gradients="all", optimizer="all")),
    # 16 bits: without codecs of gathers, because of such values many are in the middle between two integers
    "zero++, bfloat16": ("decoder", {}, dict(inter=4, intra=4), ZERO_PLUS_PLUS),
    "mics(4), bfloat16": ("decoder", {}, INTRA_INT8, dict(strategy="mics", partition_size=4)),
}
OFTEN = "zero++", "zero3, flat, not pipelined"  # in test-all


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name in OFTEN else pytest.mark.slow) for name in CASES]
)
def test_gradients_are_those_of_numpy(name: str) -> None:
    """Each layer is encoded in separate blocks; the group reduce-scatter's codec loses far more than the error.

    A value in the middle between two integers may become either. Hence the tolerance is a share of the codec's error.
    """
    kind, gather, reduce_scatter, how = CASES[name]
    dtype = "bfloat16" if name.endswith("bfloat16") else "float32"
    in_gathers, in_reduce_scatter = (
        LevelCodecs(**{level: Blockwise(bits=n, block=BLOCK) for level, n in bits.items()})
        for bits in (gather, reduce_scatter)
    )
    coded = {"gather_codecs": in_gathers, "reduce_scatter_codecs": in_reduce_scatter, "num_layers": LAYERS}
    plan = workload.plan(kind, overlap="not pipelined" not in name, dtype=dtype, **coded, **how)
    model, grad = gradient(kind, dtype)
    by_numpy = Numpy(plan=plan, gather=gather, reduce_scatter=reduce_scatter)
    params = jax.tree.map(np.asarray, workload.params(kind, LAYERS))
    used = plan.map(lambda p, x: on_layers(by_numpy.gathered, p, x, 0), params)
    wanted = gradients_by_numpy(by_numpy, used, grad)
    plain = gradients_by_numpy(replace(by_numpy, reduce_scatter={}), used, grad)

    def gradients_R(params: Any, data: Any) -> Any:
        return replica_gradients(accumulated(model.objective), plan, params, data)[0]

    data = heavier(workload.put_batch(plan, MICRO_STEPS, kind=kind))
    state = workload.first_state(kind, plan, optax.chain(optax.identity(), optax.identity()), LAYERS)
    found_R = jax.jit(gradients_R, compiler_options=AS_WRITTEN)(state.params, data)
    largest = max(np.linalg.norm(x) for x in jax.tree.leaves(wanted))

    def check(p: Placement, found_R: jax.Array, wanted: np.ndarray, plain: np.ndarray) -> None:
        shards = {shard.device: np.asarray(shard.data)[0] for shard in found_R.addressable_shards}
        mine = np.stack([shards[device] for device in plan.mesh.devices.flat]).reshape(wanted.shape)
        wrong = np.linalg.norm(mine / plan.layout.num_replicas - wanted)
        lost, size = np.linalg.norm(plain - wanted), max(np.linalg.norm(wanted), 0.01 * largest)
        assert p.is_vector or lost > 0.05 * size
        assert wrong < 0.15 * lost + (1e-6 if dtype == "float32" else 0.02) * size

    plan.map(check, found_R, wanted, plain)


# ------------------------------------------------------------------------------------------------ the program


def collectives(sharding: ShardingPlan) -> list[hlo.Collective]:
    compiled = workload.compiled_step("decoder", sharding)[0]
    return hlo.read_collectives(compiled.as_text(), sharding.layout.shape)


def test_the_program_sends_bytes_in_whole_blocks_of_each_matrix_and_vectors_apart() -> None:
    """For two layers, in each micro-step of zero3: the claimed bytes of each matrix, and f32 for the norms."""
    codecs = dict(gather_codecs=LevelCodecs(inter=INT8), reduce_scatter_codecs=LevelCodecs(inter=INT4, intra=INT4))
    found = collectives(workload.plan("decoder", strategy="zero3", **codecs))
    large = [c for c in found if c.payload_bytes >= 200]
    assert {c.label for c in large} == {"gather", "group_reduce_scatter"} and {c.dtype for c in large} == {"u8", "f32"}
    for c in large:
        coded = bool(set(c.axes) & set(INTER_AXES)) or c.label == "group_reduce_scatter"
        assert c.dtype == ("u8" if coded else "f32"), c
    crossing = [c for c in found if set(c.axes) & set(INTER_AXES) and c.label == "gather" and c.times == 2 * 2]
    layer = jax.tree.leaves(workload.specs("decoder")["layers"], is_leaf=lambda x: hasattr(x, "dims"))
    shards = [int(np.prod(spec.shape[1:])) // 8 for spec in layer if len(spec.shape) > 2]
    vectors = [spec.shape[1] // 8 for spec in layer if len(spec.shape) == 2]
    coded = sum(workload.payload_bytes(INT8, size + -size % BLOCK) for size in shards)
    assert len(shards) == 7 and any(size % BLOCK for size in shards) and vectors
    expected = {("u8", 4 * coded), *(("f32", 4 * 4 * size) for size in vectors)}
    assert {(c.dtype, c.payload_bytes) for c in crossing} == expected


@pytest.mark.slow
def test_gathering_once_a_node_crosses_nodes_once() -> None:
    """Between nodes each tensor is gathered and reduced once a micro-step, half of it by each device (hpZ)."""
    found = collectives(workload.plan("decoder", strategy="zero3", gather="node"))
    crossing = [c for c in found if set(c.axes) & set(INTER_AXES) and c.kind != "all-reduce"]
    half = sum(x.size for x in jax.tree.leaves(workload.params("decoder"))) // 2
    assert {c.times for c in crossing} == {2}
    for label in ("gather", "group_reduce_scatter"):
        assert sum(c.num_elements for c in crossing if c.label == label) == half


def test_gathered_payloads_fill_whole_tiles_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level of a gather pads its payload, and the values are the same; other devices pad nothing."""
    plan = workload.plan("tensors", strategy="zero3", gather_codecs=LevelCodecs(inter=INT8, intra=INT4))
    specs = pspecs(plan.placements, plan.layout.parameters)

    def gathered() -> tuple[list[np.ndarray], list[int]]:
        group = plan.group(plan.placements, plan.layout.parameters, coded=True)
        gather = jax.shard_map(
            lambda tree: group.gather(jax.tree.leaves(tree), to="invarying"),
            mesh=plan.mesh,
            in_specs=(specs,),
            out_specs=jax.P(),
        )
        values = jax.tree.map(lambda x: x * jnp.arange(x.size).reshape(x.shape), workload.params("tensors"))
        compiled = jax.jit(gather).lower(values).compile()
        found = hlo.read_collectives(compiled.as_text(), plan.layout.shape)
        sent = [c.payload_bytes // c.group_size for c in found if c.dtype == "u8"]
        return jax.device_get(compiled(values)), sent

    plain, few = gathered()
    monkeypatch.setattr(ShardingPlan, "tile_bytes", TILE_BYTES)
    tiled, many = gathered()
    jax.tree.map(np.testing.assert_array_equal, plain, tiled)
    assert many == [size + -size % TILE_BYTES for size in few] != few


# ------------------------------------------------------------------------------- tensor splits, validation, config


def single_device_loss(params: Any) -> float:
    data = workload.batch()
    return float(workload.model("decoder").loss(params, data, workload.whole) / data["weights"].sum())


def as_gathered(sharding: ShardingPlan, bits: int, degree: int) -> Any:
    """The parameters, each layer's matrix rounded in `degree` times `tensor` parts, the parts of a device."""
    tensor = sharding.layout.shape.tensor

    def round_parts(p: Placement, x: jax.Array) -> np.ndarray:
        whole = np.array(x)
        for layer in () if p.is_vector else whole if p.stacked else (whole,):
            for row in np.split(layer, degree, p.dim - p.stacked):
                for part in [row] if p.tensor_dim is None else np.split(row, tensor, p.tensor_dim - p.stacked):
                    part[...] = rounded(part.reshape(-1), bits).reshape(part.shape)
        return whole

    return sharding.map(round_parts, workload.params("decoder"))


@pytest.mark.slow
@every_row(("bits", "degree", "gather", "where"), [(4, 4, "layer", ("inter", "intra")), (8, 2, "node", ("intra",))])
def test_a_rematerialised_layer_that_is_split_takes_codecs(
    bits: int, degree: int, gather: str, where: tuple[str, ...]
) -> None:
    """The first loss equals a single device's with rounded matrices; later ones include the reduce-scatter's codec."""
    codecs = LevelCodecs(**dict.fromkeys(where, Blockwise(bits=bits, block=BLOCK)))
    how: dict[str, Any] = dict(strategy="mics", partition_size=8, tensor=2, nodes=2, per_node=4, gather=gather)
    sharding = workload.plan("decoder", gather_codecs=codecs, reduce_scatter_codecs=codecs, **how)
    got = workload.losses("decoder", sharding)
    np.testing.assert_allclose(got[0], single_device_loss(as_gathered(sharding, bits, degree)), rtol=1e-6)
    np.testing.assert_allclose(got, workload.single_device_losses("decoder"), rtol={8: 3e-3, 4: 0.04}[bits])


def test_validation_is_of_the_parameters_as_they_are_stored() -> None:
    """The parameters of a checkpoint, not the output of a coded gather."""
    codecs = LevelCodecs(inter=INT4, intra=INT4)
    sharding = workload.plan("decoder", strategy="zero3", gather_codecs=codecs)
    state = workload.first_state("decoder", sharding, optax.chain(optax.identity(), optax.identity()))
    evaluate = jax.jit(build_eval_step(in_turn(workload.model("decoder").evaluate), sharding))
    sums = evaluate(state.params, workload.put_batch(sharding, 1))
    np.testing.assert_allclose(sums["loss"] / sums["weight"], single_device_loss(workload.params("decoder")), rtol=1e-6)


def test_codecs_by_the_config() -> None:
    changes = {"all_gather_inter": "int8", "reduce_scatter_inter": "int4", "block": 64}
    config = CompressionConfig(**(base.get_config().compression.to_dict() | changes))
    gather_codecs, reduce_scatter_codecs, *_ = make_codecs(config)
    assert gather_codecs == LevelCodecs(inter=Blockwise(bits=8, block=64)) and reduce_scatter_codecs == LevelCodecs(
        inter=Blockwise(bits=4, block=64)
    )


# ------------------------------------------------------------------------------------------------ a user's codec


class Signs:
    """It makes a number of every value."""

    multiple = 8

    def encode(self, x: jax.Array, key: jax.Array, real: jax.Array | None = None) -> jax.Array:
        del key, real
        return jnp.packbits(x > 0, axis=-1)

    def decode(self, payload: jax.Array) -> jax.Array:
        return jnp.where(jnp.unpackbits(payload, axis=-1) == 1, 1.0, -1.0)


@every_row(("collective", "places"), [("all_gather", 8), ("reduce_scatter", 1), ("experts", 1)])
def test_a_users_codec_hides_no_value_that_is_not_finite(
    collective: str, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 20 values that a device sends to one other, or to all: all 20 are NaN there, and all else as it was."""
    monkeypatch.setitem(OWN["codec"], "signs", lambda config: Signs())
    made = make_codecs(CompressionConfig(**{f"{collective}_inter": "signs"}))
    plan = workload.plan("tensors", strategy="zero3", hierarchical=False)
    scope = plan.layout.parameters
    xs = np.random.default_rng(0).normal(size=(8, 8, 20)).astype(np.float32)  # [from, to, N]

    def arrived(codecs: LevelCodecs) -> Any:
        def exchange(x: jax.Array) -> jax.Array:
            if collective == "all_gather":
                return all_gather_chunks(x[0, 5], scope, hierarchical=False, codecs=codecs)
            if collective == "reduce_scatter":
                return reduce_scatter_chunks(x[0], scope, hierarchical=False, codecs=codecs)[None]
            return coded_all_to_all_rows(x[0], scope, codecs.over(scope))

        spec = jax.P(scope)
        return jax.jit(jax.shard_map(exchange, mesh=plan.mesh, in_specs=spec, out_specs=spec))

    guarded = arrived(made[("all_gather", "reduce_scatter", "experts").index(collective)])
    unguarded = np.asarray(arrived(LevelCodecs(inter=Signs()))(xs))
    for bad in (np.nan, np.inf, -np.inf):
        xs[3, 5, 7] = bad
        found = np.asarray(guarded(xs))
        is_nan = np.isnan(found)
        assert [*is_nan.sum(axis=-1)].count(20) == places and is_nan.sum() == 20 * places
        np.testing.assert_array_equal(found[~is_nan], unguarded[~is_nan])
