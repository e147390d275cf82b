"""Replicas of local SGD, written out on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from configs.schema import LocalSGDConfig
from sharding.plan import ShardingPlan
from support import workload

LAYOUTS = {"mics(2)": dict(strategy="mics", partition_size=2), "ddp": dict(nodes=2, strategy="ddp")}


LEARNING_RATE = 0.05  # with 0.3 rounding grows in so many steps


def inner() -> optax.GradientTransformation:
    """Clipping and momentum: a replica alone takes other steps than all replicas together."""
    return optax.chain(optax.clip_by_global_norm(0.8), optax.sgd(LEARNING_RATE, 0.9))


def replicas_written_out(
    rows: list[np.ndarray], settings: LocalSGDConfig, steps: int, parts: Any = None, kind: str = "decoder"
) -> tuple[list[float], Any]:
    """Returns the losses and the shared parameters of the rule; `rows` are the rows of each replica.

    Streaming, `parts` says in which part each element of a parameter is.
    """
    value_and_grad, weights = workload.value_and_grad(kind), workload.batch(kind=kind)["weights"]
    own = np.array([[weights[r].sum() / weights.sum()] for r in rows])  # a replica's mean is over its own rows
    first, as_tree = ravel_pytree(workload.trained_and_frozen(kind)[0])
    shared, number = np.asarray(first), np.asarray(ravel_pytree(parts)[0])
    velocity = np.zeros_like(shared)  # the outer one
    momenta = drifts = np.zeros((len(rows), shared.size), np.float32)
    losses, mu, rate = [], settings.outer_momentum, settings.outer_learning_rate
    for step in range(steps):
        found = [value_and_grad(as_tree(shared + drift), rows[r]) for r, drift in enumerate(drifts)]
        losses.append(sum(float(loss) for loss, _ in found))
        grads = np.stack([ravel_pytree(grads)[0] for _, grads in found]) / own
        momenta = 0.9 * momenta + grads * np.minimum(1, 0.8 / np.linalg.norm(grads, axis=1, keepdims=True))
        moves, sent = -LEARNING_RATE * momenta, -drifts.mean(0)
        drifts = drifts + moves
        if settings.streaming:  # the movement of this step is kept
            here, left = number == step % settings.inner_steps, moves
        else:
            here, left, sent = (step + 1) % settings.inner_steps == 0, 0, -drifts.mean(0)
        drifts = np.where(here, left, drifts).astype(np.float32)
        velocity = np.where(here, mu * velocity + sent, velocity)
        shared = (shared - np.where(here, rate * (sent + mu * velocity), 0)).astype(np.float32)  # Nesterov
    return losses, as_tree(shared)


def rows_of_replicas(plan: ShardingPlan, accumulation: int = 2) -> list[np.ndarray]:
    """Returns which rows of the batch each replica trains on."""
    rows = np.arange(workload.ROWS).reshape(accumulation, -1)
    placed = jax.device_put(rows, jax.NamedSharding(plan.mesh, plan.batch_spec))
    by_device = {shard.device: np.asarray(shard.data).reshape(-1) for shard in placed.addressable_shards}
    numbers = jnp.arange(plan.layout.num_replicas)
    spec = jax.sharding.PartitionSpec(plan.layout.replica_axes)
    found: dict[int, list[np.ndarray]] = {}
    for shard in jax.device_put(numbers, jax.NamedSharding(plan.mesh, spec)).addressable_shards:
        found.setdefault(int(shard.data[0]), []).append(by_device[shard.device])
    return [np.concatenate(found[r]) for r in range(len(found))]
