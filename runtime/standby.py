"""Lets an engine start a run while the last one still trains: it compiles, says so, and waits for its turn."""

import signal
import time

from runtime.consensus import broadcast, new_key
from runtime.preemption import PreemptionHandler

_LOOK_S, _ANSWER_S = 0.05, 0.5


class StandbyGate:
    """Opens when process 0 gets SIGUSR1, which no process minds from here on."""

    def __init__(self) -> None:
        self._given = False
        signal.signal(signal.SIGUSR1, self._give)

    def opens(self, preemption: PreemptionHandler) -> bool:
        """Waits; returns False if the run is asked to stop before. Every process must call it."""
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
