"""Detects a request to stop a run (Ctrl-C, SIGTERM, SIGUSR1), at a step that all processes agree on."""

import os
import signal
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

FROM_ENGINES = (signal.SIGTERM, signal.SIGUSR1)  # SLURM sends the second with --signal=USR1@180


class PreemptionHandler:
    """A context manager around a program. `requested()` is True after a signal has asked it to stop.

    Before the first `requested()` no state has to be saved, and a signal raises KeyboardInterrupt at once. As soon as
    the processes have joined (even in a job of one process), jax's preemption service handles SIGTERM. Ctrl-C and
    SIGUSR1 are passed on to it. All processes stop at the same call of `requested()`, which may be the first. A second
    Ctrl-C raises KeyboardInterrupt. With `to_the_end`, SIGTERM and SIGUSR1 are ignored after the context, so that the
    program keeps its exit code while Python shuts down.
    """

    def __init__(self, *, to_the_end: bool = False) -> None:
        self._to_the_end = to_the_end
        self._asked = 0  # number of calls of `requested()`
        self._signalled = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, *FROM_ENGINES):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            ignored = self._to_the_end and number in FROM_ENGINES
            signal.signal(number, signal.SIG_IGN if ignored else handler)  # pyright: ignore[reportArgumentType]

    def requested(self) -> bool:
        """Whether to stop now. All processes must make the same number of calls."""
        self._asked += 1
        if jax.distributed.is_initialized():
            # The processes stop at one more than the highest call number that any of them has passed, counted from 0. A
            # count of calls reaches that number, but the step of a resumed run could skip it.
            return multihost_utils.reached_preemption_sync_point(self._asked)
        return self._signalled

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        again, self._signalled = self._signalled, True
        to_service = jax.distributed.is_initialized() and number != signal.SIGTERM  # jax handles SIGTERM
        if (again and number == signal.SIGINT) or not (to_service or self._asked):
            raise KeyboardInterrupt
        if to_service:
            os.kill(os.getpid(), signal.SIGTERM)
