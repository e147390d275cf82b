"""The phases of a process: the exit code after a failure in each, and whether it may take long."""

from enum import Enum

from runtime.exit_codes import ExitCode


class Phase(Enum):
    """A phase of the main thread.

    Some phases have a text, `doing`. In them `elastic.stall_s` bounds the time without progress. When every process has
    been in such a phase for longer, and none has read or written files meanwhile, the run ends with a message that
    contains these texts. The other phases have separate time-outs, or may take as long as they need.
    """

    CHECKING = "checking", ExitCode.BAD_INPUT
    JOINING = "joining", ExitCode.RESUMABLE
    COMPILING = "compiling", ExitCode.FAILED
    RESTORING = "restoring", ExitCode.BAD_INPUT, "restores"
    READING_FIRST = "reading the first batch", ExitCode.BAD_INPUT, "reads a batch"  # before compilation
    COMPARING = "comparing memory", ExitCode.BAD_INPUT, "compares its memory"  # with the memory of the others
    LOADING = "loading weights", ExitCode.BAD_INPUT
    PREPARING = "preparing", ExitCode.FAILED
    READING = "reading", ExitCode.FAILED, "reads a batch"
    STEPPING = "stepping", ExitCode.FAILED, "is in a step"
    VALIDATING = "validating", ExitCode.FAILED, "validates"
    RECORDING = "recording", ExitCode.FAILED, "records"
    CLOSING = "closing", ExitCode.FAILED

    def __init__(self, unique: str, code_if_failed: ExitCode, doing: str = "") -> None:
        """`unique` keeps phases distinct, because an Enum merges members of equal value."""
        del unique
        self.code_if_failed, self.doing = code_if_failed, doing
