"""mics.py: MiCS in loops of others. Losses of one device, bytes of compiled programs, and trainers that adopt it."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.running import ROOT

import mics
from compression.codecs import Blockwise
from examples import minimal
from sharding.hlo import Collective, read_collectives
from sharding.mesh import MeshShape

ROWS, MICRO_STEPS, STEPS = 32, 4, 3
MATRICES, REST = 2 * 16 * 64, 64 + 16 + 4  # values
SHAPE = MeshShape(replica_inter=4, shard_inter=1, replica_intra=1, shard_intra=2, tensor=1)


def first_params() -> dict[str, Any]:
    """Matrices, vectors, a vector that no group divides, and a scalar."""
    random = np.random.default_rng(0)
    layers = [(jnp.float32(random.normal(0, 0.3, shape)), jnp.zeros(shape[1])) for shape in ((16, 64), (64, 16))]
    return {"layers": layers, "odd": jnp.ones(3), "scale": jnp.ones(())}


def hidden(params: Any, x: jax.Array) -> jax.Array:
    for weights, bias in params["layers"]:
        x = jnp.tanh(x @ weights + bias[None])
    return x * params["scale"] + params["odd"].sum()


def loss_of(params: Any, batch: Any) -> jax.Array:
    """A mean over rows; its loop starts with zeros of its own."""
    zeros = jnp.zeros(len(batch["x"]))
    total, _ = lax.scan(lambda total, column: (total + column, None), zeros, hidden(params, batch["x"]).T)
    return jnp.mean((total / 16 - batch["y"]) ** 2)


def first_batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {"x": np.float32(random.normal(size=(ROWS, 16))), "y": np.float32(random.normal(size=ROWS))}


def make_mesh(nodes: int = 4, per_node: int = 2, kind: AxisType = AxisType.Explicit) -> Mesh:
    devices = jax.devices()[: nodes * per_node]
    return jax.make_mesh((nodes, per_node), ("data", "model"), axis_types=(kind,) * 2, devices=devices)


def plan_on(mesh: Mesh) -> mics.LoopPlan:
    return mics.make_plan(mesh, jax.eval_shape(first_params), replica_axis="data", shard_axis="model")


def sgd() -> optax.GradientTransformation:
    """Its update shows a gradient that is wrong by a factor, as Adam's does not."""
    return optax.sgd(0.1, 0.9)


def compiled(mesh: Mesh, codec: Any = None) -> tuple[Any, Any, Any, Any]:
    """Returns the compiled step of a loop with mics, and its arguments."""
    plan = plan_on(mesh)
    params = jax.device_put(first_params(), plan.shardings())
    tx = optax.chain(mics.all_reduce(plan, codec), sgd())

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads_R = mics.value_and_grad(loss_of, plan, micro_steps=MICRO_STEPS)(params, batch)
        updates, state = tx.update(grads_R, state, params)
        return optax.apply_updates(params, updates), state, loss

    args = params, tx.init(params), jax.device_put(first_batch(), NamedSharding(mesh, P(("data", "model"))))
    return jax.jit(step).lower(*args).compile(), *args


@cache
def with_codec() -> tuple[Any, Any, Any, Any]:
    """Where the user's mesh is the global one, as `jax.set_mesh` makes it."""
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        return compiled(mesh, Blockwise(bits=8, block=256))


def losses(step: Any, params: Any, state: Any, batch: Any) -> list[float]:
    found = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, batch)
        found.append(float(loss))
    return found


def between_nodes(compiled: Any) -> list[Collective]:
    return [c for c in read_collectives(compiled.as_text(), SHAPE) if c.inter_bytes]


@cache
def single_device_losses() -> list[float]:
    tx = sgd()

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    return losses(step, first_params(), tx.init(first_params()), first_batch())


@pytest.mark.parametrize("shape", [(1, 8), (8, 1)], ids=str)
def test_losses_equal_a_single_device(shape: tuple[int, int]) -> None:
    np.testing.assert_allclose(losses(*compiled(make_mesh(*shape))), single_device_losses(), rtol=1e-5)


