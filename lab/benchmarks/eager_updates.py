"""Local SGD with eager updates (Kale et al. 2025, arXiv 2502.12996), to compare its loss; not a method of the product.

    python -m lab.benchmarks.eager_updates --config=... --workdir=... [--config.a.b=value ...]

The words are train.py's, with `local_sgd.inner_steps` above 0. The mean of the outer gradients is applied a round late,
so that their exchange may take a whole round. Each replica r has its own outer parameters, which Nesterov's SGD moves
at the end of round t by the fresh gradient of r and the late gradients of the others:

    gradient_r(t) = mean(delta(t-1)) + (delta_r(t) - delta_r(t-1)) / M

with M replicas, and delta_r(t) the parameters of r at the start of round t minus those at its end. Nesterov's SGD is
linear, so the outer parameters of r are the sum of two parts. One is common to all replicas, and moves by the late
mean. The other is 1/M of the step that `delta_r` alone would make, with a velocity of r.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import train
from compression.local_sgd import LocalSGD
from configs.schema import Config
from sharding.replicas import PerReplica
from sharding.step import States
from sharding.trees import Grads, GradsR, Params, PyTree
from training.experiment import Experiment


class EagerOuter(NamedTuple):
    """The outer optimizer's state."""

    shared: PyTree  # state of the optimizer that moves the shared parameters
    waiting: PerReplica  # each replica's outer gradient of the latest round, which is being exchanged
    velocity: PerReplica  # Nesterov's, by each replica's own outer gradients


@dataclass(frozen=True, kw_only=True)
class EagerLocalSGD(LocalSGD):
    """A Timing: the mean of the outer gradients arrives a round late; each replica uses its own at once.

    The sync after step `last`, the end of the run, waits for the exchange, so that no outer gradient is lost. For
    models without running averages.
    """

    last: int

    def init(self, params: Params) -> States:
        """Returns the states before the first step, of parameters `[...]`."""
        all_reduce, local = super().init(params)
        return all_reduce, local._replace(outer=EagerOuter(local.outer, local.drift, local.drift))

    def ahead(self, outer: EagerOuter) -> GradsR:
        """Returns each replica's outer parameters minus the shared ones, `[R, ...]`."""
        rate, momentum = self.config.outer_learning_rate / self.replicas, self.config.outer_momentum
        return jax.tree.map(lambda g, v: -rate * (g + momentum * v), outer.waiting.tree, outer.velocity.tree)

    def meet(self, states: States, params: Params) -> tuple[Grads, States]:
        """Returns how far the shared parameters `[...]` move by the late mean, and the states after it."""
        before, local = states
        start_R, velocity = self.ahead(local.outer), local.outer.velocity
        moves, (after, local) = self._apply_mean(before, local, params)
        delta_R = jax.tree.map(jnp.subtract, start_R, local.drift.tree)
        velocity_R = jax.tree.map(lambda v, g: self.config.outer_momentum * v + g, velocity.tree, delta_R)
        outer = local.outer._replace(
            waiting=replace(local.outer.waiting, tree=delta_R), velocity=replace(velocity, tree=velocity_R)
        )
        local = local._replace(drift=replace(local.drift, tree=self.ahead(outer)), outer=outer)

        def end() -> tuple[Grads, States]:
            final, states = self._apply_mean(after, local, params)
            return jax.tree.map(jnp.add, moves, final), states

        return lax.cond(local.step == self.last, end, lambda: (moves, (after, local)))

    def _apply_mean(self, before: PyTree, local: PyTree, params: Params) -> tuple[Grads, States]:
        """Returns how far the shared parameters move by the mean of the waiting gradients, and the states after it."""
        mean, after = self.exchange.update(local.outer.waiting.tree, before, params)
        moves, shared = self.outer_step(mean, local._replace(outer=local.outer.shared))
        return moves, (after, local._replace(outer=local.outer._replace(shared=shared)))


def make(config: Config) -> Experiment:
    """Returns the parts of a run of train.py, with eager updates."""
    ex = train.make_experiment(config)
    local = ex.chain
    assert type(local) is LocalSGD, "local SGD in one program, in which all parameters sync together"
    parts = local.exchange, local.inner, local.config, local.replicas, local.watch
    return replace(ex, chain=EagerLocalSGD(*parts, last=config.num_steps))


def main(argv: Sequence[str]) -> int:
    """Runs train.py with eager updates; returns its exit code."""
    return train.main(argv, make=make)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
