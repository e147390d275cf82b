"""`Membership`: this replica, and the peers that it knows.

Replicas send each other their own records, and the records of the peers that they know. They run no consensus protocol:
each replica derives from its records which replica computes which unit of a step (elastic/replicas/plan.py).
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

from elastic.replicas.numbers import check_number_is_free
from elastic.replicas.peers import (
    CONNECT_S,
    MOST_BYTES,
    NEVER,
    STALE_S,
    Peer,
    read_address,
    read_addresses,
    remove_address,
    write_address,
)
from elastic.replicas.state_copies import StateCopies
from elastic.replicas.transport import SharedLock, Transport
from runtime.blobs import BlobAddress, PeerError, StalledError
from runtime.events import Event
from runtime.exit_codes import ResumableError
from runtime.files import json_objects
from runtime.files.json_objects import JsonObject

AHEAD = 2  # least number of steps between the announcement of a joining replica and its first units
ENTRY_S = 0.5  # longest time that peers may wait for a joining replica that is catching up
PATIENCE_S = 2.0  # peers wait for a joining replica that lags for this long: it would never catch up
LONG_S = 300.0  # the same for a joining replica that does not catch up
SEEK_S = 5.0  # between two searches for lost peers
RARELY = 12  # every twelfth search also greets unknown addresses, and writes this replica's address again
ASK_S = 0.2  # between two questions of a lagging replica about its peers' steps
_GREETINGS = 256  # at the same time
_LEAVE_S = 30.0
NO_PEER = -1  # in place of a step: no peer trains


class Log:
    """Where a replica reports events and warnings; this one prints the warnings."""

    def say(self, text: str) -> None:
        """Takes a line for the user."""
        print(text)

    def write(self, event: Event, *, replica: int, step: int, **fields: str) -> None:
        """Takes a replica that joins, leaves or is lost, in a step of the replicas, with the event's other fields."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A peer that is out of reach, and did not announce that it leaves."""

    peer: Peer
    at_s: float
    stalled_in: int = -1  # the step in which its main thread makes no progress, though its other threads answer


