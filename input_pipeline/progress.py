"""Lines on long work, such as tokenising: never silent for long, with a terminal or without."""

import logging
import time

SAY_S = 10.0  # between two lines


class Progress:
    """Warns of how far some work is, at most every `SAY_S`; nothing if it is over before that."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def say(self, line: str, *values: object) -> None:
        """Logs a line, as `logging` has it, if the last one is long enough ago."""
        if (now_s := time.monotonic()) >= self._said_s + SAY_S:
            logging.getLogger(__name__).warning(line, *values)
            self._said_s = now_s
