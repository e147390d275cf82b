"""A training loop with MiCS groups of 2 devices and int8 gradients, in plain JAX: a small transformer predicts bytes.

    python examples/minimal.py

runs on a CPU, which simulates 4 nodes of 2 devices. It prints losses, and the bytes that a device sends in a step, read
from the compiled program.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

import mics
from compression.codecs import Blockwise
from sharding.hlo import bytes_per_step, read_collectives

NODES, DEVICES_PER_NODE, MICRO_STEPS = 4, 2, 4
LAYERS, WIDTH, HEADS, LENGTH = 2, 64, 4, 32
ROWS, STEPS = 64, 40
PAGES = Path(__file__).parents[1] / "docs"


def first_params(key: jax.Array) -> dict[str, Any]:
    """Returns the parameters; layers are stacked, `[LAYERS, ...]`."""
    shapes = {
        "bytes": (256, WIDTH),
        "positions": (LENGTH, WIDTH),
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
        "head": (WIDTH, 256),
    }
    keys = jax.random.split(key, len(shapes))
    normal = {name: jax.random.normal(k, shape) / shape[-2] ** 0.5 for k, (name, shape) in zip(keys, shapes.items())}
    layers = {name: normal.pop(name) for name in ("qkv", "out", "up", "down")} | {"norms": jnp.ones((LAYERS, 2, WIDTH))}
    return normal | {"layers": layers, "norm": jnp.ones(WIDTH)}


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x` [..., WIDTH] with a root mean square of `scale` [WIDTH]."""
    return x * scale * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def layer(x: jax.Array, params: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """Returns `x` [rows, LENGTH, WIDTH] after attention and an MLP."""
    qkv = (normalised(x, params["norms"][0]) @ params["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    x += jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True).reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(normalised(x, params["norms"][1]) @ params["up"]) @ params["down"], None


def loss_of(params: dict[str, Any], text: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy, in nats, of the bytes [rows, LENGTH + 1] but the first of each row."""
    x = params["bytes"][text[:, :-1]] + params["positions"]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = normalised(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def batches(sharding: NamedSharding) -> Iterator[jax.Array]:
    """Yields rows [ROWS, LENGTH + 1] of this project's pages, divided over all devices."""
    text = np.frombuffer(b"".join(page.read_bytes() for page in sorted(PAGES.glob("*.md"))), np.uint8)
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(text) - LENGTH, (ROWS, 1))
        yield jax.device_put(text[starts + np.arange(LENGTH + 1)].astype(np.int32), sharding)


def main(num_steps: int = STEPS) -> list[float]:
    """Trains, and returns the loss of each step."""
    mesh = jax.make_mesh((NODES, DEVICES_PER_NODE), ("node", "device"))
    rows = batches(NamedSharding(mesh, PartitionSpec(("node", "device"))))
    params = first_params(jax.random.key(0))

    plan = mics.make_plan(mesh, params, replica_axis="node", shard_axis="device")
    params = jax.device_put(params, plan.shardings())
    value_and_grad = mics.value_and_grad(loss_of, plan, micro_steps=MICRO_STEPS)
    tx = optax.chain(mics.all_reduce(plan, Blockwise(bits=8, block=256)), optax.adamw(3e-3))
    state = tx.init(params)

    def step(params: Any, state: Any, text: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads_R = value_and_grad(params, text)
        updates, state = tx.update(grads_R, state, params)
        return optax.apply_updates(params, updates), state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, next(rows)).compile()
    sent = bytes_per_step(read_collectives(compiled.as_text() or "", plan.inner.layout.shape))
    print(f"parameters: {sum(x.nbytes for x in jax.tree.leaves(params)):,} bytes")
    print(f"a device sends in a step, inside its node: {sent['collective_intra_bytes']:,} bytes")
    print(f"a device sends in a step, between nodes: {sent['collective_inter_bytes']:,} bytes")
    losses = []
    for i in range(1, num_steps + 1):
        params, state, loss = compiled(params, state, next(rows))
        losses.append(float(loss))
        if i == 1 or i % 10 == 0:
            print(f"step {i}: loss {losses[-1]:.4f} nats per byte")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NODES * DEVICES_PER_NODE)
    main()
