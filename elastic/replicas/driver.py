"""`Replicas`: one replica of a run, which a training loop drives step by step.

    step = replicas.step(number)
    for unit in step.units():
        if unit is not Status.WAITING:
            for piece, values in work.pieces(state, rows_of(number, unit)):
                step.put(unit, piece, values)
    state, metrics = work.update(state, step.totals())

The loop pulls work units, while other threads exchange their sums with peers (elastic/replicas/transport.py lists
them). A lost replica costs its units, not the step: its peers compute them, to the same bits.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from elastic.replicas.exchange import SumExchange
from elastic.replicas.membership import AHEAD, ASK_S, NO_PEER, Log, Membership
from elastic.replicas.peers import MOST_BYTES, NEVER, Peer
from elastic.replicas.state_copies import LEAVES, StateCopies, fetch_copies
from elastic.replicas.sums import Piece, Status, StepSums
from elastic.replicas.transport import SharedLock, Transport
from runtime.blobs import PeerError
from runtime.exit_codes import ResumableError
from runtime.files.json_objects import JsonObject

FETCHES = 5  # attempts to fetch the state
LOOK_S = 0.02  # between two searches for a unit that a process of the replica needs


class BehindError(ResumableError):
    """This replica lags: its peers no longer have the totals of its next step, so it needs their state."""


class Step:
    """One step of the replicas, for the training thread. The processes of a replica call all methods together."""

    def __init__(self, replicas: "Replicas", number: int, sums: StepSums) -> None:
        self._replicas, self.number, self._sums = replicas, number, sums

    def units(self) -> Iterator[int | Literal[Status.WAITING]]:
        """Yields each unit to compute here, until all totals are here; WAITING at least every LOOK_S in between.

        These are the units of this replica and of lost ones, and units that a peer asks for. A replica that does not
        take part yet receives the totals. BehindError if its peers no longer have them.
        """
        self._replicas.exchange.begin_sum(self.number)
        while (unit := self._next_unit(LOOK_S)) != Status.COMPLETE:
            if isinstance(unit, Status):
                yield Status.WAITING
            else:
                self._sums.begin(unit)
                yield unit

    def units_without_waiting(self) -> Iterator[int]:
        """Yields each unit to compute here that is known now; `units` yields the others later."""
        while not isinstance(unit := self._next_unit(0.0), Status):
            self._sums.begin(unit)
            yield unit

    def begin(self, unit: int) -> None:
        """Notes that a unit is computed here that neither `units` nor `units_without_waiting` has yielded."""
        self._sums.begin(unit)

    def leave_to(self, replicas: Sequence[int]) -> None:
        """Continues without the other replicas that take part in this step."""
        self._replicas.exchange.leave_to(self.number, replicas)

    def put(self, unit: int, piece: int, values: np.ndarray) -> None:
        """Takes a piece `f32 [N]` of a unit that was computed here. The array must not be changed any more."""
        self._replicas.exchange.put(self.number, unit, piece, values)

    def totals(self) -> np.ndarray:
        """Returns the totals of all pieces, `f32 [N]`, one after the other, and ends the step: `units` is exhausted."""
        self._replicas.finish(self.number)
        return self._sums.totals()

    def _next_unit(self, wait_s: float) -> int | Status:
        """Returns a unit that a process of this replica needs, WAITING or COMPLETE; the same in all of them."""
        answers = self._replicas.agree(self._replicas.exchange.next_unit(self._sums, wait_s))
        if Status.BEHIND in answers:
            raise BehindError(f"the other replicas no longer have the totals of step {self._replicas.members.step}")
        units = [answer for answer in answers if answer >= 0]
        return min(units) if units else Status(max(answers))


class Replicas:
    """This replica, and its exchange with its peers. Close it, so that they notice its end at once."""

    def __init__(
        self,
        *,
        folder: Path,
        transport: Transport,
        num_units: int,
        pieces: Sequence[Piece],
        delay: int = 0,
        run: str = "",
        agree: Callable[[int], Sequence[int]] = lambda value: [value],
        progress: Callable[[], object] = lambda: None,
        log: Log | None = None,
    ) -> None:
        """`folder` has one folder for each replica, and `run` is equal in all replicas of a run.

        `delay`: 1 if the units of a step are computed before the step before it is summed, else 0.

        In a replica of several processes each process owns a shard of the gradients and talks to the same-numbered
        processes of its peers. `agree` returns the values of all processes, by number; they call it together.

        `progress` is called now and then, in several threads, while this replica waits for a peer's hash or state. An
        error of it ends the wait.
        """
        self._transport, self._progress, self._log = transport, progress, log or Log()
        self.agree = agree
        self.handlers: dict[str, Callable[[JsonObject, int], memoryview]] = {}  # of further requests, by `op`
        self._lock = SharedLock()
        self._has_fetched = False  # a state, since this replica took part
        self._fetched = -1  # the step of the peers' state that this replica receives; it has hashes after that step
        self._digests: dict[int, str] = {}  # hashes after the last compared step
        self.copies = StateCopies(self._lock)
        self.count = 1  # replicas that took part in the last step to its end
        self.is_first = True  # it saves the checkpoint, which would be the same in all replicas
        self._is_ready = threading.Event()  # the service answers then
        self._service = transport.serve(self.answer)
        address = self._service.address
        self.members = Membership(
            Peer(number=transport.number, host=address.host, port=address.port, run=run),
            folder=folder,
            transport=transport,
            delay=delay,
            lock=self._lock,
            copies=self.copies,
            agree=agree,
            log=self._log,
        )
        self.exchange = SumExchange(num_units, pieces, self.members)
        self._is_ready.set()
        try:
            self.members.publish()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all connections; more than once is allowed."""
        with self._lock:
            if self.members.closed:
                return
            self.members.closed = True
            self.copies.close()
            self.exchange.close()
            self._lock.notify_all()
        self._service.close()
        self.members.withdraw()

    # ------------------------------------------------------------------------------------------------------- the steps
    def step(self, number: int) -> Step:
        """Returns a step, whose units are divided among the known replicas unless it is under way.

        A replica that was about to enter later does so now if all its peers leave before: it has all their totals.
        BehindError for a step that no known replica did: they entered later, or took their state from others.
        """
        if (sums := self.exchange.under_way(number)) is None:
            self._enter_if_possible(number)
            sums = self.exchange.begin(number)
            self._has_fetched &= not self.members.me.takes_part(number)
        return Step(self, number, sums)

    def _enter_if_possible(self, step: int) -> None:
        members = self.members
        if members.me.first == NEVER:
            members.choose_entry(step)
        if members.me.begun or members.is_alone():
            return
        if members.all_leave_before(step):
            members.enter(step)
        elif not any(self.agree(int(any(peer.takes_part(step) for peer in (members.me, *members.peers))))):
            raise BehindError(f"the other replicas were not there in step {step}")

    def finish(self, step: int) -> None:
        """Ends a step whose totals are all here."""
        finished = self.exchange.finish(step)
        self.count = len(finished)
        self.is_first = bool(self.agree(int(finished[0] == self.members.me.number))[0])

    # --------------------------------------------------------------------------------------------------- their state
    def compare(self, step: int, digest: str) -> bool:
        """Returns whether the hash of this replica's parameters after `step` steps is the majority's hash.

        Names the replicas that differ. If two hashes are equally frequent, the replica with the lowest number is right.
        False in all processes of a replica if the parameters in any of them differ. `is_first` is now true for the
        lowest replica that is right.
        """
        with self._lock:
            self._digests = {step: digest}
            self._lock.notify_all()
        me = self.members.me.number
        digests = {me: digest}
        for peer in [peer for peer in self.members.peers if peer.takes_part(step)]:  # one may end once all have asked
            with contextlib.suppress(PeerError):  # lost, or elsewhere: it will be noticed where it matters
                digests[peer.number] = self._ask_digest(peer, step)
        by_number = [digests[number] for number in sorted(digests)]
        right = max(by_number, key=lambda one: (by_number.count(one), -by_number.index(one)))
        for number, one in digests.items():
            if one != right and number != me:
                self._log.say(f"replica {number} has other parameters after step {step}: it takes those of the others")
        first = min(number for number, one in digests.items() if one == right)
        self.is_first = any(self.agree(int(first == me)))
        return all(self.agree(int(digest == right)))

    def _ask_digest(self, peer: Peer, step: int) -> str:
        """Returns a peer's hash; waits as long as the peer makes progress. PeerError if it does not answer."""
        with self._transport.connect(peer.address) as link:
            content = link.ask({"op": "digest", "step": step}, MOST_BYTES, self._progress)
        return content.decode(errors="replace")

    def fetch_state(self, sizes: Sequence[int]) -> tuple[int, list[memoryview]] | None:
        """Returns a step soon to come, and the state after it: the bytes of arrays of `sizes` bytes each.

        Each peer sends a part, at the same time. ResumableError if a peer does not. None if no peer remains: if all
        peers leave, this replica waits for that, because its state is as valid as theirs a few steps earlier. If it
        has fetched a state before and did not catch up, its peers wait for it at that step.
        """
        tries, takes_part, self._has_fetched = 1, self._has_fetched, True
        while tries <= FETCHES:
            self.members.tell(first=NEVER, begun=False)
            if (newest := self.members.newest_step()) == NO_PEER:
                self.exchange.compute_alone()
                return None
            step = newest + AHEAD * tries
            self._fetched = step
            self.members.tell(step=step, first=step if takes_part else NEVER)  # from which on they keep the totals
            sources = [peer.address for peer in self.members.peers if peer.trains and peer.last >= step]
            if not any(self.agree(len(sources))):
                self._progress()  # they save a checkpoint, which may take minutes
                with self._lock:
                    if self._lock.wait_for(lambda: self.members.closed, ASK_S):
                        raise ConnectionError(LEAVES)
                continue
            arrays, why = {}, "another process of this replica did not get its part" if sources else "none has it"
            try:
                if sources:
                    arrays = fetch_copies(self._transport.connect, sources, step, sizes, self._progress)
            except PeerError as error:  # lost meanwhile, or further than it was thought
                why = str(error)
            if all(self.agree(int(len(arrays) == len(sizes)))):
                self.exchange.skip(step)
                self.members.look(step, first=True)  # the skipped steps say nothing about its speed
                return step, [arrays[number] for number in range(len(sizes))]
            self._log.say(f"the others' state did not come ({why}): try {tries} of {FETCHES}")
            tries += 1
        raise ResumableError("the other replicas do not send the state that this one needs")

    # ----------------------------------------------------------------------------------------------- answering threads
    def answer(self, request: JsonObject, process: int, stream: BinaryIO) -> memoryview:
        """Answers a peer's request. LookupError if the requested data is missing; ValueError closes the connection."""
        del stream
        self._is_ready.wait()
        if self.members.closed:
            raise ConnectionError(LEAVES)
        match request["op"]:
            case "peer" | "self":
                return self.members.answer(request, process)
            case "copy" | "state":
                return self.copies.answer(request, process)
            case "digest":
                return self._await_digest(request["step"])
            case op if op in self.handlers:
                return self.handlers[op](request, process)
            case _:
                return self.exchange.answer(request)

    def _await_digest(self, step: int) -> memoryview:
        """Returns the hash after a step, once it is here. LookupError if it never will be."""
        members = self.members
        with self._lock:
            passed = lambda: members.step >= step or max(self._digests, default=-1) > step
            # it leaves, or receives its peers' state: a peer that asks for a hash does not send that meanwhile
            never = lambda: members.closed or not members.me.takes_part(step) or step <= self._fetched
            self._lock.wait_for(lambda: step in self._digests or passed() or never())
            return memoryview(self._digests[step].encode())
