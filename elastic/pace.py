"""`Pace`: after which steps a run takes a snapshot."""

import math
import statistics
import time
from itertools import pairwise

from configs.schema.sections import AUTOMATIC, SNAPSHOT_SHARE
from runtime.consensus import all_gather, new_key

_MEASURED = 3  # steps; and snapshots: the first two of an attempt are far slower, because they allocate their memory


class Pace:
    """Decides after which steps to take a snapshot: every n-th, or as often as costs under 2 % of the time.

    The automatic interval begins once the attempt has trained for as long as its start took; before, a restart would
    lose more time than the steps. Then the cost of the first snapshots sets the interval. It is the whole time from the
    copy to the commit, although training continues during most of it.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._is_automatic = every == AUTOMATIC
        self._began_s = time.perf_counter()
        self._asked_s: list[float] = []  # when each of the first steps was done
        self._count = 0  # snapshots so far
        self._cost_s = self._step_s = 0.0
        self._next = math.inf  # step with a snapshot, if automatic

    def due(self, step: int) -> bool:
        """Whether to take a snapshot after `step`; every process must ask after every step."""
        if not self._is_automatic:
            return self._every > 0 and step % self._every == 0
        if len(self._asked_s) <= _MEASURED:
            self._measure(step)
        return step >= self._next

    def begins(self, step: int) -> None:
        """Records a snapshot, of which the one before is complete; the slowest process sets the interval."""
        if not self._is_automatic or not self._step_s:
            return
        if 0 < self._count <= _MEASURED:
            self._every = max(all_gather(new_key("pace"), math.ceil(self._cost_s / (SNAPSHOT_SHARE * self._step_s))))
        self._count += 1
        self._next = step + max(1, self._every)

    def cost(self, seconds: float) -> None:
        """Records the cost of the newest snapshot."""
        self._cost_s = seconds

    def _measure(self, step: int) -> None:
        """Records that a step is done; after the last of the first ones, decides with the others when to begin."""
        self._asked_s.append(time.perf_counter())
        if len(self._asked_s) > _MEASURED:  # the median, because a step may include a validation or a checkpoint
            self._step_s = max(1e-6, statistics.median(b - a for a, b in pairwise(self._asked_s)))
            start_s = self._asked_s[0] - self._began_s
            self._every = max(all_gather(new_key("pace"), math.ceil(start_s / self._step_s)))
            self._next = step - _MEASURED + self._every
