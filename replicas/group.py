"""`Replicas`: one member's side of the sums of all steps, and of who takes part in them.

Every member computes some shares of a step, owns some pieces, and asks the others: for the sums of what they computed
of its own pieces, and for the totals of theirs. The bytes are those of a ring all-reduce. Nothing is agreed upon. Who
computes what is a guess that all make alike; where two guess differently, a request makes its receiver compute what it
had left to another, and the values are the same (replicas/sums.py). So a lost member costs what it owed, not the step.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from files import json_objects
from replicas.members import NEVER, Member, read_addresses, write_address
from replicas.payloads import Payload
from replicas.plan import StepPlan
from replicas.state_copies import LEAVES, StateCopies
from replicas.sums import COMPLETE, TOTAL_IS_HERE, WAITING, StepSums, check_nodes
from replicas.tree import Node
from runtime.blobs import Address, BlobService, Connection, PeerError, RefusedError
from runtime.exit_codes import ResumableError

PURPOSE = "replicas"
AHEAD = 2  # steps between the word of a joining member and its first shares
KEPT_STEPS = 64  # of which totals are kept, at most, for members that catch up
FETCHES = 5  # of the state
CONNECTIONS = 2  # to each of the others, for sums; as many for totals
SEEK_S = 5.0  # between two looks for members that were lost
ASK_S = 0.2  # between two looks of a member that catches up, where the others are
LOOK_S = 0.02  # between two looks of a member of several processes for what one of them may want
_MOST_BYTES = 1 << 20  # of what a member says of itself and of others
_CONNECT_S = 5.0
_LEAVE_S = 30.0
_GONE = "the step is gone"
_BEHIND, _NOBODY = -3, -1  # among what is agreed on


class BehindError(ResumableError):
    """The others no longer have the totals of this member's next step: it needs their state."""


