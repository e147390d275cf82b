"""Tunes local SGD: the validation loss by interval, outer step, inner optimizer and codec, all seeds at once.

    python -m lab.benchmarks.local_steps [--most=100]

The text of lab/benchmarks/accuracy.toml, whose four replicas are here rows of one array on one device, without
collectives: the losses are those of train.py (docs/compression_accuracy.md says how near), in a fraction of its time.
Codecs and optimizers are the library's; a codec encodes each tensor by itself. Runs what is not recorded yet of
local_steps.toml; adds one line per setting to results/measured/local_steps.jsonl.
"""

import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import models
from compression.codecs import make_codec
from compression.sparse_loco import Chunks
from configs import base
from configs.schema import Config
from input_pipeline import load
from input_pipeline.batches import batch_at
from input_pipeline.dataset import Split
from lab.benchmarks.accuracy import RUNS, TASKS
from lab.benchmarks.runner import Key, options_of, program, run_missing
from lab.records import MEASURED
from sharding.spec import is_spec
from training.optimizers import is_matrix, make_optimizer, make_schedule

RESULTS = MEASURED / "local_steps.jsonl"
SETTINGS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["settings"]
NUM_STEPS, REPLICAS, SEEDS = TASKS["text"]["keys"]["num_steps"], 4, (0, 1, 2)
OF_TASK = (NUM_STEPS, SEEDS)  # the run of accuracy.jsonl
DENSE = {"inner_steps": 1, "momentum": 0.0, "rate": 1.0, "codec": "none"}  # with the gradients' mean
# without them a setting has the task's length, those seeds, Muon's usual momentum, equal intervals and its own states,
# and stands beside dense runs of its own length
NONE = dict.fromkeys(("num_steps", "seeds", "inner_momentum", "follows_rate", "state", "beside"))
# (is it a matrix, a tensor's shares [R, ...], what is kept of them [R, ...]) -> what arrives [...], what is kept
Compress = Callable[[bool, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the settings that are missing; returns 1 if one failed."""
    options = options_of(__doc__, argv, most=(1000, "number of settings, from the first"))
    keys = [{"dense": False, **DENSE, **NONE, **setting} for setting in SETTINGS]
    return run_missing(RESULTS, keys[: options.most], measured)


def run_of(line: Key) -> tuple[int, tuple[int, ...]]:
    """Returns the length of a setting's runs, in steps, and their seeds."""
    return line.get("num_steps") or NUM_STEPS, tuple(line.get("seeds") or SEEDS)


def dense_of(line: Key) -> tuple[int, tuple[int, ...]]:
    """Returns what `run_of` does, of the dense runs that a setting stands beside."""
    length, seeds = run_of(line)
    return line.get("beside") or length, seeds


@cache
def experiment(num_steps: int, seeds: Sequence[int]) -> tuple[Config, models.Model, Any, Any, Any]:
    """Returns config, model, first parameters, and the batches of training and validation, all of each seed."""
    config = base.get_config()
    config.update_from_flattened_dict(RUNS["replicas"] | TASKS["text"]["keys"])
    config.num_steps = num_steps
    typed = base.typed(config)
    rows = range(typed.batch.global_size)
    model = models.build(typed.model)

    def batches(split: Split, count: int) -> Any:
        each = [load(typed.data, split, seed) for seed in seeds]
        found = [[batch_at(data, i, global_size=len(rows), rows=rows) for i in range(count)] for data in each]
        return jax.tree.map(lambda *xs: np.stack(xs), *(jax.tree.map(lambda *xs: np.stack(xs), *of) for of in found))

    params = jax.vmap(lambda seed: model.init(jax.random.key(seed)))(jnp.asarray(seeds))
    return typed, model, params, batches("train", typed.num_steps), batches("validation", typed.eval.num_batches)


def measured(key: Key) -> dict[str, Any]:
    """Returns the validation losses, by seed, and how many times fewer bytes a node sends than in the dense runs."""
    config, model, params, train, validation = experiment(*run_of(key))
    values = config.to_dict()
    values["optimizer"] |= {"name": key["optimizer"], "learning_rate": key["learning_rate"]}
    values["optimizer"]["momentum"] = key["inner_momentum"] or config.optimizer.momentum
    specs = model.param_specs()
    optimizer = base.typed(base.ConfigDict(values)).optimizer
    tx = make_optimizer(optimizer, config.num_steps, specs)
    matrices = jax.tree.map(is_matrix, specs, is_leaf=is_spec)
    outer = optax.sgd(key["rate"], key["momentum"] or None, nesterov=True)
    compress, sent = compressed(key, config)

    def loss(params: Any, batch: Any) -> jax.Array:
        return model.loss(params, batch, lambda _, tree: tree) / batch["weights"].sum()

    @jax.jit
    @jax.vmap
    def step(params_R: Any, states_R: Any, batch: Any) -> tuple[Any, Any]:
        shared = {name: x.reshape(REPLICAS, -1, *x.shape[1:]) for name, x in batch.items()}
        grads_R = jax.vmap(jax.grad(loss))(params_R, shared)
        if key["dense"]:
            grads_R = jax.tree.map(lambda g: jnp.broadcast_to(g.mean(0), g.shape), grads_R)
        moves_R, states_R = jax.vmap(tx.update)(grads_R, states_R, params_R)
        return jax.tree.map(jnp.add, params_R, moves_R), states_R

    @jax.jit
    @jax.vmap
    def meet(params_R: Any, states_R: Any, params: Any, velocity: Any, kept_R: Any) -> tuple[Any, ...]:
        if key["state"] == "mean":  # as with independent replicas
            states_R = jax.tree.map(lambda x_R: copies(x_R.mean(0).astype(x_R.dtype)), states_R)
        shares_R = jax.tree.map(lambda p, p_R: (p - p_R) / REPLICAS, params, params_R)
        found = jax.tree.map(compress, matrices, shares_R, kept_R)
        total, kept_R = (jax.tree.map(lambda _, pair, i=i: pair[i], params, found) for i in (0, 1))
        moves, velocity = outer.update(total, velocity, params)
        params = optax.apply_updates(params, moves)
        return copies(params), states_R, params, velocity, kept_R

    @jax.jit
    @jax.vmap
    def start(params: Any) -> tuple[Any, ...]:
        kept_R = copies(jax.tree.map(jnp.zeros_like, params))
        return copies(params), copies(tx.init(params)), params, outer.init(params), kept_R

    def copies(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (REPLICAS, *jnp.shape(x))), tree)

    params_R, states_R, *shared = start(params)
    meetings = {*range(key["inner_steps"], config.num_steps, key["inner_steps"]), config.num_steps}
    if key["follows_rate"]:  # as many, at equal sums of the learning rate (after arXiv 2310.14423)
        rates = np.cumsum(jax.vmap(make_schedule(optimizer, config.num_steps))(jnp.arange(config.num_steps)))
        meetings = {1 + int(i) for i in np.searchsorted(rates, np.linspace(0, rates[-1], len(meetings) + 1)[1:])}
    for i in range(config.num_steps):
        params_R, states_R = step(params_R, states_R, jax.tree.map(lambda x, i=i: x[:, i], train))
        if i + 1 in meetings and not key["dense"]:
            params_R, states_R, *shared = meet(params_R, states_R, *shared)
    last = jax.tree.map(lambda x: x[:, 0], params_R)
    losses = jax.jit(jax.vmap(lambda *of: jnp.mean(jax.lax.map(partial(loss, of[0]), of[1]))))(last, validation)
    one_seed = jax.tree.map(lambda x: x[0], params)
    f32 = sum(4 * x.size for x in jax.tree.leaves(one_seed)) * 2 * (REPLICAS - 1) / REPLICAS
    meeting = sum(jax.tree.leaves(jax.tree.map(sent, matrices, one_seed)))
    if key["state"] == "mean":
        kept = jax.tree.leaves(jax.eval_shape(tx.init, one_seed))
        meeting += sum(4 * x.size for x in kept if x.ndim) * 2 * (REPLICAS - 1) / REPLICAS
    smaller = dense_of(key)[0] * f32 / (len(meetings) * meeting)
    return {"validation_losses": [float(x) for x in losses], "times_smaller": smaller}


def compressed(key: Key, config: Config) -> tuple[Compress, Callable[[bool, jax.Array], float]]:
    """Returns the exchange of a tensor's shares, and the bytes that a node sends of a tensor; vectors go as they are.

    Both are told first whether the tensor is a matrix.
    """
    chosen = key["codec"]
    codec = None if chosen in ("none", "sparse_loco") else make_codec(chosen, config.compression)

    def there_and_back(x: jax.Array) -> jax.Array:
        assert codec
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % codec.multiple)])
        real = jnp.arange(padded.shape[-1]) < x.shape[-1]
        coded = codec.encode(padded, jax.random.key(0), jnp.broadcast_to(real, padded.shape))
        return codec.decode(coded)[..., : x.shape[-1]]

    def exchange(matrix: bool, shares_R: jax.Array, kept_R: jax.Array) -> tuple[jax.Array, jax.Array]:
        if chosen == "none" or not matrix:
            return shares_R.sum(0), kept_R
        flat = (shares_R + key.get("decay", 1.0) * kept_R).reshape(REPLICAS, -1)
        if codec is None:
            chunks = Chunks(size=flat.shape[1], density=key["density"])
            sent = jax.vmap(lambda x: chunks.decode(chunks.encode(x)))(flat)
            total, kept = sent.sum(0), flat - sent
        else:  # both halves of an all-reduce; what the second loses, its owner keeps
            sent = there_and_back(flat)
            total = there_and_back(sent.sum(0))
            owners = jnp.arange(REPLICAS)[:, None] == jnp.arange(flat.shape[1]) * REPLICAS // flat.shape[1]
            kept = flat - sent + jnp.where(owners, sent.sum(0) - total, 0)
        return total.reshape(shares_R.shape[1:]), kept.reshape(shares_R.shape)

    def sent_bytes(matrix: bool, x: jax.Array) -> float:
        if chosen == "sparse_loco" and matrix:
            return (REPLICAS - 1) * Chunks(size=x.size, density=key["density"]).payload_bytes
        whole = 4 * x.size
        if codec and matrix:
            padded = jax.ShapeDtypeStruct((x.size + -x.size % codec.multiple,), jnp.float32)
            whole = jax.eval_shape(codec.encode, padded, jax.random.key(0)).size
        return whole * 2 * (REPLICAS - 1) / REPLICAS

    return exchange, sent_bytes


if __name__ == "__main__":
    sys.exit(main())
