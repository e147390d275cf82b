"""`run_rounds`: simulated rounds of many replicas with stragglers, leaves and arrivals. Computed, never measured.

A round has the steps from one exchange to the next, and lasts as long as its slowest replica, plus the exchange. With
an exchange in every step the slowest of each step counts, with local SGD the slowest sum of H steps. A replica that
leaves loses its round and returns at the first round after its absence.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The replicas' differences from the stated step, which no replica is faster than on average."""

    replicas: int
    slow: float = 1.0  # the steps of replica 0 take this many times as long
    spread: float = 0.0  # standard deviation of the logarithm of a step's seconds, independent for each step
    leaves_per_hour: float = 0.0  # for each replica
    away_s: float = 0.0  # from a leave to the return
    pause_s: float = 0.0  # added after a round with a leave; 0 for independent replicas


@dataclass(frozen=True, kw_only=True)
class FleetTime:
    """Mean seconds of a step, and the finished steps, divided by the steps of replicas that never wait or leave."""

    step_s: float
    useful: float


def run_rounds(
    fleet: Fleet, *, compute_s: float, exchange_s: float, interval: int, rounds: int = 2000, seed: int = 0
) -> FleetTime:
    """Returns the time of `rounds` rounds of `interval` steps and an exchange of `exchange_s`."""
    random = np.random.default_rng(seed)
    factor = np.ones(fleet.replicas)
    factor[0] = fleet.slow
    back_s, now_s, done = np.zeros(fleet.replicas), 0.0, 0.0  # when each replica is back
    for _ in range(rounds):
        here = back_s <= now_s
        if not here.any():
            now_s = back_s.min()
            here = back_s <= now_s
        steps = random.lognormal(-(fleet.spread**2) / 2, fleet.spread, (fleet.replicas, interval))
        round_s = (compute_s * factor * steps.sum(axis=1))[here].max() + exchange_s
        leaves = here & (random.random(fleet.replicas) < -np.expm1(-fleet.leaves_per_hour * round_s / 3600))
        now_s += round_s + fleet.pause_s * leaves.any()
        back_s[leaves] = now_s + fleet.away_s
        done += interval * (here & ~leaves).sum()
    return FleetTime(step_s=now_s / (rounds * interval), useful=done * compute_s / (fleet.replicas * now_s))
