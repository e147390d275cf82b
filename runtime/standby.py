"""Lets an engine start the next attempt while the current one trains: it compiles, reports, and waits for SIGUSR1."""

import signal
import time

from runtime.consensus import broadcast, new_key
from runtime.preemption import PreemptionHandler

_LOOK_S, _ANSWER_S = 0.05, 0.5


class StandbyGate:
    """Opens when process 0 gets SIGUSR1. All processes handle that signal from now on, and it ends none of them."""

    def __init__(self) -> None:
        self._given = False
        signal.signal(signal.SIGUSR1, self._give)

    def opens(self, preemption: PreemptionHandler) -> bool:
        """Waits for SIGUSR1; returns False if the run is asked to stop first. Every process must call it."""
        while not preemption.requested():
            if broadcast(new_key("turn"), self._wait):
                return True
        return False

    def _give(self, *_: object) -> None:
        self._given = True

    def _wait(self) -> bool:
        until_s = time.monotonic() + _ANSWER_S
        while not self._given and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        return self._given
