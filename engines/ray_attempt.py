"""A start of the program on a fixed set of nodes, and what is known of it."""

import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engines.ray_plan import World
from runtime.progress import Progress

if TYPE_CHECKING:  # it needs Ray
    from engines.ray_members import Member


@dataclass(kw_only=True)
class Attempt:
    """One start of the program: its world, how its processes ended, and until when they may run."""

    number: int
    world: World
    coordinator: str  # HOST:PORT of its first process: no other attempt has it
    since_s: float  # of the event that led to it
    codes: dict[str, int | None] = field(default_factory=dict)
    why_stopped: str = ""  # it was asked to
    change_s: float = 0.0  # when it was first seen that the world is to change
    may_prepare: bool = True  # the next one, while it trains
    kill_at_s: float = float("inf")
    killed_s: float = float("inf")
    progress: Progress = field(default_factory=Progress)
    started_s: float = field(default_factory=time.monotonic)
    has_stepped: bool = False  # it has finished a step, as far as it is known
    is_settled: bool = False  # it has, or takes so long that others may join at once
    stands_by: bool = False  # it was started ahead, and not told yet that it is its turn
    is_ready: bool = False  # to be told so: it has compiled

    @property
    def running(self) -> list[str]:
        """Returns the nodes whose processes run, as far as it is known."""
        return [node for node in self.world.nodes if node not in self.codes]

    def code_on(self, member: "Member") -> int | None:
        """Returns how its process on a node ended, by the latest news; None if it runs, or has none there."""
        is_its = member.node in self.running
        return member.news.codes.get(self.number) if member.news and is_its else None


@dataclass(frozen=True, kw_only=True)
class Coming:
    """An attempt that was started while another one trains, and waits for its turn."""

    attempt: Attempt
    why: str
    until_s: float  # it is waited for


def how(code: int | None) -> str:
    """Returns an exit code in words."""
    if code is None:
        return "lost"
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
