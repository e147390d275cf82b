"""The exit codes of train.py and of the engines that start it."""

from enum import IntEnum


class ExitCode(IntEnum):
    """An engine that restarts the same command on RESUMABLE makes training elastic."""

    FINISHED = 0
    FAILED = 1
    BAD_INPUT = 2  # a mistake in the config, the flags, the data or the work directory
    RESUMABLE = 75  # EX_TEMPFAIL: asked to stop, or another process was lost; the same command resumes the run


class ResumableError(RuntimeError):
    """The run cannot continue now, but the same command can resume it later."""
