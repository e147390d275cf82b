"""Notices that a run is asked to stop (Ctrl-C, SIGTERM), at a step that all processes agree on."""

import os
import signal
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

EXIT_RESUMABLE = 75  # EX_TEMPFAIL: start the same command again and it goes on


class Interruption:
    """A context manager; `requested(step)` is True once somebody asked this run to stop.

    In several processes jax's preemption service listens to SIGTERM on each and makes all of them agree on the step;
    Ctrl-C is passed on to it as SIGTERM. A second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self._requested = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        signals = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        for number in signals:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def requested(self, step: int) -> bool:
        """Whether to stop before `step`; in several processes each must ask at every step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._requested

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
