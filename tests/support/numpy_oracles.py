"""Shared by numpy oracles of the replica all-reduce and local SGD: an exchange with a codec, and an update."""

from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any

import jax
import numpy as np

from sharding.plan import ShardingPlan, gradient_specs
from sharding.state import state_shardings
from sharding.step import first_state as begin
from support import workload
from support.exchanging import is_vector

Code = Callable[[np.ndarray], np.ndarray]  # the values of a block, as they arrive
REPLICAS, STEPS, BLOCK = 4, 20, 32
SEED = 4  # the first seed with only clear choices
SURE = 1e-6  # a choice between two values has to be clearer: sums are rounded differently on other CPUs
SPECS = jax.tree.leaves(workload.TENSORS)
ORDER = sorted(range(len(SPECS)), key=lambda i: is_vector(SPECS[i]))  # matrices first, as they are packed
CODED = sum(prod(spec.shape) for spec in SPECS if not is_vector(spec))  # values


@cache
def replicas_on(nodes: int) -> ShardingPlan:
    """Returns the plan of so many nodes of one device, each a replica."""
    return workload.plan("tensors", nodes=nodes, per_node=1, strategy="ddp")


def program(plan: ShardingPlan, tx: Any, params: Any = None) -> tuple[Any, Callable[..., Any]]:
    """Returns the first states of a chain, where they belong, and its jitted update, which is compiled once."""
    params = workload.params("tensors") if params is None else params
    places = state_shardings(plan, jax.eval_shape(partial(begin, tx), params)).chain
    grads = jax.tree.map(lambda spec: jax.NamedSharding(plan.mesh, spec), gradient_specs(plan))
    whole = plan.shardings(plan.layout.optimizer)
    update = jax.jit(tx.update, in_shardings=(grads, places, whole), out_shardings=(whole, places))
    return jax.device_put(tx.init(params), places), update


def flat(tree: Any, replicas: int = 1) -> np.ndarray:
    """Returns the values of a tree like the parameters as `[R, N]`, the CODED ones of the matrices first."""
    leaves = jax.tree.leaves(tree)
    return np.concatenate([np.asarray(leaves[i]).reshape(replicas, -1) for i in ORDER], axis=1)


def unflat(values: np.ndarray) -> Any:
    """Returns the tree of which `[N]` are the values: undoes `flat`."""
    leaves, tree = jax.tree.flatten(workload.params("tensors"))
    pieces = np.split(values, np.cumsum([leaves[i].size for i in ORDER])[:-1])
    found = dict(zip(ORDER, pieces, strict=True))
    return tree.unflatten([found[i].reshape(x.shape) for i, x in enumerate(leaves)])


def noise(rng: np.random.Generator) -> Any:
    """Returns random gradients `[R, ...]`, of each replica of another size; sums over the replicas round nowhere."""
    sizes = rng.uniform(0.01, 0.03, REPLICAS)

    def draw(p: jax.Array) -> np.ndarray:
        values = np.moveaxis(rng.normal(size=(*p.shape, REPLICAS)) * sizes, -1, 0)
        return (np.round(values * 2**20) / 2**20).astype(np.float32)

    return jax.tree.map(draw, workload.params("tensors"))


def exchanged(values_R: np.ndarray, kept_R: np.ndarray, code: Code, block: int = BLOCK) -> tuple[Any, Any]:
    """Returns the mean `[N]` of `[R, N]` as it arrives, and each replica's residual for the next exchange.

    All encode their shares, the owner of each of R pieces the sum.
    """
    waiting, every = values_R / len(values_R) + kept_R, np.arange(values_R.shape[1])
    sent = np.stack([coded(x, code, block) for x in waiting])
    total = sent.sum(0)
    arrived, kept = coded(total, code, block), waiting - sent
    owner = every // (-(-CODED // (len(values_R) * block)) * block)
    kept[np.minimum(owner, len(values_R) - 1), every] += total - arrived
    return arrived, kept


def coded(x: np.ndarray, code: Code, block: int) -> np.ndarray:
    """Returns values `[N]` as they arrive: matrices are encoded block by block, vectors are not."""
    out = x.copy()
    for start in range(0, CODED, block):
        here = slice(start, min(start + block, CODED))
        out[here] = code(x[here])
    return out


def integers(x: np.ndarray, most: int) -> np.ndarray:
    scale = np.abs(x).max() * np.float32(1 / most)
    return np.round(x / scale) * scale if scale else x


def statistical(x: np.ndarray, least: float = SURE) -> np.ndarray:
    """Two magnitudes, the means of those below and above 1.23 times the mean of all."""
    sizes = np.abs(x)
    split = np.float32(1.23) * sizes.mean()
    large = sizes > split
    assert np.abs([*sizes, *(sizes - split)]).min() > least * split
    means = np.where(large, sizes[large].mean(), sizes[~large].mean())
    return np.where(x >= 0, means, -means)


def one_bit(x: np.ndarray) -> np.ndarray:
    size = np.abs(x).mean()
    assert np.abs(x).min() > SURE * size
    return np.where(x >= 0, size, -size)
