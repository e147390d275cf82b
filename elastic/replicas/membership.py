"""`Membership`: the members of a run with independent replicas, as one of them knows them.

Members send each other their own records, and the records of the members that they know. There is no consensus: each
derives from its records which member computes which share of a step (elastic/replicas/group.py).
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from elastic.replicas.members import (
    NEVER,
    STALE_S,
    Member,
    read_address,
    read_addresses,
    remove_address,
    write_address,
)
from elastic.replicas.transport import Transport
from runtime.blobs import Address, PeerError, StalledError
from runtime.events import Event
from runtime.exit_codes import ResumableError
from runtime.files import json_objects

AHEAD = 2  # steps, at least, between the word of a joining member and its first shares
ENTRY_S = 0.5  # for which the others may wait for it, if it gets nearer to them
PATIENCE_S = 2.0  # for which it may fall behind before they wait for it all the same: it would never catch up
LONG_S = 300.0  # the same, for a member that does not get nearer
SEEK_S = 5.0  # between two looks for members that were lost
RARELY = 12  # of so many looks one greets unknown addresses too, and writes this member's again
ASK_S = 0.2  # between two looks of a member that catches up, where the others are
MOST_BYTES = 1 << 20  # of the records that a member sends
CONNECT_S = 5.0
_GREETINGS = 256  # at once
_LEAVE_S = 30.0
NOBODY = -1  # in place of a step: no other member trains


def find_running(folder: Path, number: int, process: int, transport: Transport) -> Member | None:
    """Returns the member that answers at the last address of a number; None if the number is free."""
    seen: Address | None = None
    while (address := read_address(folder, number, process)) and address != seen:
        seen = address
        try:
            with transport.connect(address, CONNECT_S) as link:
                said = json_objects.parse(link.ask({"op": "self"}, MOST_BYTES), "a member's record")
            member = Member.from_dict(said)
        except (PeerError, ValueError):  # it is gone, or starts as this one does
            continue
        if member.number == number:
            return member
    return None


def check_number_is_free(folder: Path, number: int, process: int, transport: Transport) -> None:
    """ValueError if a program trains under a member's number; ResumableError if it does, and is about to end."""
    if member := find_running(folder, number, process, transport):
        where = f"replica {number} runs at {member.host}:{member.port} already"
        if member.last < NEVER:
            raise ResumableError(f"{where}, and is about to end; run the same command again")
        raise ValueError(f"{where}; give this one another number (--group), or end that one first")


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A member that is out of reach, and did not say that it leaves."""

    member: Member
    at_s: float
    stalled_in: int = -1  # the step in which its main thread makes no progress, though its other threads answer


# an event, the number of the replica that it is about, a step of the replicas, and the event's other fields
Report = Callable[..., object]


class Membership:
    """This member, and the records of the others. All methods may be called by several threads."""

    def __init__(
        self,
        me: Member,
        *,
        folder: Path,
        transport: Transport,
        process: int,
        late: int,
        changed: threading.Condition,
        agree: Callable[[int], Sequence[int]],
        say: Callable[[str], object],
        report: Report,
        on_met: Callable[[Member], object],
        on_change: Callable[[int], object],
    ) -> None:
        """`folder` has one folder for each member. The shares of a step are computed `late` steps before it is summed.

        `on_met` is called when a member appears; `on_change`, which holds `changed`, with the number of a member whose
        record is new; `report(event, replica=, step=, ...)` when a member joins, leaves or is lost.
        """
        self.me, self.step = me, -1  # the step that is being summed, or the last that was
        self.closed = False
        self.successor: Address | None = None  # the address of a program that has taken this member's number
        self._folder, self._transport, self._process = folder, transport, process
        self._changed, self._agree, self._say, self._report = changed, agree, say, report
        self._late, self._on_met, self._on_change = late, on_met, on_change
        self._members: dict[int, Member] = {}  # the others
        self._lost: dict[int, Lost] = {}
        self._foreign: Member | None = None  # one of another run
        self._looked: tuple[float, int, int] | None = None  # when, at which step, and where the others were
        self._nearest = 0.0, 0  # when this member was how many steps behind them, at the least

    def publish(self) -> None:
        """Writes this member's address, and begins to look for lost members.

        ValueError if another program trains under this number; ResumableError if the address cannot be written.
        """
        check_number_is_free(self._folder, self.me.number, self._process, self._transport)
        try:
            write_address(self._folder, self.me, self._process)
        except OSError as error:  # a disk without room may have some later
            why = f"cannot write to {self._folder}: {error.strerror or error}"
            raise ResumableError(f"{why}; see that the disk has room and can be written") from error
        threading.Thread(target=self._seek_until_closed, name="lost replicas", daemon=True).start()

    def withdraw(self) -> None:
        """Removes this member's address."""
        remove_address(self._folder, self.me.address, self._process)

    @property
    def others(self) -> list[Member]:
        """The other members that are there, by number."""
        with self._changed:
            return [self._members[number] for number in sorted(self._members)]

    def takes_part(self, number: int, step: int) -> bool:
        """Whether another member is there and computes shares of a step."""
        return number in self._members and self._members[number].takes_part(step)

    def knows(self, member: Member) -> bool:
        """Whether a member is still there, and has not started anew."""
        known = self._members.get(member.number)
        return known is not None and known.address == member.address

    # --------------------------------------------------------------------------------------------------- this member
    def meet(self, step: int) -> bool:
        """Says hello to the others, with the steps done here; returns whether one of them has begun.

        ValueError if one of them is of another run.
        """
        self.me, self.step = self.me.changed(step=step), step - 1  # nothing of `step` is here yet
        addresses, _ = read_addresses(self._folder, self.me.number, self._process)
        why = self._greet_all(addresses)
        if other := self._foreign:
            raise ValueError(
                f"replica {other.number} at {other.host} trains by another config, on other data, beside other frozen "
                "weights, on other devices (more, fewer or of another kind) or with another version of jax; give all "
                "the same, or another --workdir"
            )
        if addresses and not self.others:
            self._say(
                f"none of the {len(addresses)} replicas that {self._folder} names answers ({why[0]}): if "
                "some run, see that they can be reached (a firewall?)"
            )
        return any(self._agree(int(any(member.begun for member in self.others))))

    def enter(self, step: int) -> None:
        """Takes part from a step on; the others learn of it before it returns."""
        self.tell(first=step, last=NEVER)
        self._report(Event.REPLICA_JOINED, replica=self.me.number, step=step, host=self.me.host)

    def choose_entry(self, step: int) -> None:
        """Announces the first step of this member, if after `step` steps it can catch up in less than ENTRY_S.

        The others do some steps until they know it. They wait no longer than ENTRY_S for a member that gets nearer. If
        a step's totals take longer than a step, for example over a slow link with a single member that sends nothing
        else, it would never catch up: if it falls behind, the others wait for it.
        """
        looked = self._looked
        if looked and not self._agree(int(time.monotonic() - looked[0] > ASK_S))[0]:
            return
        known = self.newest_step()
        ahead = self.look(step, first=not looked)
        if ahead == NOBODY:
            self.enter(step)
            return
        is_near, margin = known == ahead <= step + 1, AHEAD  # all begin together, with steps longer than a look
        if looked:
            now_s, (then_s, then, before) = time.monotonic(), looked
            own_s, others_s = ((now_s - then_s) / max(steps, 1) for steps in (step - then, ahead - before))  # a step
            is_near = ahead <= step + 1 or (ahead - step) * own_s < ENTRY_S
            if is_near:
                margin = max(AHEAD, ceil(ENTRY_S / others_s))
            falls_behind = ahead - step > self._nearest[1] + 1
            is_near |= now_s - self._nearest[0] > (PATIENCE_S if falls_behind else LONG_S)
        if self._agree(int(is_near))[0]:
            self.enter(max(self._agree(max(ahead, step) + margin)))

    def look(self, step: int, *, first: bool = False) -> int:
        """Asks the others for their steps, and returns the newest one; this member is at `step`.

        `first`: since it began, or has the others' state.
        """
        self.tell()
        ahead, now_s = self.newest_step(), time.monotonic()
        self._looked = now_s, step, ahead
        if first or NOBODY < ahead < step + self._nearest[1]:
            self._nearest = now_s, ahead - step
        return ahead

    def newest_step(self) -> int:
        """Returns the newest step that another member is at, as far as is known; NOBODY: there is none."""
        return max(self._agree(max((m.step + self._late for m in self.others if m.trains), default=NOBODY)))

    def is_alone(self) -> bool:
        """Whether no other member trains, as the newest records say."""
        if self.newest_step() == NOBODY:
            self.tell()
        return self.newest_step() == NOBODY

    def all_leave_before(self, step: int) -> bool:
        """Whether there are members that train, and all of them have said that an earlier step is their last."""
        lasts = [member.last for member in self.others if member.trains]
        return all(self._agree(int(bool(lasts) and max(lasts) < step)))

    def tell(self, **changes: Any) -> None:
        """Sends the others this member's record, with changes, and takes theirs."""
        with self._changed:
            if changes:
                self.me = self.me.changed(**changes)
                self._changed.notify_all()  # threads may wait for something that comes no more
        self._greet_or_lose(self.others)

    def leave(self, step: int) -> None:
        """Leaves after `step` steps; waits until the others have the totals that only this member has, up to 30 s.

        If no member stays, it also waits for members that are about to enter: they continue where it ends.
        """
        self.tell(step=step, last=step - 1)
        until_s = time.monotonic() + _LEAVE_S
        while time.monotonic() < until_s and self._is_needed(step):
            time.sleep(0.05)
            self.tell()

    def _is_needed(self, step: int) -> bool:
        """Whether another member lacks totals of the first `step` steps, and no member that stays can send them.

        A member that has left in an earlier step lacks none.
        """
        has_heir = any(member.begun and member.first < step <= member.last for member in self.others)
        due = [member for member in self.others if member.first < (step if has_heir else NEVER)]
        return any(member.step < step <= member.last + 1 for member in due)

    # ------------------------------------------------------------------------------------------------- of the others
    def lose(self, member: Member, error: Exception) -> None:
        """Goes on without a member, and looks for it now and then, unless it has left."""
        with self._changed:
            if self.closed or not self.knows(member):
                return
            known = self._members.pop(member.number)
            self._on_change(member.number)
            has_left = known.last < self.step or known.last < known.step
            if not has_left:
                stalled_in = self.step if isinstance(error, StalledError) else -1
                self._lost[member.number] = Lost(member=known, at_s=time.monotonic(), stalled_in=stalled_in)
            self._changed.notify_all()
        if not has_left:
            why = str(error) or type(error).__name__
            self._report(Event.REPLICA_LOST, replica=member.number, step=self.step, why=why)

    def answer(self, request: dict[str, Any], process: int) -> memoryview:
        """Answers `self` with this member's record, and `member`, which brings another one's, with all records.

        ValueError for a record that describes no member.
        A lost member may reach this one, and not be reached itself (a firewall): until `seek` has greeted it, it
        stays lost, or all would wait for it after each of its greetings.
        """
        if request["op"] == "self":
            return memoryview(json.dumps(self.me.as_dict()).encode())
        member = Member.from_dict(request["member"])
        if member.number != process:
            raise ValueError("it speaks of another member")
        lost = self._lost.get(member.number)
        if member.run == self.me.run and not (lost and lost.member.address == member.address):
            self._register(member)
        known = [m.as_dict() for m in self.others if m.number != process]
        return memoryview(json.dumps({"member": self.me.as_dict(), "others": known}).encode())

    def _greet_or_lose(self, members: Sequence[Member]) -> None:
        """Greets known members, and loses the ones that do not answer."""
        why = self._greet_all([member.address for member in members], self._transport.silence_s)
        for member in [member for member, reason in zip(members, why, strict=True) if reason]:
            self.lose(member, TimeoutError("does not answer"))

    def _greet_all(self, addresses: Sequence[Address], patience_s: float = CONNECT_S) -> list[str]:
        """Greets all at the same time, since a host that drops packets lets its callers wait.

        Returns for each why it did not answer, or an empty text.
        """
        with ThreadPoolExecutor(min(len(addresses), _GREETINGS) or 1) as pool:
            return [*pool.map(partial(self._greet, patience_s=patience_s), addresses)]

    def _greet(self, address: Address, patience_s: float) -> str:
        """Exchanges records with a member, and greets the members that only it knows; returns why it did not answer."""
        try:
            with self._transport.connect(address, patience_s) as link:
                answer = link.ask({"op": "member", "member": self.me.as_dict()}, MOST_BYTES)
            said = json_objects.parse(answer, "a member's records")
            member = Member.from_dict(said["member"])
            known = [Member.from_dict(values) for values in said["others"]]
            if member.number != address.process:
                raise ValueError("it is another member")
        except (PeerError, ValueError, LookupError, TypeError) as error:
            return str(error)
        if member.run != self.me.run:
            self._foreign = member
            return ""
        self._register(member)
        for other in known:
            # others may send records of members that are out of reach here again and again: `seek` greets those
            is_new = other.number not in (self.me.number, *self._members, *self._lost)
            if is_new and self._greet(other.address, patience_s):
                with self._changed:
                    self._lost.setdefault(other.number, Lost(member=other, at_s=time.monotonic()))
        return ""

    def _register(self, member: Member) -> None:
        """Takes a member's record, unless a newer one is here."""
        with self._changed:
            known = self._members.get(member.number)
            is_new = not self.knows(member)
            if known and not is_new and known.version >= member.version:
                return
            if self._must_catch_up(member):
                member = replace(member, first=NEVER, begun=False)
            self._members[member.number] = member
            self._lost.pop(member.number, None)
            self._on_change(member.number)
            self._changed.notify_all()
        if is_new:
            self._on_met(member)
        self._report_change(None if is_new else known, member)

    def _must_catch_up(self, member: Member) -> bool:
        """Whether a member says that it takes part, and was cut off, or hangs in the step in which it was lost."""
        was_cut_off = member.first <= member.step < self.step - 1 - self._late and member.takes_part(self.step)
        lost = self._lost.get(member.number)
        hangs = lost is not None and lost.member.address == member.address and member.step <= lost.stalled_in
        return was_cut_off or hangs

    def _report_change(self, before: Member | None, after: Member) -> None:
        """Reports a member that takes part from now on, or has said which step is its last."""
        if after.first < NEVER == after.last and (before is None or before.first == NEVER):
            self._report(Event.REPLICA_JOINED, replica=after.number, step=after.first, host=after.host)
        elif before and after.last < NEVER == before.last:
            self._report(Event.REPLICA_LEFT, replica=after.number, step=after.last)

    def _seek_until_closed(self) -> None:
        for turn in itertools.count(1):
            with self._changed:
                if self._changed.wait_for(lambda: self.closed, SEEK_S):
                    return
            with suppress(OSError, RuntimeError):  # a folder that cannot be read now; no more threads
                self.seek(turn)

    def seek(self, turn: int) -> None:
        """Greets the lost members: they may have been cut off, or stopped, for a while.

        It also greets members that do not take part, or no longer: a member that was cut off may have caught up without
        knowing that it had to, and no sum notices when such a member is gone. And it greets unknown members that have
        an address, because a link may have been cut when both sides began: every time if it knows no member, else
        every RARELY-th time. A stale address that does not answer is removed.
        """
        now_s = time.monotonic()
        with self._changed:
            self._lost = {number: one for number, one in self._lost.items() if now_s - one.at_s <= STALE_S}
            idle = [one for one in self._members.values() if one.first == NEVER or one.last < self.step]
            lost = [one.member.address for one in self._lost.values()]
            known = {*(member.address for member in self._members.values()), *lost}
            is_due = not self._members or turn % RARELY == 0
        fresh, stale = read_addresses(self._folder, self.me.number, self._process) if is_due else ([], [])
        unknown = [address for address in (*fresh, *stale) if address not in known]
        why = dict(zip(unknown, self._greet_all([*lost, *unknown])[len(lost) :], strict=True))
        self._greet_or_lose(idle)
        for address in stale:
            if why.get(address):
                remove_address(self._folder, address, self._process)
        if turn % RARELY == 0:
            self._renew()

    def _renew(self) -> None:
        """Writes this member's address again, or notes the one of a program that has taken its number."""
        address = read_address(self._folder, self.me.number, self._process)
        if address in (None, self.me.address):
            write_address(self._folder, self.me, self._process)
            return
        with self._changed:
            self.successor = address
            self._changed.notify_all()
