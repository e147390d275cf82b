"""The phases of a process: the exit code if it fails in one, and whether a phase may take long."""

from enum import Enum

from runtime.exit_codes import ExitCode


class Phase(Enum):
    """A phase of the main thread.

    Some phases have a text, `doing`. In them `elastic.stall_s` bounds the time without progress: when every process has
    been in such a phase for longer, and none has read or written files meanwhile, the run ends with a message of these
    texts. The other phases have time-outs of their own, or may take as long as they need.
    """

    CHECKING = "checking", ExitCode.BAD_INPUT
    JOINING = "joining", ExitCode.RESUMABLE
    COMPILING = "compiling", ExitCode.FAILED
    RESTORING = "restoring", ExitCode.BAD_INPUT, "restores"
    READING_FIRST = "reading the first batch", ExitCode.BAD_INPUT, "reads a batch"  # before anything is compiled
    COMPARING = "comparing memory", ExitCode.BAD_INPUT, "compares its memory"  # with the others'
    LOADING = "loading weights", ExitCode.BAD_INPUT
    PREPARING = "preparing", ExitCode.FAILED
    READING = "reading", ExitCode.FAILED, "reads a batch"
    STEPPING = "stepping", ExitCode.FAILED, "is in a step"
    VALIDATING = "validating", ExitCode.FAILED, "validates"
    RECORDING = "recording", ExitCode.FAILED, "records"
    CLOSING = "closing", ExitCode.FAILED

    def __init__(self, unique: str, code_if_failed: ExitCode, doing: str = "") -> None:
        """`unique` keeps phases apart: an Enum takes members of equal value for one."""
        del unique
        self.code_if_failed, self.doing = code_if_failed, doing
