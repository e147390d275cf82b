"""mics.gather: a loss that gathers one layer at a time. Losses, gathers in the compiled program, and its memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.suite import SLOW

import mics
from sharding.hlo import read_collectives
from sharding.mesh import MeshShape

LAYERS, WIDTH, WIDE = 8, 32, 128
ROWS, MICRO_STEPS, STEPS = 32, 2, 3
SHAPE = MeshShape(replica_inter=4, shard_inter=1, replica_intra=1, shard_intra=2, tensor=1)
LAYER_VALUES = 2 * WIDTH * WIDE + WIDE
STACKS = {"stack": ("layers",), "list": ()}
Mode = str  # "stack": a scan over `[L, ...]`; "list": a Python loop


def first_params(mode: Mode) -> dict[str, Any]:
    """A stack has a number per layer, too: without `stacks`, the devices of a node would divide these `[L]`."""
    random = np.random.default_rng(0)
    shapes = {"up": (WIDTH, WIDE), "bias": (1, WIDE), "down": (WIDE, WIDTH)}
    layers = [
        {name: jnp.float32(random.normal(0, 0.1, shape)) for name, shape in shapes.items()} for _ in range(LAYERS)
    ]
    if mode == "stack":
        layers = jax.tree.map(lambda *xs: jnp.stack(xs), *layers) | {"scale": jnp.ones(LAYERS)}
    return {"layers": layers, "head": jnp.float32(random.normal(0, 0.1, (WIDTH, 4)))}


def layer(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    return x + jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] * params.get("scale", 1.0)


def loss_with(gather: Any) -> Any:
    """Returns the loss of a model that gathers its parameters where it uses them."""
    run = jax.checkpoint(lambda x, params: layer(x, gather(params)))

    def loss(params: Any, batch: Any) -> jax.Array:
        if isinstance(params["layers"], list):
            x = batch["x"]
            for one in params["layers"]:
                x = run(x, one)
        else:
            x, _ = lax.scan(lambda x, one: (run(x, one), None), batch["x"], params["layers"])
        return jnp.mean((x @ gather(params["head"]) - batch["y"]) ** 2)

    return loss


def first_batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {name: np.float32(random.normal(size=(ROWS, n))) for name, n in (("x", WIDTH), ("y", 4))}


def make_mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"))


def plan_of(mode: Mode) -> mics.LoopPlan:
    shapes = jax.eval_shape(lambda: first_params(mode))
    return mics.make_plan(make_mesh(), shapes, replica_axis="data", shard_axis="model", stacks=STACKS[mode])


def compiled(mode: Mode, *, by_layer: bool) -> tuple[Any, ...]:
    """Returns the compiled step of a loop, and its arguments."""
    plan = plan_of(mode)
    loss = loss_with((lambda tree: mics.gather(plan, tree)) if by_layer else (lambda tree: tree))
    run = mics.value_and_grad(loss, plan, micro_steps=MICRO_STEPS, loss_gathers=by_layer)
    tx = optax.chain(mics.all_reduce(plan), optax.sgd(0.3, 0.9))

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads_R = run(params, batch)
        updates, state = tx.update(grads_R, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.device_put(first_params(mode), plan.shardings())
    batch = jax.device_put(first_batch(), NamedSharding(plan.mesh, P(("data", "model"))))
    args = params, tx.init(params), batch
    return jax.jit(step).lower(*args).compile(), *args


def losses(step: Any, params: Any, state: Any, batch: Any) -> list[float]:
    values = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, batch)
        values.append(float(loss))
    return values


def single_device_losses(mode: Mode) -> list[float]:
    tx = optax.sgd(0.3, 0.9)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_with(lambda tree: tree))(params, batch)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    return losses(step, first_params(mode), tx.init(first_params(mode)), first_batch())


def gathered_bytes(step: Any) -> int:
    """Returns the bytes that a device sends in gathers of parameters in a step."""
    return sum(c.times * c.intra_bytes for c in read_collectives(step.as_text(), SHAPE) if c.label == "gather")


@pytest.mark.parametrize("mode", ["stack", pytest.param("list", marks=SLOW)])
def test_a_loss_that_gathers_each_layer_has_the_losses_of_a_single_device(mode: Mode) -> None:
    """Each micro-step gathers each layer forward and backward; gradients still cross nodes once per step.

    In a scan temporaries have the parameters and gradients of a single layer, of a list all gradients, in XLA's order.
    With jax 0.10, XLA keeps the layers of a list from the forward to the backward pass.
    """
    (step, *args), whole = compiled(mode, by_layer=True), compiled(mode, by_layer=False)[0]
    np.testing.assert_allclose(losses(step, *args), single_device_losses(mode), rtol=1e-5)
    passes = 1 if mode == "list" and jax.__version__.startswith("0.10.") else 2
    each_micro_step = passes * LAYERS * LAYER_VALUES + WIDTH * 4
    assert gathered_bytes(step) == 4 * MICRO_STEPS * each_micro_step / 2
    assert gathered_bytes(whole) == 4 * (LAYERS * LAYER_VALUES + WIDTH * 4) / 2
    crossing = [c for c in read_collectives(step.as_text(), SHAPE) if c.inter_bytes]
    assert crossing and all(c.times == 1 for c in crossing)
    temporaries = [x.memory_analysis().temp_size_in_bytes / (4 * LAYERS * LAYER_VALUES) for x in (step, whole)]
    assert temporaries[0] < {"stack": 0.3, "list": 1.2}[mode] and (mode == "list" or temporaries[1] > 2.4)


def test_a_flax_module_gathers_its_layers() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
            self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def loss(net: Net, batch: Any, gather: Any = lambda module: module) -> jax.Array:
        x = batch["x"]
        for module in (*net.layers, net.head):
            x = jnp.tanh(gather(module)(x))
        return jnp.mean((x - batch["y"]) ** 2)

    with jax.numpy_rank_promotion("allow"):
        net = Net(nnx.Rngs(0))
        wanted = jax.jit(jax.value_and_grad(loss))(net, first_batch())
        plan = mics.make_plan(make_mesh(), net, replica_axis="data", shard_axis="model")
        by_layer = lambda net, batch: loss(net, batch, lambda module: mics.gather(plan, module))
        run = jax.jit(mics.value_and_grad(by_layer, plan, loss_gathers=True))
        value, grads_R = run(jax.device_put(net, plan.shardings()), first_batch())
    pairs = zip(jax.tree.leaves((value, jax.tree.map(lambda g: g.mean(0), grads_R))), jax.tree.leaves(wanted))
    for found, oracle in pairs:
        np.testing.assert_allclose(found, oracle, rtol=1e-4, atol=1e-7)


def test_mistakes_with_stacks_are_one_line() -> None:
    params = {"layers": {"scale": jnp.ones((4, 3))}, "head": jnp.ones((4, 2))}
    make = lambda *stacks: mics.make_plan(make_mesh(), params, replica_axis="data", shard_axis="model", stacks=stacks)
    assert make("layers").shardings()["layers"]["scale"].spec == P(None, None)

    def run(loss: Any) -> Any:
        return jax.eval_shape(mics.value_and_grad(loss, make(), loss_gathers=True), params, jnp.ones((8, 1)))

    def scanned(params: Any, _: Any) -> jax.Array:
        return lax.scan(lambda x, scale: (x + mics.gather(make(), scale).sum(), None), 0.0, params["layers"]["scale"])[
            0
        ]

    mistakes = {
        "stacks: layer has no parameters; the first parameter is head$": lambda: make("layer"),
        "a stack of layers was divided between layers; name it": lambda: run(scanned),
        "gather takes parameters as a loss gets them from": lambda: run(
            lambda params, _: mics.gather(make(), mics.gather(make(), params["head"])).sum()
        ),
    }
    for message, mistake in mistakes.items():
        with pytest.raises(ValueError, match=f"^{message}") as caught:
            mistake()
        assert "\n" not in str(caught.value)
