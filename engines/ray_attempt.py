"""An attempt: one run of the program on a fixed set of nodes, and its state as the engine knows it."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engines.ray_plan import World
from runtime.exit_codes import signal_name
from runtime.progress import Progress

if TYPE_CHECKING:  # it needs Ray
    from engines.ray_members import Member


@dataclass(kw_only=True)
class Attempt:
    """One attempt: its nodes, the exit codes of its processes, and the deadline after which they are killed."""

    number: int
    world: World
    coordinator: str  # HOST:PORT of process 0; unique to the attempt
    since_s: float  # when the event happened that led to this attempt
    codes: dict[str, int | None] = field(default_factory=dict)
    why_stopped: str = ""  # why it was asked to stop; empty if it was not
    change_s: float = 0.0  # when the engine first wanted another set of nodes; 0 if it does not
    may_prepare: bool = True  # start the next attempt while this one trains
    kill_at_s: float = float("inf")
    killed_s: float = float("inf")
    progress: Progress = field(default_factory=Progress)
    started_s: float = field(default_factory=time.monotonic)
    has_stepped: bool = False  # the metrics have a step of it
    is_settled: bool = False  # it has stepped, or has run so long that a new node need not wait for a step
    stands_by: bool = False  # it was started while another attempt trained, and waits for SIGUSR1
    is_ready: bool = False  # it has compiled, and can take SIGUSR1

    @property
    def running(self) -> list[str]:
        """Returns the nodes whose processes have not ended, as far as the engine knows."""
        return [node for node in self.world.nodes if node not in self.codes]

    def code_on(self, member: "Member") -> int | None:
        """Returns the exit code of its process on a node; None if it still runs, or there is none."""
        is_its = member.node in self.running
        return member.news.codes.get(self.number) if member.news and is_its else None


@dataclass(frozen=True, kw_only=True)
class Coming:
    """An attempt that was started while another one trains, and waits to replace it."""

    attempt: Attempt
    why: str
    until_s: float  # if it is not ready by then, the current attempt stops anyway


def how(code: int | None) -> str:
    """Returns an exit code in words."""
    if code is None:
        return "lost"
    return f"by {signal_name(-code)}" if code < 0 else f"with {code}"
