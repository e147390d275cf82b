"""What a process of a run does: how it is named, how the run ends if it fails there, and whether it may take long."""

from enum import Enum

from runtime.exit_codes import ExitCode


class Phase(Enum):
    """A phase of the main thread.

    `elastic.stall_s` bounds some phases: when every process stays in them for longer, the run ends. The others have
    time-outs of their own, or may take as long as they need.
    """

    CHECKING = "checks the config", ExitCode.BAD_INPUT, False
    JOINING = "joins the other processes", ExitCode.RESUMABLE, False
    COMPILING = "compiles", ExitCode.FAILED, False
    RESTORING = "restores", ExitCode.BAD_INPUT, False
    PREPARING = "prepares the first step", ExitCode.FAILED, False
    READING = "reads a batch", ExitCode.FAILED, True
    STEPPING = "is in a step", ExitCode.FAILED, True
    RECORDING = "validates or saves", ExitCode.FAILED, False
    CLOSING = "closes the run", ExitCode.FAILED, False

    def __init__(self, doing: str, code_if_failed: ExitCode, is_bounded: bool) -> None:
        self.doing, self.code_if_failed, self.is_bounded = doing, code_if_failed, is_bounded