def test_a_step_crosses_nodes_once_and_four_times_less_than_with_automatic_all_reduces() -> None:
    """The bytes are those of the formula in docs/concepts.md. XLA's all-reduces follow each micro-step."""
    step, *args = compiled(make_mesh(kind=AxisType.Auto))
    np.testing.assert_allclose(losses(step, *args), single_device_losses(), rtol=1e-5)
    crossing = between_nodes(step)
    wanted = 2 * 4 * ((MATRICES + REST - 4) / 2 + 4) * 3 / 4
    loss = 2 * 4 * 7 / 8 / 2  # a scalar in a ring over all devices, half of whose edges are between nodes
    assert sum(c.inter_bytes for c in crossing) == wanted + loss and all(c.times == 1 for c in crossing)
    inside = [c for c in read_collectives(step.as_text(), SHAPE) if not c.inter_bytes and c.num_elements > 4]
    assert {(c.label, c.times) for c in inside} == {("gather", 1), ("group_reduce_scatter", MICRO_STEPS)}

    def automatic(params: Any, batch: Any) -> Any:
        add = lambda total, rows: (jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, rows)), None)
        return lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, params)), batch)[0]

    mesh = make_mesh(kind=AxisType.Auto)
    params = jax.device_put(first_params(), plan_on(mesh).shardings())
    rows = jax.tree.map(lambda x: x.reshape(MICRO_STEPS, -1, *x.shape[1:]), first_batch())
    rows = jax.device_put(rows, NamedSharding(mesh, P(None, ("data", "model"))))
    found = between_nodes(jax.jit(automatic).lower(params, rows).compile())
    assert sum(c.times * c.inter_bytes for c in found) > 3.99 * (wanted + loss)  # the whole vector takes another way


def test_a_codec_encodes_matrices_and_keeps_each_replica_s_errors() -> None:
    step, params, state, batch = with_codec()
    crossing = [c for c in between_nodes(step) if c.label == "replica_all_reduce"]
    encoded = sum(c.inter_bytes for c in crossing if c.dtype == "u8")
    exact = sum(c.inter_bytes for c in crossing if c.dtype == "f32")
    assert encoded == 2 * (MATRICES / 2) * (1 + 4 / 256) * 3 / 4  # a byte per value and a scale per block
    assert exact == 2 * 4 * ((REST - 4) / 2 + 4 + 1) * 3 / 4  # and whether gradients are finite
    assert 3.9 * encoded < 2 * 4 * (MATRICES / 2) * 3 / 4
    np.testing.assert_allclose(losses(step, params, state, batch), single_device_losses(), rtol=1e-2)
    residuals = jax.tree.leaves(state[0].residual)
    assert residuals and all(x.sharding.shard_shape(x.shape)[0] == 1 for x in residuals)
    _, after, _ = step(params, state, batch)
    assert any(np.any(x) for x in jax.tree.leaves(after[0].residual))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_no_device_holds_the_errors_of_all_replicas_at_the_start(kind: AxisType) -> None:
    plan = plan_on(make_mesh(kind=kind))
    state: Any = mics.all_reduce(plan, Blockwise(bits=8, block=256)).init(
        jax.device_put(first_params(), plan.shardings())
    )
    residuals = jax.tree.leaves(state.residual)
    assert residuals and all(x.sharding.shard_shape(x.shape)[0] == 1 for x in residuals)


def test_gradients_that_are_not_finite_leave_the_errors_as_they_were() -> None:
    step, params, state, batch = with_codec()
    _, state, _ = step(params, state, batch)
    bad = batch | {"y": jax.device_put(np.full(ROWS, np.nan, np.float32), batch["y"].sharding)}
    moved, after, _ = step(params, state, bad)
    jax.tree.map(np.testing.assert_array_equal, after[0], state[0])
    assert np.isnan(moved["layers"][0][0]).all()


