"""`MetricsApart`: the metrics of replicas that drift apart, put together when the replicas meet (local SGD)."""

from collections.abc import Mapping
from typing import Any

import jax

from training.experiment import Experiment
from training.optimizer_chain import WATCHED, of_all_replicas

Metrics = dict[str, jax.Array]


class MetricsApart:
    """Keeps each replica's metrics `[R]` on its own devices."""

    def __init__(self, ex: Experiment) -> None:
        self._every = ex.config.local_sgd.inner_steps
        self._add, self._together = jax.jit(_added), jax.jit(_together, out_shardings=ex.replicated)
        self._sums: Metrics = {}
        self._steps, self._is_over = 0, False

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a step; nothing travels."""
        self._sums = self._add(self._sums, metrics) if self._steps else dict(metrics)
        self._steps += 1
        self._is_over = step % self._every == 0

    def together(self) -> Metrics:
        """Returns means over all replicas and the steps since the last multiple of `local_sgd.inner_steps`.

        What is watched is that of the last step. All processes call it after the same step.
        """
        found = self._together(self._sums, self._steps)
        self._steps = 0 if self._is_over else self._steps
        return found


def _is_mean(name: str, x: jax.Array) -> bool:
    return x.ndim > 0 and name not in WATCHED


def _added(sums: Metrics, metrics: Metrics) -> Metrics:
    return {name: sums[name] + x if _is_mean(name, x) else x for name, x in metrics.items()}


def _together(sums: Metrics, steps: jax.typing.ArrayLike) -> Metrics:
    return of_all_replicas({name: x / steps if _is_mean(name, x) else x for name, x in sums.items()})
