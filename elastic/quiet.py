"""Hides Orbax's progress reports, and its log of errors that also reach the caller as exceptions."""

import logging
import sys
import traceback
from pathlib import Path

import orbax.checkpoint as ocp


def quiet_orbax() -> None:
    """Filters the logs of Orbax, and TensorStore's output after a failed save. A second call changes nothing."""
    logger = logging.getLogger("absl")
    if any(isinstance(known, _NotFromOrbax) for known in logger.filters):
        return
    for name in ("absl", "asyncio"):  # asyncio logs every failed write, while the caller gets one error
        logging.getLogger(name).addFilter(_NotFromOrbax())
    hook = sys.unraisablehook

    def without_closed_loops(unraisable: "sys.UnraisableHookArgs") -> None:
        # A write that ended after another write of the same save had failed, which closed Orbax's event loop.
        if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"):
            hook(unraisable)

    sys.unraisablehook = without_closed_loops


class _NotFromOrbax(logging.Filter):
    """Drops Orbax's records below WARNING, and its tracebacks, whose errors reach the caller as exceptions."""

    _folder = str(Path(str(ocp.__file__)).parent)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "asyncio":
            raised_in = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            return self._folder not in record.getMessage() + raised_in
        if not record.pathname.startswith(self._folder):
            return True
        return record.levelno >= logging.WARNING and not record.exc_info
