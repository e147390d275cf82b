"""Work units of local SGD's rounds: the inner steps of one worker, from one sync to the next.

    worker   from the common parameters and the common state of the optimizer: `inner_steps` steps on separate rows
    sync     the mean of all workers' deltas is the outer gradient; the workers continue with the mean of their
             optimizers' states, in which counters are rounded up

A worker is a function of the common state and its rows. So the number of workers is the number of units, for any number
of replicas, and the units of a lost replica are computed again, to the same bits. In one world each replica keeps the
state of its optimizer (Douillard et al. 2023, arXiv 2311.08105). Here this state would be lost with the replica, so it
is exchanged. It is encoded like the delta, but in bf16 if the delta has a codec, unless it changes too slowly for bf16.
The delta of parameters with one dim per layer is sent unencoded, with the counters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compression.local_sgd import LocalSGD, LocalState
from configs.schema import Config
from configs.schema.own import OWN
from elastic.replicas.payloads import LOSSLESS, Payload, pieces
from elastic.replicas.sums import Piece
from sharding.gathers import to_parameter_scope
from sharding.gradients import accumulated
from sharding.step import TrainState, applied, build_train_step
from sharding.trees import Batch, Means, Params, PyTree
from training.experiment import Experiment
from training.optimizer_chain import of_all_replicas
from training.replica_state import LocalShard, local_shards, local_size, with_values

LEAST_FALL = 0.02  # least decay of a moment between two syncs for bf16, which rounds by up to 0.4 %


class RoundUnits:
    """The compiled programs of a worker's step and of a sync."""

    def __init__(self, ex: Experiment) -> None:
        """Nothing is compiled yet. ValueError for validation or checkpoints between two syncs."""
        self._ex, self.steps = ex, ex.config.local_sgd.inner_steps
        for name, every in (("eval", ex.config.eval.every), ("checkpoint", ex.config.checkpoint.every)):
            if every % self.steps:
                raise ValueError(
                    f"{name}.every={every} must be a multiple of local_sgd.inner_steps={self.steps}: independent "
                    "replicas have no common parameters between two meetings"
                )

    def compile(self) -> jax.stages.Compiled:
        """Returns the compiled step of a worker; compiles the rest too, because peers would wait for that later."""
        _ = self.first, self.meeting
        return self.step

    def _step(self, worker: TrainState, params: Params, frozen: Params, batch: Batch) -> tuple[TrainState, Means]:
        """Returns the worker after a step, and the weighted sums over its rows: loss, auxiliary metrics, weight."""
        ex = self._ex
        timing = replace(self._timing, watch=lambda states: {})
        one = build_train_step(accumulated(ex.model.objective), ex.plan, timing)
        state, sums_R = one(replace(worker, params=params, frozen=frozen), batch)
        return worker_of(state), {name: x[0] for name, x in sums_R.items()}  # a worker's world is one replica

    @property
    def _timing(self) -> LocalSGD:
        assert isinstance(self._ex.chain, LocalSGD)
        return self._ex.chain

    @cached_property
    def _shapes(self) -> tuple[PyTree, ...]:
        """The shapes of the arguments of a worker's step."""
        shapes = self._ex.state_shapes
        return worker_of(shapes), shapes.params, shapes.frozen, self._ex.batches.shapes

    @cached_property
    def step(self) -> jax.stages.Compiled:
        """The compiled `step(worker, params, frozen, batch) -> (worker, sums)`, which donates the worker."""
        out = _shardings(self._shapes[0]), self._ex.replicated
        return self._ex.compiled(jax.jit(self._step, donate_argnums=0, out_shardings=out).lower(*self._shapes))

    @cached_property
    def first(self) -> jax.stages.Compiled:
        """The compiled copy of a worker, as it is after a meeting."""
        worker, *_ = self._shapes
        jitted = jax.jit(lambda worker: jax.tree.map(jnp.copy, worker), out_shardings=_shardings(worker))
        return jitted.lower(worker).compile()

    @cached_property
    def meeting(self) -> jax.stages.Compiled:
        """The compiled `meet(state, inner_R, drift_R) -> (state, watched)` of the workers' means; donates all."""
        plan, timing, shapes = self._ex.plan, self._timing, self._ex.state_shapes

        def met(state: TrainState, inner_R: PyTree, drift_R: PyTree) -> tuple[TrainState, Means]:
            local = state.opt_state
            met = {"inner": replace(local.inner, tree=inner_R), "drift": replace(local.drift, tree=drift_R)}
            local = local._replace(step=local.step + self.steps, **met)
            params = plan.constrain(state.params, plan.layout.optimizer)
            moves, states = timing.meet((state.all_reduce, local), params)
            moved = replace(state, step=state.step + self.steps, all_reduce=states[0], opt_state=states[1])
            moved = replace(moved, params=to_parameter_scope(plan, applied(params, moves)))
            return moved, of_all_replicas(timing.watch(states))

        jitted = jax.jit(met, donate_argnums=(0, 1, 2), out_shardings=(_shardings(shapes), self._ex.replicated))
        return self._ex.compiled(jitted.lower(shapes, shapes.opt_state.inner.tree, shapes.opt_state.drift.tree))

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the weighted sums over all steps of all workers, in the order in the last piece."""
        return sorted(jax.eval_shape(self._step, *self._shapes)[1])

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of values in the encoded delta, the optimizer's state, and all unencoded arrays."""
        return [sum(map(local_size, part)) for part in self.parts(self._ex.state_shapes.opt_state)]

    def parts(self, local: LocalState) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Returns the arrays of the encoded delta, of the inner optimizer's state, and the unencoded arrays."""
        are_vectors = jax.tree.leaves(self._ex.plan.map(lambda p: p.is_vector))
        drift = [*zip(are_vectors, jax.tree.leaves(local.drift.tree), strict=True)]
        vectors, counters = [x for is_one, x in drift if is_one], filter(_is_counter, jax.tree.leaves(local.inner.tree))
        return [x for is_one, x in drift if not is_one], _moments(local), [*vectors, *counters]

    @cached_property
    def _bounds(self) -> tuple[list[tuple[int, int]], ...]:
        """The beginning and end of each piece of the encoded delta, of the optimizer's state, and of the last piece."""
        block, (coded, kept, exact) = self._ex.config.compression.block, self.sizes
        return pieces(coded, block), pieces(kept, block), [(0, exact + len(self.metrics))]

    @property
    def unit_layout(self) -> list[Piece]:
        """The size and payload of each piece of a unit."""
        compression = self._ex.config.compression
        payload = Payload(codec=compression.all_reduce, block=compression.block)
        each = zip(self._bounds, (payload, state_payload(self._ex.config), LOSSLESS), strict=True)
        return [Piece(stop - start, form) for bounds, form in each for start, stop in bounds]

    def pieces(self, state: TrainState, batches: Iterator[Batch]) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the number and values of each piece of a worker, after its last step; `batches` has one per step."""
        worker, sums_of_steps = self.first(worker_of(state)), []
        for batch in batches:
            worker, sums = self._ex.block(self.step(worker, state.params, state.frozen, batch))
            sums_of_steps.append(sums)
        of_steps = jax.device_get(sums_of_steps)
        vectors = [vector_of(part) for part in self.parts(worker.opt_state)]
        vectors[-1] = np.append(vectors[-1], [np.sum([sums[name] for sums in of_steps]) for name in self.metrics])
        each = zip(vectors, self._bounds, strict=True)
        all_values = (vector[start:stop] for vector, bounds in each for start, stop in bounds)
        for number, values in enumerate(all_values):
            yield number, np.asarray(values, np.float32)

    def update(self, state: TrainState, total: np.ndarray) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after a meeting, and the metrics, from the sums of all pieces over all workers."""
        return self.synced(state, total / np.float32(self._ex.num_shares))

    def synced(self, state: TrainState, means: np.ndarray) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after a meeting, and the metrics, from the means of all pieces."""
        *parts, sums = np.split(means, np.cumsum(self.sizes))
        (coded, kept, exact), local = map(_Values, parts), state.opt_state
        drift_R = self._ex.plan.map(lambda p, x: with_values(x, exact if p.is_vector else coded), local.drift.tree)
        inner_R = jax.tree.map(lambda x: with_values(x, exact if _is_counter(x) else kept), local.inner.tree)
        state, watched = self.meeting(state, inner_R, drift_R)
        return state, {**weighted_means(dict(zip(self.metrics, sums, strict=True))), **watched}


def weighted_means(sums: Mapping[str, np.float32]) -> dict[str, np.float32]:
    """Returns means from weighted sums and the sum of their weights, `weight`; zeros where all weights are zero."""
    weight = sums["weight"] if sums["weight"] > 0 else np.float32(1)
    return {name: x / weight for name, x in sums.items() if name != "weight"}


class _Values:
    """Gives the values of one shard after the other, from a vector of them."""

    def __init__(self, mean: np.ndarray) -> None:
        self._mean, self._at = mean, 0

    def __call__(self, shard: LocalShard) -> np.ndarray:
        """Returns the values of a shard; counters are rounded up."""
        data, start = shard.data, self._at
        self._at += data.size
        values = self._mean[start : self._at].reshape(data.shape)
        return (np.ceil(values) if jnp.issubdtype(data.dtype, jnp.integer) else values).astype(data.dtype)


def state_payload(config: Config) -> Payload:
    """Returns how the state of the inner optimizers travels: in bf16 a moment that falls more slowly would stay."""
    compression, optimizer = config.compression, config.optimizer
    left = max(optimizer.momentum, optimizer.b1, optimizer.b2) ** config.local_sgd.inner_steps
    # adafactor's decay nears 1 in the course of a run; a registered optimizer's decay is not known
    is_slow = 1 - left < LEAST_FALL or optimizer.name in ("adafactor", *OWN["optimizer"])
    is_exact = compression.all_reduce == "none" or is_slow
    return LOSSLESS if is_exact else Payload(codec="bf16")


def of_workers(local: LocalState) -> int:
    """Returns how many values of the inner optimizers' states travel, of all replicas of a state."""
    return sum(x.size for x in _moments(local))


def worker_of(state: TrainState) -> TrainState:
    """Returns the part of a state that a worker changes."""
    return replace(state, params={}, frozen={}, opt_state=state.opt_state._replace(outer=()))


def _moments(local: LocalState) -> list[jax.Array]:
    """Returns the arrays of the inner optimizer's state, but its counters."""
    return [x for x in jax.tree.leaves(local.inner.tree) if not _is_counter(x)]


def _is_counter(x: jax.Array) -> bool:
    """Whether an array `[1, ...]` of a state is to travel without loss: a scalar, or integers."""
    return x.ndim == 1 or not jnp.issubdtype(x.dtype, jnp.floating)


def vector_of(arrays: Sequence[jax.Array]) -> np.ndarray:
    """Returns the values of this process' shards, f32 [N]."""
    values = [np.asarray(shard.data).reshape(-1).astype(np.float32) for shard in local_shards(list(arrays))]
    return np.concatenate([*values, np.zeros(0, np.float32)])


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.sharding, tree)
