"""Waiting until something is so, and never for ever."""

import time
from collections.abc import Callable

WAIT_S = 180.0


def until(condition: Callable[[], object]) -> None:
    """Waits until something is so."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