class Membership:
    """This replica's record, and the records of its peers. All methods may be called by several threads."""

    def __init__(
        self,
        me: Peer,
        *,
        folder: Path,
        transport: Transport,
        delay: int,
        lock: SharedLock,
        copies: StateCopies,
        agree: Callable[[int], Sequence[int]],
        log: Log,
    ) -> None:
        """`folder` has one folder for each replica. The other arguments are explained in `Replicas`.

        A lost peer's `copies` are dropped.
        """
        self.me, self.step = me, -1  # the step that is being summed, or the last that was
        self.closed = False
        self.successor: BlobAddress | None = None  # the address of a program that has taken this replica's number
        self.transport, self.delay, self.lock = transport, delay, lock
        self._folder, self._copies, self._agree, self._log = folder, copies, agree, log
        self._peers: dict[int, Peer] = {}
        self._met: list[Peer] = []  # new peers that `take_met` has not returned yet
        self._lost: dict[int, Lost] = {}
        self._foreign: Peer | None = None  # a replica of another run
        self._looked: tuple[float, int, int] | None = None  # last look: time, own step, peers' step
        self._nearest = 0.0, 0  # when this replica was closest to its peers, and by how many steps it lagged then

    def publish(self) -> None:
        """Writes this replica's address, and begins to search for lost peers.

        ValueError if another program trains under this number; ResumableError if the address cannot be written.
        """
        check_number_is_free(self._folder, self.transport)
        try:
            write_address(self._folder, self.me, self.transport.process)
        except OSError as error:  # a disk without room may have some later
            why = f"cannot write to {self._folder}: {error.strerror or error}"
            raise ResumableError(f"{why}; see that the disk has room and can be written") from error
        threading.Thread(target=self._seek_until_closed, name="lost replicas", daemon=True).start()

    def withdraw(self) -> None:
        """Removes this replica's address."""
        remove_address(self._folder, self.me.address, self.transport.process)

    @property
    def peers(self) -> list[Peer]:
        """The peers that are not lost, by number."""
        with self.lock:
            return [self._peers[number] for number in sorted(self._peers)]

    def takes_part(self, number: int, step: int) -> bool:
        """Whether a peer is not lost and computes units of a step."""
        return number in self._peers and self._peers[number].takes_part(step)

    def knows(self, peer: Peer) -> bool:
        """Whether a peer is not lost, and has not started again."""
        known = self._peers.get(peer.number)
        return known is not None and known.address == peer.address

    def take_met(self) -> list[Peer]:
        """Returns the peers that are new since the last call."""
        with self.lock:
            met, self._met = self._met, []
        return met

    # -------------------------------------------------------------------------------------------------- this replica
    def meet(self, step: int) -> bool:
        """Greets all peers, with the number of steps done here; returns whether any peer has begun.

        ValueError if a peer belongs to another run.
        """
        self.me, self.step = self.me.changed(step=step), step - 1  # nothing of `step` is here yet
        addresses, _ = read_addresses(self._folder, self.me.number, self.transport.process)
        reasons = self._greet_all(addresses)
        if other := self._foreign:
            raise ValueError(
                f"replica {other.number} at {other.host} trains by another config, on other data, with other frozen "
                "weights, on other devices (more, fewer or of another kind) or with another version of jax; give all "
                "the same, or another --workdir"
            )
        if addresses and not self.peers:
            self._log.say(
                f"none of the {len(addresses)} replicas that {self._folder} names answers ({reasons[0]}): if "
                "some run, see that they can be reached (a firewall?)"
            )
        return any(self._agree(int(any(peer.begun for peer in self.peers))))

    def enter(self, step: int) -> None:
        """Takes part from a step on; all peers know it when this returns."""
        self.tell(first=step, last=NEVER)
        self._log.write(Event.REPLICA_JOINED, replica=self.me.number, step=step, host=self.me.host)

    def choose_entry(self, step: int) -> None:
        """Announces the first step of this replica, if after `step` steps it can catch up in less than ENTRY_S.

        Its peers do some steps until they know it. They wait no longer than ENTRY_S for a replica that catches up. If a
        step's totals take longer than a step, for example over a slow link from a single peer, this replica would never
        catch up. So if it lags, its peers wait for it.
        """
        looked = self._looked
        if looked and not self._agree(int(time.monotonic() - looked[0] > ASK_S))[0]:
            return
        known = self.newest_step()
        ahead = self.look(step, first=not looked)
        if ahead == NO_PEER:
            self.enter(step)
            return
        is_near, margin = known == ahead <= step + 1, AHEAD  # all begin together, with steps longer than a look
        if looked:
            now_s, (then_s, then, before) = time.monotonic(), looked
            step_s, peers_step_s = ((now_s - then_s) / max(steps, 1) for steps in (step - then, ahead - before))
            is_near = ahead <= step + 1 or (ahead - step) * step_s < ENTRY_S
            if is_near:
                margin = max(AHEAD, ceil(ENTRY_S / peers_step_s))
            falls_behind = ahead - step > self._nearest[1] + 1
            is_near |= now_s - self._nearest[0] > (PATIENCE_S if falls_behind else LONG_S)
        if self._agree(int(is_near))[0]:
            self.enter(max(self._agree(max(ahead, step) + margin)))

    def look(self, step: int, *, first: bool = False) -> int:
        """Asks the peers for their steps, and returns the newest one; this replica is at `step`.

        `first`: it has just begun, or received its peers' state.
        """
        self.tell()
        ahead, now_s = self.newest_step(), time.monotonic()
        self._looked = now_s, step, ahead
        if first or NO_PEER < ahead < step + self._nearest[1]:
            self._nearest = now_s, ahead - step
        return ahead

    def newest_step(self) -> int:
        """Returns the newest step that a peer is known to be at; NO_PEER: none trains."""
        return max(self._agree(max((p.step + self.delay for p in self.peers if p.trains), default=NO_PEER)))

    def is_alone(self) -> bool:
        """Whether no peer trains, by the newest records."""
        if self.newest_step() == NO_PEER:
            self.tell()
        return self.newest_step() == NO_PEER

    def all_leave_before(self, step: int) -> bool:
        """Whether at least one peer trains, and all training peers have announced an earlier last step."""
        lasts = [peer.last for peer in self.peers if peer.trains]
        return all(self._agree(int(bool(lasts) and max(lasts) < step)))

    def tell(self, **changes: Any) -> None:
        """Sends the peers this replica's record, with changes, and receives theirs."""
        with self.lock:
            if changes:
                self.me = self.me.changed(**changes)
                self.lock.notify_all()  # threads may wait for something that comes no more
        self._greet_or_lose(self.peers)

    def leave(self, step: int) -> None:
        """Leaves after `step` steps; waits up to 30 s until the peers have the totals that only this replica has.

        If no peer stays, it also waits for peers that are about to enter: they continue where it ends.
        """
        self.tell(step=step, last=step - 1)
        until_s = time.monotonic() + _LEAVE_S
        while time.monotonic() < until_s and self._is_needed(step):
            time.sleep(0.05)
            self.tell()

    def _is_needed(self, step: int) -> bool:
        """Whether a peer lacks totals of the first `step` steps, and no peer that stays can send them.

        A peer that has left in an earlier step lacks none.
        """
        has_successor = any(peer.begun and peer.first < step <= peer.last for peer in self.peers)
        waiting = [peer for peer in self.peers if peer.first < (step if has_successor else NEVER)]
        return any(peer.step < step <= peer.last + 1 for peer in waiting)

    # ------------------------------------------------------------------------------------------------------ its peers
    def lose(self, peer: Peer, error: Exception) -> None:
        """Continues without a peer, and searches for it now and then, unless it has left."""
        with self.lock:
            if self.closed or not self.knows(peer):
                return
            known = self._peers.pop(peer.number)
            self._copies.drop(peer.number)
            has_left = known.last < self.step or known.last < known.step
            if not has_left:
                stalled_in = self.step if isinstance(error, StalledError) else -1
                self._lost[peer.number] = Lost(peer=known, at_s=time.monotonic(), stalled_in=stalled_in)
            self.lock.notify_all()
        if not has_left:
            why = str(error) or type(error).__name__
            self._log.write(Event.REPLICA_LOST, replica=peer.number, step=self.step, why=why)

    def answer(self, request: JsonObject, process: int) -> memoryview:
        """Answers `self` with this replica's record, and `peer`, which brings the caller's record, with all records.

        ValueError for a record that does not describe a replica.
        A lost peer may reach this replica, and not be reached itself (a firewall): until `seek` has greeted it, it
        stays lost, or all replicas would wait for it after each of its greetings.
        """
        if request["op"] == "self":
            return memoryview(json.dumps(self.me.as_dict()).encode())
        peer = Peer.from_dict(request["record"])
        if peer.number != process:
            raise ValueError("the record is of another replica")
        lost = self._lost.get(peer.number)
        if peer.run == self.me.run and not (lost and lost.peer.address == peer.address):
            self._register(peer)
        known = [p.as_dict() for p in self.peers if p.number != process]
        return memoryview(json.dumps({"record": self.me.as_dict(), "peers": known}).encode())

    def _greet_or_lose(self, peers: Sequence[Peer]) -> None:
        """Greets known peers, and loses the ones that do not answer."""
        reasons = self._greet_all([peer.address for peer in peers], self.transport.silence_s)
        for peer in [peer for peer, reason in zip(peers, reasons, strict=True) if reason]:
            self.lose(peer, TimeoutError("does not answer"))

    def _greet_all(self, addresses: Sequence[BlobAddress], patience_s: float = CONNECT_S) -> list[str]:
        """Greets all at the same time, because a host that drops packets lets its callers wait.

        Returns for each the reason why it did not answer, or an empty text.
        """
        with ThreadPoolExecutor(min(len(addresses), _GREETINGS) or 1) as pool:
            return [*pool.map(partial(self._greet, patience_s=patience_s), addresses)]

    def _greet(self, address: BlobAddress, patience_s: float) -> str:
        """Exchanges records with a peer, and greets the peers that only it knows; returns why it did not answer."""
        try:
            with self.transport.connect(address, patience_s) as link:
                content = link.ask({"op": "peer", "record": self.me.as_dict()}, MOST_BYTES)
            answer = json_objects.parse(content, "a replica's records")
            peer = Peer.from_dict(answer["record"])
            its_peers = [Peer.from_dict(record) for record in answer["peers"]]
            if peer.number != address.process:
                raise ValueError("it is another replica")
        except (PeerError, ValueError, LookupError, TypeError) as error:
            return str(error)
        if peer.run != self.me.run:
            self._foreign = peer
            return ""
        self._register(peer)
        for other in its_peers:
            # peers may send records of replicas that are out of reach here again and again: `seek` greets those
            is_new = other.number not in (self.me.number, *self._peers, *self._lost)
            if is_new and self._greet(other.address, patience_s):
                with self.lock:
                    self._lost.setdefault(other.number, Lost(peer=other, at_s=time.monotonic()))
        return ""

    def _register(self, peer: Peer) -> None:
        """Takes a peer's record, unless a newer one is here."""
        with self.lock:
            known = self._peers.get(peer.number)
            is_new = not self.knows(peer)
            if known and not is_new and known.version >= peer.version:
                return
            if self._must_catch_up(peer):
                peer = replace(peer, first=NEVER, begun=False)
            self._peers[peer.number] = peer
            self._lost.pop(peer.number, None)
            if is_new:
                self._met.append(peer)
            self.lock.notify_all()
        self._report_change(None if is_new else known, peer)

    def _must_catch_up(self, peer: Peer) -> bool:
        """Whether a peer claims to take part, but was cut off, or hangs in the step in which it was lost."""
        was_cut_off = peer.first <= peer.step < self.step - 1 - self.delay and peer.takes_part(self.step)
        lost = self._lost.get(peer.number)
        hangs = lost is not None and lost.peer.address == peer.address and peer.step <= lost.stalled_in
        return was_cut_off or hangs

    def _report_change(self, before: Peer | None, after: Peer) -> None:
        """Reports a peer that takes part from now on, or has announced its last step."""
        if after.first < NEVER == after.last and (before is None or before.first == NEVER):
            self._log.write(Event.REPLICA_JOINED, replica=after.number, step=after.first, host=after.host)
        elif before and after.last < NEVER == before.last:
            self._log.write(Event.REPLICA_LEFT, replica=after.number, step=after.last)

    def _seek_until_closed(self) -> None:
        for turn in itertools.count(1):
            with self.lock:
                if self.lock.wait_for(lambda: self.closed, SEEK_S):
                    return
            with suppress(OSError, RuntimeError):  # a folder that cannot be read now; no more threads
                self.seek(turn)

    def seek(self, turn: int) -> None:
        """Greets the lost peers: they may have been cut off, or stopped, for a while.

        It also greets peers that do not take part, or no longer: a peer that was cut off may have caught up without
        knowing that it had to, and no sum notices when such a peer is gone. And it greets unknown replicas that have an
        address, because a link may have been cut when both began: each time if it knows no peer, else every RARELY-th
        time. A stale address that does not answer is removed.
        """
        now_s = time.monotonic()
        with self.lock:
            self._lost = {number: each for number, each in self._lost.items() if now_s - each.at_s <= STALE_S}
            idle = [peer for peer in self._peers.values() if peer.first == NEVER or peer.last < self.step]
            lost = [each.peer.address for each in self._lost.values()]
            known = {*(peer.address for peer in self._peers.values()), *lost}
            is_due = not self._peers or turn % RARELY == 0
        fresh, stale = read_addresses(self._folder, self.me.number, self.transport.process) if is_due else ([], [])
        unknown = [address for address in (*fresh, *stale) if address not in known]
        reasons = dict(zip(unknown, self._greet_all([*lost, *unknown])[len(lost) :], strict=True))
        self._greet_or_lose(idle)
        for address in stale:
            if reasons.get(address):
                remove_address(self._folder, address, self.transport.process)
        if turn % RARELY == 0:
            self._renew()

    def _renew(self) -> None:
        """Writes this replica's address again, or notes the address of a program that has taken its number."""
        address = read_address(self._folder, self.me.number, self.transport.process)
        if address in (None, self.me.address):
            write_address(self._folder, self.me, self.transport.process)
            return
        with self.lock:
            self.successor = address
            self.lock.notify_all()
