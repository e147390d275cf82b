"""Notices that a run is asked to stop (Ctrl-C, SIGTERM), at a step that all processes agree on."""

import os
import signal
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils


class PreemptionHandler:
    """A context manager around a program; `requested()` is True once somebody asked it to stop.

    Before the first `requested()` there is nothing to save: a signal raises KeyboardInterrupt at once. In joined
    processes (even one: a job of 1) jax's preemption service takes SIGTERM over as soon as they are, and Ctrl-C is
    passed on to it: all stop at the same `requested()`, be it the first. A second Ctrl-C raises KeyboardInterrupt.
    With `to_the_end` SIGTERM is ignored afterwards: the program is over, and keeps its exit code while Python ends.
    """

    def __init__(self, *, to_the_end: bool = False) -> None:
        self._to_the_end = to_the_end
        self._asked = 0  # how often `requested()` was called
        self._signalled = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            ignored = self._to_the_end and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if ignored else handler)  # pyright: ignore[reportArgumentType]

    def requested(self) -> bool:
        """Whether to stop now; in several processes each must ask equally often."""
        self._asked += 1
        if jax.distributed.is_initialized():
            # The service agrees on one more than the highest number that any process gave, and starts from 0: our
            # own count, unlike the step of a run that was resumed, cannot jump over that.
            return multihost_utils.reached_preemption_sync_point(self._asked)
        return self._signalled

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        again, self._signalled = self._signalled, True
        to_service = jax.distributed.is_initialized() and number == signal.SIGINT  # SIGTERM comes here only before it
        if (again and number == signal.SIGINT) or not (to_service or self._asked):
            raise KeyboardInterrupt
        if to_service:
            os.kill(os.getpid(), signal.SIGTERM)