def test_gradients_equal_those_of_unreduced_sums() -> None:
    """The oracle is jax's explicit sharding: sums stay unreduced over micro-steps, and are then reduced once."""
    mesh, params = (
        make_mesh(),
        [weights for weights, _ in first_params()["layers"]],
    )  # it defers only products' gradients
    loss = lambda params, x: jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2)
    plan = mics.make_plan(mesh, params, replica_axis="data", shard_axis="model")

    def unreduced(params: Any, rows: jax.Array) -> Any:
        deferred = jax.tree.map(lambda x: jax.reshard(x, P(reduced={"data", "model"})), params)
        zeros = jax.tree.map(lambda x: jax.reshard(jnp.zeros_like(x), P(unreduced={"data", "model"})), params)
        add = lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(loss)(deferred, x)), None)
        return jax.tree.map(lambda x: jax.reshard(x, P()) / MICRO_STEPS, lax.scan(add, zeros, rows)[0])

    def ours(params: Any, x: jax.Array) -> Any:
        tx = mics.all_reduce(plan)
        grads_R = mics.value_and_grad(loss, plan, micro_steps=MICRO_STEPS)(params, x)[1]
        return tx.update(grads_R, tx.init(params))[0]

    x = first_batch()["x"]
    with jax.set_mesh(mesh):
        args = (
            jax.device_put(params, NamedSharding(mesh, P())),
            jax.device_put(x, NamedSharding(mesh, P(("data", "model")))),
        )
        rows = jax.device_put(x.reshape(MICRO_STEPS, -1, 16), NamedSharding(mesh, P(None, ("data", "model"))))
        oracle, step = jax.jit(unreduced).lower(args[0], rows).compile(), jax.jit(ours).lower(*args).compile()
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), step(*args), oracle(args[0], rows)
        )
    assert {c.times for c in between_nodes(oracle)} == {1} == {c.times for c in between_nodes(step)}


def test_a_parameter_is_divided_on_its_largest_dim_and_arrives_whole_in_its_dtype() -> None:
    mesh = make_mesh()
    params = {
        "tall": jnp.ones((8, 4), jnp.bfloat16),
        "wide": jnp.ones((4, 2, 8)),
        "odd": jnp.ones((3, 5)),
        "one": jnp.ones(()),
    }
    plan = mics.make_plan(mesh, params, replica_axis="data", shard_axis="model")
    assert {name: x.spec for name, x in plan.shardings().items()} == {
        "tall": P("model", None),
        "wide": P(None, None, "model"),
        "odd": P(None, None),
        "one": P(),
    }
    arrived = {}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        arrived.update(jax.tree.map(lambda x: (x.shape, x.dtype), params), rows=x.shape)
        return sum(jnp.sum(x, dtype=jnp.float32) for x in params.values()) * jnp.mean(x)

    value, grads_R = jax.eval_shape(mics.value_and_grad(loss, plan, micro_steps=2), params, jnp.ones((32, 7)))
    assert arrived == {name: (x.shape, x.dtype) for name, x in params.items()} | {"rows": (2, 7)}
    assert value.shape == () and grads_R["tall"].shape == (4, 8, 4) and grads_R["tall"].dtype == jnp.bfloat16


