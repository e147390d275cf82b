"""What the `sweep_NAME` functions of a sweep file return: iterables of overrides, and the ways to combine them.

An override is a dict from keys of the config to values, `{"optimizer.learning_rate": 1e-3}`; one dict is one run. The
other keys that a sweep may set are in docs/sweeps.md.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Overrides = Mapping[str, Any]
Distribution = Callable[[random.Random], Any]  # draws one value


def over(key: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns a run for each value of one key."""
    return [{key: value} for value in values]


def product(*sweeps: Iterable[Overrides]) -> list[dict[str, Any]]:
    """Returns a run for each combination, the first sweep outermost. ValueError if two sweeps set the same key."""
    return [_merged(parts) for parts in itertools.product(*sweeps)]


def zip_(*sweeps: Iterable[Overrides]) -> list[dict[str, Any]]:
    """Returns the sweeps side by side: the first runs merged, then the second ones. ValueError if lengths differ."""
    listed = [list(sweep) for sweep in sweeps]
    lengths = [len(sweep) for sweep in listed]
    if len(set(lengths)) > 1:
        raise ValueError(f"zip_ of sweeps of {', '.join(map(str, lengths))} runs; they must have equally many")
    return [_merged(parts) for parts in zip(*listed, strict=True)]


def chain(*sweeps: Iterable[Overrides]) -> list[dict[str, Any]]:
    """Returns the runs of the sweeps one after the other."""
    return [dict(overrides) for overrides in itertools.chain(*sweeps)]


def sample(count: int, distributions: Mapping[str, Distribution], *, seed: int) -> list[dict[str, Any]]:
    """Returns `count` runs with a value drawn for each key; the same for the same seed."""
    draw = random.Random(seed)
    return [{key: distribution(draw) for key, distribution in distributions.items()} for _ in range(count)]


def uniform(low: float, high: float) -> Distribution:
    """Draws from [low, high], to three digits."""
    return lambda draw: _three_digits(draw.uniform(low, high))


def log_uniform(low: float, high: float) -> Distribution:
    """Draws from [low, high] so that each factor is as likely as the next, to three digits."""
    return lambda draw: _three_digits(math.exp(draw.uniform(math.log(low), math.log(high))))


def choice(*options: Any) -> Distribution:
    """Draws one of the options."""
    return lambda draw: draw.choice(options)


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _merged(parts: Iterable[Overrides]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        twice = sorted(merged.keys() & part.keys())
        if twice:
            raise ValueError(f"two of the combined sweeps set {twice[0]}; each key may be set by one of them")
        merged |= part
    return merged
