"""Differences of weights: the gather of updated parameters sends how far they moved, encoded, and not their values.

If the optimizer's scope is wider than the parameters' (zero1, zero2, node/all/all), devices keep gathered parameters
between steps. They can add encoded differences to them (SDP4Bit section 3.1 and algorithm 4, arXiv 2410.15526):

    difference = main parameters - kept parameters         main parameters: the optimizer's, exact
    kept parameters += decoded difference                  on every device, the same bits

An encoding error is part of the next step's difference, so that errors do not add up. The state holds the errors, main
parameters minus kept ones, because a device has the kept ones anyway.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding.gathers import gather_differences
from sharding.plan import ShardingPlan
from sharding.step import Optimizer
from sharding.trees import Grads, Params, PyTree


class DifferencesState(NamedTuple):
    """State of an optimizer whose updates are gathered as differences."""

    inner: PyTree  # the optimizer's
    errors: Params  # f32, in the optimizer's scope: main parameters minus kept parameters


@dataclass(frozen=True)
class WeightDifferences:
    """An optimizer of the main parameters. It returns how far the kept parameters move, in their scope."""

    plan: ShardingPlan
    optimizer: Optimizer

    def init(self, params: Params) -> DifferencesState:
        """Returns the state before the first step, in which kept and main parameters are equal."""
        return DifferencesState(self.optimizer.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(
        self, updates: Grads, state: DifferencesState, params: Params | None = None
    ) -> tuple[Params, DifferencesState]:
        """Returns how far the kept parameters move by a gradient, in the parameters' scope, and the state after it.

        `params` are the kept parameters in the optimizer's scope, like the gradient.
        """
        assert params is not None
        updates, inner = self.optimizer.update(updates, state.inner, jax.tree.map(jnp.add, params, state.errors))
        moves, errors = gather_differences(self.plan, jax.tree.map(jnp.add, updates, state.errors))
        return moves, DifferencesState(inner, errors)