def test_aux_is_a_mean_over_the_rows_and_leaves_the_gradients_as_they_are() -> None:
    """`[columns]` and a scalar, of devices and micro-steps; with the same loss and gradients as without."""
    plan, (params, batch) = plan_on(make_mesh()), (first_params(), first_batch())

    def with_aux(params: Any, batch: Any) -> Any:
        return loss_of(params, batch), {"columns": batch["x"].mean(0), "scale": params["scale"]}

    run = jax.jit(mics.value_and_grad(with_aux, plan, micro_steps=MICRO_STEPS, has_aux=True))
    (value, aux), grads_R = run(params, batch)
    plain = jax.jit(mics.value_and_grad(loss_of, plan, micro_steps=MICRO_STEPS))(params, batch)
    jax.tree.map(np.testing.assert_array_equal, (value, grads_R), plain)
    np.testing.assert_allclose(aux["columns"], batch["x"].mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(aux["scale"], 1.0, rtol=1e-6)


def test_mistakes_are_one_line() -> None:
    mesh, params = make_mesh(), {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
    make = lambda mesh=mesh, params=params, replica_axis="data": mics.make_plan(
        mesh, params, replica_axis=replica_axis, shard_axis="model"
    )
    run = mics.value_and_grad(lambda params, x: x.mean(), make(), micro_steps=2)
    reduce = mics.all_reduce(make())

    def returned(out: Callable[[jax.Array], Any], has_aux: bool = True) -> Any:
        run = mics.value_and_grad(lambda params, x: out(x), make(), has_aux=has_aux)
        return jax.eval_shape(run, params, jnp.ones(8))

    mistakes = {
        "replica_axis=node, shard_axis=model: the mesh must have these two axes in": lambda: make(replica_axis="node"),
        "replica_axis=data, .* order, not model, data$": lambda: make(Mesh(mesh.devices.T, ("model", "data"))),
        "n is int32 and has no gradient": lambda: make(params=params | {"n": jnp.ones(2, int)}),
        r"a batch array \[24, 3\] needs a multiple of 16 rows: 8 devices times 2 micro-steps$": lambda: run(
            params, {"x": jnp.ones((24, 3))}
        ),
        r"a batch array \[\] needs a multiple of 16 rows": lambda: run(params, jnp.ones(())),
        r"a batch array \[0, 3\] needs a multiple of 16 rows": lambda: run(params, jnp.ones((0, 3))),
        "a batch needs arrays with the same number of rows, and has 16 and 32$": lambda: run(
            params, {"x": jnp.ones((16, 3)), "y": jnp.ones(32)}
        ),
        "a batch needs arrays with the same number of rows, and has no arrays$": lambda: run(params, {}),
        "micro_steps=0 must be 1 or more$": lambda: mics.value_and_grad(loss_of, make(), micro_steps=0),
        "the tree of parameters is empty": lambda: make(params={}),
        "aux correct must be a float, a mean over the rows, and is int": lambda: returned(
            lambda x: (x.mean(), {"correct": len(x)})
        ),
        "aux must be a float, .* and is int32": lambda: returned(lambda x: (x.mean(), jnp.argmax(x))),
        "has_aux=True: the loss must return": lambda: returned(lambda x: x.mean()),
        "the loss must return a scalar": lambda: returned(lambda x: (x.mean(), x.max()), has_aux=False),
        "the loss must return a scalar, or": lambda: returned(lambda x: x, has_aux=False),
        "stacks='w' must be a list of names$": lambda: mics.make_plan(
            mesh, params, replica_axis="data", shard_axis="model", stacks="w"
        ),
        "the plan has 2 parameters and this tree 1; make a plan": lambda: run({"w": params["w"]}, jnp.ones(16)),
        "the plan has 2 parameters and this tree 0": lambda: mics.all_reduce(make()).init({}),
        r"w is \[4, 3\], not \[4, 2\]: ": lambda: run(params | {"w": jnp.ones((4, 3))}, jnp.ones(16)),
        r"b is \[4, 2\], not \[2\]: ": lambda: run(jax.tree.map(lambda x: jnp.stack([x] * 4), params), jnp.ones(16)),
        r"b is \[2\], not \[4, 2\]: all_reduce takes": lambda: reduce.update(params, reduce.init(params)),
    }
    for message, mistake in mistakes.items():
        with pytest.raises(ValueError, match=f"^{message}") as caught:
            mistake()
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------- examples that adopt it


def without_mics(text: str) -> str:
    """Returns the trainer before it adopted mics, by the marks of its lines."""
    kept = [line for line in text.splitlines() if not line.endswith("  # +")]
    return "\n".join(re.sub(r"^( *)# - ?", r"\1", line) for line in kept)


def run_example(text: str, train: str) -> tuple[list[float], float]:
    """Returns the losses of a trainer, and the bytes between nodes of its step."""
    found: dict[str, Any] = {"__name__": "trainer", "__file__": str(ROOT / "examples" / "trainer.py")}
    with jax.numpy_rank_promotion("allow"):
        exec(text, found)
        losses, lowered = eval(train, found)(STEPS)
        step = lowered.compile()
    return losses, sum(c.times * c.inter_bytes for c in between_nodes(step))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "train"), [("flax_nnx", "train"), ("plain_jax", "Trainer().train")])
def test_a_trainer_adopts_mics_with_fewer_than_20_changed_lines(name: str, train: str) -> None:
    """Added and removed lines together. Losses stay, and a step sends at most a quarter between nodes."""
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert 10 < len(re.findall(r"(?m)  # \+$|^ *# -", text)) < 20
    before = without_mics(text)
    assert "mics." not in before.partition('"""\n\n')[2]
    old, new = run_example(before, train), run_example(text, train)
    np.testing.assert_allclose(new[0], old[0], rtol=1e-5)
    assert old[1] > 4 * new[1]


@pytest.mark.slow
def test_the_minimal_example_trains_and_sends_a_quarter_of_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    with jax.numpy_rank_promotion("allow"):
        losses = minimal.main(10)
    assert losses[-1] < losses[0] - 1
    whole, _, sent = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", capsys.readouterr().out))
    assert 3.8 < (2 * whole / 2 * 3 / 4) / sent < 4