class Replicas:
    """This member, and what it knows of the others. Close it, so that others learn at once that it is gone."""

    def __init__(
        self,
        *,
        number: int,
        folder: Path,
        token: str,
        num_shares: int,
        payloads: Sequence[Payload],
        sizes: Sequence[int],
        silence_s: float,
        run: str = "",
        process: int = 0,
        agree: Callable[[int], Sequence[int]] = lambda value: [value],
        say: Callable[[str], object] = print,
    ) -> None:
        """`sizes` are the values of each piece; `folder` has one folder for each member, and `run` is equal in all.

        Of a member of several processes each has its own part of the gradients, and others that it asks: those with
        its number. `agree` returns the values of all of them, by number; they call all methods together.
        """
        self._folder, self._token, self._silence_s, self._say = folder, token, silence_s, say
        self._num_shares, self._payloads, self._sizes = num_shares, payloads, sizes
        zeros = (np.zeros(size, np.float32) for size in sizes)
        self._encoded_sizes = [len(payload.encode(x)) for payload, x in zip(payloads, zeros, strict=True)]
        self._purpose, self._agree = f"{PURPOSE} {process}", agree
        self._process, self._has_others = process, len(agree(0)) > 1
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._members: dict[int, Member] = {}  # the others
        self._lost: dict[int, Member] = {}  # of those that did not say that they leave
        self._steps: dict[int, StepSums] = {}
        self._under_way: set[tuple[int, int, int, Node | None]] = set()  # member, step, piece, node that were asked for
        self._step = -1  # the one that is being summed, or the last that was
        self._plan = StepPlan(me=number, num_shares=num_shares, num_pieces=len(sizes), rates={})
        self._behind, self._closed = -1, False  # the step of which the others no longer have the totals
        self._digests: dict[int, str] = {}  # of the last step that was compared
        self._asked_s = -inf
        self.copies = StateCopies(self._changed)
        self.is_first = True  # of those that finished the last step: it does what all would do alike
        self.events: list[tuple[float, str, int]] = []
        self._service = BlobService(self._purpose, self._answer, process=number, count=64, token=token)
        address = self._service.address
        self.me = Member(number=number, host=address.host, port=address.port, run=run)
        write_address(folder, self.me, process)
        threading.Thread(target=self._seek, name="lost replicas", daemon=True).start()

    # ----------------------------------------------------------------------------------------------------- membership
    @property
    def others(self) -> list[Member]:
        """The other members that are there, by number."""
        with self._changed:
            return [self._members[number] for number in sorted(self._members)]

    def meet(self, step: int) -> bool:
        """Says hello to the others, with the steps done here; returns whether one of them has begun.

        ValueError if one of them is of another run.
        """
        self.me, self._step = self.me.changed(step=step), step - 1  # nothing of `step` is here yet
        for address in read_addresses(self._folder, self.me.number, self._process):
            self._greet(address, patience_s=_CONNECT_S)
        if other := next((member for member in self.others if member.run != self.me.run), None):
            raise ValueError(
                f"replica {other.number} at {other.host} trains by another config; give all the same, or another "
                "--workdir"
            )
        return any(self._agree(int(any(member.begun for member in self.others))))

    def enter(self, step: int) -> None:
        """Takes part from a step on; the others learn of it before it returns."""
        rate = max((m.rate for m in self.others if m.begun), default=self.me.rate)
        self.me, self._behind = self.me.changed(first=step, last=NEVER, rate=rate), -1
        self._tell()

    def tell(self, **changes: Any) -> None:
        """Tells the others what has changed about this member."""
        self.me = self.me.changed(**changes)
        self._tell()

    def leave(self, step: int) -> None:
        """Leaves after `step` steps; waits until the others have what they need of this member, up to 30 s."""
        self.tell(step=step, last=step - 1)
        until_s = time.monotonic() + _LEAVE_S
        while time.monotonic() < until_s and any(m.step < step for m in self.others if m.takes_part(step - 1)):
            time.sleep(0.05)
            self._tell()

    def close(self) -> None:
        """Ends all connections; more than once is allowed."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self.copies.close()
            for sums in self._steps.values():
                sums.close()
            self._changed.notify_all()
        self._service.close()

    # ------------------------------------------------------------------------------------------------------ their state
    def agrees(self, step: int, digest: str) -> bool:
        """Whether this member's parameters after `step` steps, by their hash, are those of most others; names others.

        Where as many say one thing as another, the member with the lowest number is right. False in all processes of a
        member whose parameters differ in one of them.
        """
        with self._changed:
            self._digests = {step: digest}
            self._changed.notify_all()
        said = {self.me.number: digest}
        for member in self.others:
            if member.takes_part(step):
                with contextlib.suppress(PeerError):  # lost, or elsewhere: it will be noticed where it matters
                    said[member.number] = self._ask(member, {"op": "digest", "step": step}).decode()
        found = [said[number] for number in sorted(said)]
        right = max(found, key=lambda one: (found.count(one), -found.index(one)))
        for number, one in said.items():
            if one != right and number != self.me.number:
                self._say(f"replica {number} has other parameters after step {step}: it takes those of the others")
        return all(self._agree(int(digest == right)))

    def _ask(self, member: Member, request: dict[str, Any]) -> bytes:
        """Asks a member one thing. PeerError if it does not answer."""
        silence_s = self._silence_s
        with Connection(member.address, self._token, self._purpose, self.me.number, silence_s=silence_s) as connection:
            return connection.ask(request, _MOST_BYTES)

    def fetch_state(self, sizes: Sequence[int]) -> tuple[int, list[memoryview]] | None:
        """Returns a step soon to come and the state after it: of arrays of `sizes` bytes each their bytes.

        Each of the others sends a part, at once. ResumableError if they do not; None if nobody is there any more: what
        this member has is as right as what they had, a few steps ago.
        """
        for tries in range(1, FETCHES + 1):
            self.tell(first=NEVER, begun=False)
            begun = [member for member in self.others if member.begun]
            if not any(self._agree(len(begun))):
                return None
            step = max(self._agree(max((member.step for member in begun), default=0))) + AHEAD * tries
            self.tell(step=step)  # from which on they keep the totals
            found, why = {}, "none has it"
            try:
                found = self._fetch_state(begun, step, sizes) if begun else {}
            except PeerError as error:  # lost meanwhile, or further than it was thought
                why = str(error)
            if all(self._agree(int(len(found) == len(sizes)))):
                return step, [found[number] for number in range(len(sizes))]
            self._say(f"the others' state did not come ({why}): try {tries} of {FETCHES}")
        raise ResumableError("the other replicas do not send the state that this one needs")

    def _fetch_state(self, begun: Sequence[Member], step: int, sizes: Sequence[int]) -> dict[int, memoryview]:
        parts: list[list[int]] = [[] for _ in begun]
        loads = [0] * len(begun)
        for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            least = loads.index(min(loads))
            parts[least].append(number)
            loads[least] += sizes[number]
        found: dict[int, memoryview] = {}

        def fetch(member: Member, numbers: list[int]) -> None:
            with Connection(
                member.address, self._token, self._purpose, self.me.number, silence_s=self._silence_s
            ) as connection:
                connection.ask({"op": "copy", "step": step, "arrays": numbers}, 0)
                for number in numbers:
                    request = {"op": "state", "step": step, "array": number}
                    found[number] = connection.get_whole(request, sizes[number])

        with ThreadPoolExecutor(len(begun)) as pool:
            for done in [pool.submit(fetch, *each) for each in zip(begun, parts, strict=True)]:
                done.result()
        return found

    # ------------------------------------------------------------------------------------------------------- the steps
    def sum(self, step: int, compute: Callable[[int, StepSums], None]) -> list[np.ndarray]:
        """Returns the totals `f32 [N]` of all pieces of a step.

        `compute(share, sums)` computes a share and puts its pieces into `sums`: those that are this member's part, what
        a lost member owed, and what another one asks for. A member that does not take part yet receives the totals.
        BehindError if the others no longer have them.
        """
        if self.me.first == NEVER:
            self._choose_entry(step)
        with self._changed:
            self._step = step
            self.me = self.me.changed(step=step, begun=self.me.takes_part(step))
            there = [m for m in (self.me, *self._members.values()) if m.takes_part(step)]
            self._plan = replace(self._plan, rates={m.number: m.rate for m in there}, lost=frozenset())
            sums = self._sums_of(step)
            self._plan.follow(sums)
            self._changed.notify_all()
        while (share := self._next_share(sums)) != COMPLETE:
            if share != WAITING:
                sums.begin(share)
                compute(share, sums)
        with self._changed:
            self.me = self.me.changed(step=step + 1)
            is_first = self._plan.left[0] == self.me.number
            self._forget(step)
        self.is_first = bool(self._agree(int(is_first))[0])
        return sums.totals()

    def put(self, sums: StepSums, share: int, piece: int, values: np.ndarray) -> None:
        """Takes a piece of a share that was computed here."""
        sums.put(share, piece, values)
        self._plan.add_up(sums, piece)

    def _sums_of(self, step: int) -> StepSums:
        if step not in self._steps:
            self._steps[step] = StepSums(self._num_shares, self._payloads, self._lock, self._changed)
        return self._steps[step]

    def _next_share(self, sums: StepSums) -> int:
        """Returns what `StepSums.look` does, the same in all processes: a share that one of them wants, if any."""
        try:
            found = sums.look(self._check, LOOK_S if self._has_others else None)
        except BehindError:
            found = _BEHIND
        said = self._agree(found)
        if _BEHIND in said:
            raise BehindError(f"the other replicas no longer have the totals of step {self._step}")
        wanted = [share for share in said if share >= 0]
        return min(wanted) if wanted else max(said)

    def _check(self) -> None:
        if self._closed:
            raise ConnectionError(LEAVES)
        if self._behind == self._step:
            raise BehindError

    def _choose_entry(self, step: int) -> None:
        """Says from when on this member takes part, if it has nearly caught up."""
        if not self._agree(int(time.monotonic() > self._asked_s + ASK_S))[0]:
            return
        self._asked_s = time.monotonic()
        self._tell()
        ahead = max(self._agree(max((m.step for m in self.others if m.begun), default=_NOBODY)))
        if ahead <= step + 1:
            self.enter(step if ahead == _NOBODY else max(ahead, step) + AHEAD)

    def _forget(self, step: int) -> None:
        """Drops what nobody will ask for any more: all but the totals of this step, and of those others catch up by."""
        self._steps[step].drop_values()
        catching_up = [m.step for m in self._members.values() if step < m.first]
        oldest = max(min([step, *catching_up]), step - KEPT_STEPS)
        for old in [old for old in self._steps if old < oldest]:
            del self._steps[old]

    # -------------------------------------------------------------------------------------------------- asking others
    def _greet(self, address: Address, patience_s: float) -> bool:
        """Tells a member of this one, and learns of it and of those that it knows. False if it is not there."""
        try:
            with Connection(address, self._token, self._purpose, self.me.number, silence_s=patience_s) as connection:
                answer = connection.ask({"op": "member", "member": self.me.as_dict()}, _MOST_BYTES)
            said = json_objects.parse(answer, "what a member says")
            member = Member.from_dict(said["member"])
            known = [Member.from_dict(values) for values in said["others"]]
            if member.number != address.process:
                raise ValueError("it is another member")
        except (PeerError, ValueError, LookupError):
            return False
        self._register(member)
        for other in known:
            if other.number not in (self.me.number, *self._members):
                self._greet(other.address, patience_s)
        return True

    def _tell(self) -> None:
        for member in self.others:
            if not self._greet(member.address, self._silence_s):
                self._lose(member, "does not answer")

    def _register(self, member: Member) -> None:
        with self._changed:
            known = self._members.get(member.number)
            if known is not None and known.address == member.address and known.version >= member.version:
                return
            if member.first <= member.step < self._step - 1 and member.takes_part(self._step):
                # it was cut off, and must catch up
                member = replace(member, first=NEVER, begun=False)
            self._members[member.number] = member
            self._lost.pop(member.number, None)
            if not member.takes_part(self._step):  # it has started anew, or takes the others' state
                self._do_without(member.number)
            self._changed.notify_all()
        if known is None or known.address != member.address:
            self.events.append((time.time(), "met", member.number))
            for kind in ("sum", "total") * CONNECTIONS:  # while one waits, the others use the link
                threading.Thread(target=self._pull, args=(member, kind), daemon=True).start()

    def _lose(self, member: Member, why: str) -> None:
        """Goes on without a member; what it owed is divided among the others."""
        with self._changed:
            known = self._members.get(member.number)
            if self._closed or known is None or known.address != member.address:
                return
            del self._members[member.number]
            self._do_without(member.number)
            left = known.last < self._step or known.last < known.step
            if not left:
                self._lost[member.number] = known
            self._changed.notify_all()
        self.events.append((time.time(), "left" if left else "lost", member.number))
        if not left:
            self._say(f"replica {member.number} is lost in step {self._step + 1}: {why}; the others do its part")

    def _seek(self) -> None:
        """Greets now and then those that were lost: they may have been cut off, or stopped, for a while."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, SEEK_S):
                    return
                lost = [*self._lost.values()]
            for member in lost:
                self._greet(member.address, _CONNECT_S)

    def _do_without(self, number: int) -> None:
        """Divides among the others what a member was to do of this step."""
        if number in self._plan.left and number != self.me.number:
            self._plan = self._plan.without([number])
            if self._step in self._steps:
                self._plan.follow(self._steps[self._step])
            self._changed.notify_all()

    def _pull(self, member: Member, kind: str) -> None:
        """Asks a member for one thing after the other, as long as it is there."""
        try:
            with Connection(
                member.address, self._token, self._purpose, self.me.number, silence_s=self._silence_s
            ) as connection:
                while (wanted := self._next(member, kind)) is not None:
                    step, sums, piece, node = wanted
                    try:
                        self._fetch(connection, step, sums, piece, node)
                    finally:
                        with self._lock:
                            self._under_way.discard((member.number, step, piece, node))
        except (PeerError, ValueError) as error:
            self._lose(member, str(error))

    def _next(self, member: Member, kind: str) -> tuple[int, StepSums, int, Node | None] | None:
        """Returns what to ask a member for; waits for it, and returns None when the member is gone."""
        with self._changed:
            while not self._closed:
                known = self._members.get(member.number)
                if known is None or known.address != member.address:
                    return None
                sums = self._steps.get(self._step)
                if sums and not sums.is_complete:
                    ask = self._plan.sum_to_ask if kind == "sum" else self._plan.total_to_ask
                    busy = {each[2:] for each in self._under_way if each[:2] == (member.number, self._step)}
                    if found := ask(member.number, sums, busy):
                        piece, node = found
                        self._under_way.add((member.number, self._step, piece, node))
                        return self._step, sums, piece, node
                self._changed.wait()
        return None

    def _fetch(self, connection: Connection, step: int, sums: StepSums, piece: int, node: Node | None) -> None:
        """Gets a sum, or with `node` None the total. PeerError if the member does not give it."""
        request = {"op": "total", "step": step, "piece": piece}
        if node:
            request |= {"op": "sum", "lo": node[0], "hi": node[1]}
        is_sum = node is not None and node[1] - node[0] > 1
        try:
            content = connection.get_whole(request, self._bytes_of(piece, is_sum=is_sum))
        except RefusedError as error:
            if node and TOTAL_IS_HERE in str(error):
                self._fetch(connection, step, sums, piece, None)
            elif _GONE in str(error):
                with self._changed:
                    self._behind = step
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._step != step or self._closed)
            else:
                raise
            return
        if node:
            sums.take(node, piece, content)
            self._plan.add_up(sums, piece)
        else:
            sums.put_total(piece, content)

    def _bytes_of(self, piece: int, *, is_sum: bool) -> int:
        return 4 * self._sizes[piece] if is_sum else self._encoded_sizes[piece]

    # ------------------------------------------------------------------------------------------------ answering others
    def _answer(self, request: dict[str, Any], process: int, stream: BinaryIO) -> memoryview:
        """Answers a request. LookupError if there is no such thing; ValueError closes the connection."""
        del stream
        op = request["op"]
        if op == "member":
            member = Member.from_dict(request["member"])
            if member.number != process:
                raise ValueError("it speaks of another member")
            self._register(member)
            with self._changed:
                known = [m.as_dict() for m in self._members.values() if m.number != process]
                return memoryview(json.dumps({"member": self.me.as_dict(), "others": known}).encode())
        if op in ("copy", "state"):
            return self.copies.answer(request)
        if op == "digest":
            step = request["step"]
            with self._changed:
                self._changed.wait_for(lambda: self._closed or step in self._digests or self._step >= step)
                return memoryview(self._digests[step].encode())
        step, piece = request["step"], request["piece"]
        if type(step) is not int or type(piece) is not int or not 0 <= piece < len(self._sizes):
            raise ValueError("there is no such piece")
        if op == "total":
            return self._await(step).wait_for_total(piece)
        if op == "sum":
            node = int(request["lo"]), int(request["hi"])
            check_nodes([node], self._num_shares)
            return self._await(step).wait_for(node, piece)
        raise ValueError(f"{op} is no request")

    def _await(self, step: int) -> StepSums:
        """Returns a step's sums, once it is begun here. LookupError if they are gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._step >= step)
            if self._closed:
                raise ConnectionError(LEAVES)
            if step not in self._steps:
                raise LookupError(_GONE)
            return self._steps[step]
