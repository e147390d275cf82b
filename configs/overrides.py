"""Helpers for the `sweep_NAME` functions of sweep files, which return iterables of overrides.

Overrides are a dict from config keys to values, `{"optimizer.learning_rate": 1e-3}`; one dict is one run. A sweep can
set further keys, which docs/sweeps.md lists.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Overrides = Mapping[str, Any]
Distribution = Callable[[random.Random], object]  # draws one value


def over(key: str, values: Iterable[object]) -> list[dict[str, Any]]:
    """Returns one run per value of `key`."""
    return [{key: value} for value in values]


def product(*sweeps: Iterable[Overrides]) -> list[dict[str, Any]]:
    """Returns one run per combination, the first sweep outermost. ValueError if two sweeps set the same key."""
    return [_merged(parts) for parts in itertools.product(*sweeps)]


def zip_(*sweeps: Iterable[Overrides]) -> list[dict[str, Any]]:
    """Returns run i of all sweeps merged, for each i. ValueError if lengths differ."""
    listed = [list(sweep) for sweep in sweeps]
    lengths = [len(sweep) for sweep in listed]
    if len(set(lengths)) > 1:
        raise ValueError(f"zip_ of sweeps of {', '.join(map(str, lengths))} runs; all must have the same number")
    return [_merged(parts) for parts in zip(*listed, strict=True)]


def chain(*sweeps: Iterable[Overrides]) -> list[dict[str, Any]]:
    """Returns the runs of the sweeps one after the other."""
    return [dict(overrides) for overrides in itertools.chain(*sweeps)]


def sample(count: int, distributions: Mapping[str, Distribution], *, seed: int) -> list[dict[str, Any]]:
    """Returns `count` runs with a random value for each key; the seed determines them."""
    draw = random.Random(seed)
    return [{key: distribution(draw) for key, distribution in distributions.items()} for _ in range(count)]


@dataclass(frozen=True)
class Range:
    """Draws from [low, high], uniformly or log-uniformly, rounded to three digits."""

    low: float
    high: float
    log: bool = False

    def __call__(self, draw: random.Random) -> float:
        if self.log:
            return three_digits(math.exp(draw.uniform(math.log(self.low), math.log(self.high))))
        return three_digits(draw.uniform(self.low, self.high))


@dataclass(frozen=True)
class Choice:
    """A distribution that is uniform over the options."""

    options: tuple[Any, ...]

    def __call__(self, draw: random.Random) -> Any:
        return draw.choice(self.options)


uniform = Range
log_uniform = functools.partial(Range, log=True)


def choice(*options: object) -> Choice:
    """Returns a distribution that is uniform over the options."""
    return Choice(options)


def three_digits(value: float) -> float:
    """Returns a number rounded to three digits."""
    return float(f"{value:.3g}")


def _merged(parts: Iterable[Overrides]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        twice = sorted(merged.keys() & part.keys())
        if twice:
            raise ValueError(f"two of the combined sweeps set {twice[0]}; set each key in only one")
        merged |= part
    return merged
