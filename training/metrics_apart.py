"""`MetricsApart`: the metrics of drifting replicas (local SGD), averaged when the replicas sync."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from sharding.trees import Means
from training.experiment import Experiment
from training.optimizer_chain import WATCHED, of_all_replicas


class MetricsApart:
    """Keeps each replica's metrics `[R]` on its own devices."""

    def __init__(self, ex: Experiment) -> None:
        self._add = jax.jit(_added)
        self._together = jax.jit(partial(of_all_at_once, whole=ex.replicated), out_shardings=ex.replicated)
        self._sums: Means = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a step, without communication."""
        self._sums = self._add(self._sums, metrics) if self._sums else dict(metrics)

    def together(self) -> Means:
        """Returns means over all replicas and the steps since `begin`, and the WATCHED metrics of the last step.

        All processes must call it after the same step.
        """
        return self._together(self._sums)

    def begin(self) -> None:
        """Starts the next means at the next step."""
        self._sums = {}


def of_all_at_once(metrics: Means, *, whole: NamedSharding) -> Means:
    """Returns the metrics of all replicas. One collective gathers those `[R]` of a dtype: each takes round trips."""
    apart: dict[tuple[Any, ...], list[str]] = {}
    for name, x in metrics.items():
        if x.ndim:
            apart.setdefault((x.dtype, x.shape), []).append(name)
    for names in apart.values():
        rows = lax.with_sharding_constraint(jnp.stack([metrics[name] for name in names]), whole)
        metrics = {**metrics, **dict(zip(names, rows, strict=True))}
    return of_all_replicas(metrics)


def _added(sums: Means, metrics: Means) -> Means:
    return {name: sums[name] + x if x.ndim and name not in WATCHED else x for name, x in metrics.items()}
