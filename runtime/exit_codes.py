"""The exit codes of train.py and of the engines that start it."""

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes. An engine that restarts the same command on RESUMABLE makes training elastic."""

    FINISHED = 0
    FAILED = 1
    BAD_INPUT = 2  # a mistake in the config, the flags, the data or the work directory
    RESUMABLE = 75  # EX_TEMPFAIL: asked to stop, or another process was lost; the same command resumes the run


def signal_name(number: int) -> str:
    """Returns the name of a signal, or e.g. `signal 35` where Python has no name (most real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ResumableError(RuntimeError):
    """The run cannot continue now, but the same command can resume it later."""
