"""Waits for an unavailable store: time limits, pauses and log lines."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from runtime.exit_codes import ResumableError

SAY_AFTER_S = 1.0  # shorter failures are not logged
BROKEN = 5  # a request fails after this many answers that broke off after more than _ANSWERED_S
_ANSWERED_S = 60.0  # an attempt without an answer is shorter
PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.0)  # between two attempts, times 0.5 to 1.5; the last pause repeats
T = TypeVar("T")


class StoreError(OSError):
    """A store refuses, lacks or damages an object. The text is the whole message."""


class MissingError(StoreError):
    """The object, bucket or folder does not exist."""


class StoreAwayError(ResumableError):
    """A store stayed unavailable. The same command continues once the store is back."""


class AwayError(Exception):
    """A failure that waiting may cure. `remedy` is for a store that has never answered."""

    def __init__(self, reason: str, remedy: str = "", pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.remedy, self.pause_s = remedy, pause_s


class Patience:
    """Waits for one store, for all threads. Logs once that the store is away, and once that it answers again."""

    def __init__(
        self,
        url: str,
        patience_s: float,
        first_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        """Takes limits: `patience_s` for a store that has answered, `first_s` for a URL that may be a mistake.

        `pause(seconds)` waits and returns whether waiting has ended. By default it waits until `ended` is set.
        """
        self._url, self._patience_s, self._first_s, self._clock = url, patience_s, first_s, clock
        self._lock = threading.Lock()
        self._failing: dict[object, float] = {}  # waiting requests, and the time of their first failure
        self._logged_since_s = 0.0  # time of the first failure of a logged absence; 0 if none was logged
        self.reached = False  # the store has answered once
        self.ended = threading.Event()
        self._pause = pause or self.ended.wait

    def for_answer(self, url: str, attempt: Callable[[], T]) -> T:
        """Returns `attempt()`, which reads a URL. Repeats the call while it raises `AwayError`.

        Raises StoreAwayError after `patience_s`, or after BROKEN answers that broke off late. Raises StoreError sooner
        if the store has never answered.
        """
        request, failures, broken, has_answer = object(), 0, 0, False
        try:
            while True:
                begun_s = self._clock()
                try:
                    answer = attempt()
                    has_answer = self.reached = True
                    return answer
                except AwayError as error:
                    broken += self._clock() - begun_s > _ANSWERED_S
                    if broken == BROKEN:
                        raise StoreAwayError(
                            f"{url}: {BROKEN} answers broke off, each after more than {_ANSWERED_S:g} s ({error}); "
                            "does a proxy limit the time of a connection? the same command tries again"
                        ) from None
                    pause_s = min(error.pause_s, self._patience_s) + backoff_s(failures)
                    self._failed(request, url, error, begun_s, pause_s)
                if self._pause(pause_s):
                    raise StoreAwayError(f"{self._url}: reading ended while the store was away")
                failures += 1
        finally:
            self._ended(request, has_answer)

    def _failed(self, request: object, url: str, error: AwayError, begun_s: float, pause_s: float) -> None:
        reason = str(error)
        with self._lock:
            now_s = self._clock()
            since_s = self._failing.setdefault(request, now_s)
            if now_s - begun_s > _ANSWERED_S:  # the store was not away during that time
                since_s = self._failing[request] = min(since_s + now_s - begun_s, now_s)
            remedy = "" if self.reached else error.remedy
            patience_s = min(self._first_s, self._patience_s) if remedy else self._patience_s
            if remedy and now_s - since_s > patience_s:
                raise StoreError(f"{url}: the store was never reached, in {now_s - since_s:.0f} s ({reason}); {remedy}")
            if now_s - since_s > patience_s:
                raise StoreAwayError(
                    f"{url}: the store has been away for {now_s - since_s:.0f} s ({reason}); the same command "
                    "resumes when it is back"
                )
            if now_s - since_s + pause_s >= SAY_AFTER_S and not self._logged_since_s:
                self._logged_since_s = since_s
                logging.getLogger(__name__).warning(
                    "%s: the store is away (%s): waiting up to %.0f s", self._url, reason, patience_s
                )

    def _ended(self, request: object, has_answer: bool) -> None:
        with self._lock:
            self._failing.pop(request, None)
            if self._failing or not self._logged_since_s:
                return
            away_s, self._logged_since_s = self._clock() - self._logged_since_s, 0.0
            if has_answer:  # else an error reports that the store is still away
                logging.getLogger(__name__).warning("%s: the store answers again after %.0f s", self._url, away_s)


def backoff_s(failures: int) -> float:
    """Returns the seconds to wait after the last of several failures. They are random, so that processes spread out."""
    return PAUSES_S[min(failures, len(PAUSES_S) - 1)] * random.uniform(0.5, 1.5)
