"""Trains M replicas as arrays `[M, ...]` of one device: the losses of `train.py` on M nodes.

Losses do not depend on the mesh (docs/concepts.md), so that a study of losses needs neither M devices nor collectives.
Model, optimizers, local SGD, `delayed` and codecs are the product's. An exchange is the product's Route under a vmap
over the replicas, whose axis is named like the mesh axis between nodes.

Shapes: M replicas, K steps of a program, b rows of a replica, T positions.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import models
from compression.chosen_codecs import make_codec
from compression.exchange import transform
from compression.local_sgd import LocalSGD, LocalState
from compression.route import Route
from compression.statistics import State, nothing_sent, zeros_R
from compression.timings import delayed
from configs.schema import Config
from sharding.coded import Codec
from sharding.collectives import slice_apart
from sharding.spec import is_spec
from sharding.step import AfterMicroSteps, AllReduce, States, applied
from sharding.trees import Grads, GradsR, Params, PyTree, Specs
from training.optimizers import make_optimizer

AXIS = "replica_inter"
CODECS_FROM = 0, 11  # of jax: before it a vmap cannot hold collectives of typed values


class RunState(NamedTuple):
    """The state that a step changes."""

    params: Params  # shared by the replicas
    states: States  # the replica all-reduce's and the optimizer's


@dataclass(frozen=True)
class VirtualReplicas:
    """The compiled programs of a config's training by M replicas.

    The learning rate is an argument, because a sweep then compiles once: updates of AdamW and Muon are proportional to
    it. So `optimizer.learning_rate` must be 1.
    """

    config: Config
    replicas: int

    @cached_property
    def model(self) -> models.Model:
        """The model."""
        return models.build(self.config.model)

    def init(self, seed: int) -> RunState:
        """Returns the state before the first step."""
        params = self.model.init(jax.random.key(seed))
        return RunState(params, self.timing(0.0).init(params))

    def timing(self, rate: jax.typing.ArrayLike) -> LocalSGD | AfterMicroSteps:
        """Returns the config's exchanges and optimizer with a learning rate."""
        config, specs = self.config, self.model.trained_specs()
        optimizer = optax.chain(make_optimizer(config.optimizer, config.num_steps, specs), optax.scale(rate))
        codec = make_codec(config.compression.all_reduce, config.compression)
        mean = exchange(codec, specs, self.replicas)
        if config.local_sgd.inner_steps:
            return LocalSGD(mean, optimizer, config.local_sgd, self.replicas)
        return AfterMicroSteps(delayed(mean, self.replicas) if config.compression.delayed else mean, optimizer)

    @cached_property
    def steps(self) -> jax.stages.Wrapped:
        """The program `steps(state, rate, tokens int32 [K, M, b, T + 1]) -> (state, losses f32 [K])`."""

        def run(state: RunState, rate: jax.Array, tokens: jax.Array) -> tuple[RunState, jax.Array]:
            timing = self.timing(rate)

            def step(state: RunState, tokens_MbT: jax.Array) -> tuple[RunState, jax.Array]:
                losses, grads_R = self._gradients(state, tokens_MbT)
                moves, states = timing.update(grads_R, state.states, state.params)
                return RunState(applied(state.params, moves), states), jnp.mean(losses)

            return lax.scan(step, state, tokens)

        return jax.jit(run)

    @cached_property
    def loss(self) -> jax.stages.Wrapped:
        """The program `loss(params, tokens int32 [rows, T + 1]) -> f32 []`, in nats per token."""
        return jax.jit(self._loss)

    def _gradients(self, state: RunState, tokens_MbT: jax.Array) -> tuple[jax.Array, GradsR]:
        """Returns each replica's loss `[M]` and gradients `[M, ...]`, each the mean over the replica's rows."""
        of_one = jax.value_and_grad(self._loss)
        local = state.states[1]
        if not isinstance(local, LocalState):
            return jax.vmap(of_one, in_axes=(None, 0))(state.params, tokens_MbT)
        own_R = jax.tree.map(lambda p, drift_R: p[None] + drift_R, state.params, local.drift.tree)
        return jax.vmap(of_one)(own_R, tokens_MbT)

    def _loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        batch["weights"] = jnp.ones(batch["tokens"].shape, jnp.float32)
        return self.model.loss(params, batch, lambda name, tree: tree) / batch["weights"].size


def exchange(codec: Codec | None, specs: Specs, replicas: int) -> AllReduce:
    """Returns the transform from gradients `[M, ...]` to their mean; like compression.exchange, without devices.

    ValueError for a codec with a jax that cannot map typed collectives over replicas.
    """
    if codec is None:
        mean = lambda updates, state, params=None: (jax.tree.map(lambda x: jnp.mean(x, axis=0), updates), state)
        return transform(lambda params: State(), mean)
    if jax.__version_info__ < CODECS_FROM:
        raise ValueError(f"virtual replicas with a codec need jax 0.11, not {jax.__version__}; use Python 3.12")
    route = Route(codec=codec, scatter=(), gather=(AXIS,))
    is_vector = [spec.is_vector for spec in jax.tree.leaves(specs, is_leaf=is_spec)]

    def init(params: Params) -> State:
        return State(step=jnp.zeros((), jnp.int32), residual=zeros_R(replicas, params), sent=nothing_sent())

    def update(updates: GradsR, state: PyTree, params: Params | None = None) -> tuple[Grads, State]:
        del params
        gradients, structure = jax.tree.flatten(updates)
        residuals = jax.tree.leaves(state.residual.tree)
        shares = [x / replicas + kept for x, kept in zip(gradients, residuals, strict=True)]
        key = jax.random.fold_in(jax.random.key(0), state.step)
        coded = [x for x, alone in zip(shares, is_vector, strict=True) if not alone]
        packed = jnp.concatenate([x.reshape(replicas, 1, -1) for x in coded], axis=-1)
        totals, errors, _ = jax.vmap(lambda x: route.exchange(x, key), axis_name=AXIS)(packed)
        sums = iter(slice_apart(totals[0], [x.shape[1:] for x in coded]))
        kept = iter(jax.vmap(lambda x: slice_apart(x[0], [x.shape[1:] for x in coded]))(errors))
        out = [jnp.sum(x, axis=0) if alone else next(sums) for x, alone in zip(shares, is_vector, strict=True)]
        left = [jnp.zeros_like(x) if alone else next(kept) for x, alone in zip(shares, is_vector, strict=True)]
        residual = replace(state.residual, tree=structure.unflatten(left))
        return structure.unflatten(out), state._replace(step=state.step + 1, residual=residual)

    return transform(init, update)


def divided(rows: np.ndarray, replicas: int) -> np.ndarray:
    """Returns the rows `[K, rows, ...]` of steps as `[K, M, b, ...]`: replica r has the r-th part, as in train.py."""
    return rows.reshape(rows.shape[0], replicas, -1, *rows.shape[2:])
