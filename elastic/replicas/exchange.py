"""`SumExchange`: the steps under way, and the threads that ask peers for sums and totals, and answer them.

Every replica computes some units of a step, and adds up some pieces of the parameters. It asks its peers for their sums
over its pieces, and for the totals of the other pieces. It sends as many bytes as in a ring all-reduce.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from elastic.replicas.membership import Membership
from elastic.replicas.peers import Peer
from elastic.replicas.plan import StepPlan
from elastic.replicas.state_copies import LEAVES
from elastic.replicas.sums import TOTAL_IS_HERE, Node, Piece, Status, StepSums, check_nodes
from elastic.replicas.transport import Link
from runtime.blobs import RefusedError
from runtime.exit_codes import ResumableError
from runtime.files.json_objects import JsonObject

KEPT_STEPS = 64  # most steps whose totals are kept for lagging peers
CONNECTIONS = 2  # to each peer, for sums; the same number for totals
_GONE = "the step is gone"
_SKIPPED = "the step was not done here"


class Request(NamedTuple):
    """A sum of a node, or with `node` None the total, of a piece that a peer is asked for."""

    peer: int
    step: int
    piece: int
    node: Node | None


class SumExchange:
    """The sums and plans of the steps under way, which all threads of a replica use while they hold its lock."""

    def __init__(self, num_units: int, pieces: Sequence[Piece], members: Membership) -> None:
        self._num_units, self._pieces, self._members, self._lock = num_units, pieces, members, members.lock
        self._encoded_sizes = [len(piece.payload.encode(np.zeros(piece.size, np.float32))) for piece in pieces]
        self._sums: dict[int, StepSums] = {}
        self._plans: dict[int, StepPlan] = {}  # steps that are begun, and not summed
        self._requested: set[Request] = set()  # and not answered yet
        self._skipped = range(0)  # steps that this replica did not end: it has its peers' state after them
        self._behind: int | None = None  # the step whose totals the peers no longer have
        self.sent_bytes = 0  # sums and totals for peers

    # ------------------------------------------------------------------------------------ steps, by the training thread
    def under_way(self, step: int) -> StepSums | None:
        """Returns the sums of a step that is begun, and not finished."""
        return self._sums[step] if step in self._plans else None

    def begin(self, step: int) -> StepSums:
        """Divides a step among the known replicas; returns its sums."""
        with self._lock:
            me = self._members.me
            self._members.step, self._members.me = step - self._members.delay, me.changed(begun=me.takes_part(step))
            self.follow_members()
            rates = {peer.number: peer.rate for peer in (me, *self._members.peers) if peer.takes_part(step)}
            plan = StepPlan(me=me.number, num_units=self._num_units, num_pieces=len(self._pieces), rates=rates)
            sums = self._sums.get(step) or StepSums(self._num_units, self._pieces, self._lock)
            self._sums[step], self._plans[step] = sums, plan
            plan.follow(sums)
            self._lock.notify_all()
        return sums

    def begin_sum(self, step: int) -> None:
        """Asks the peers for the sums and totals of a step from now on."""
        with self._lock:
            self._members.step, self._members.me = step, self._members.me.changed(step=step)
            self._lock.notify_all()

    def next_unit(self, sums: StepSums, wait_s: float) -> int | Status:
        """Returns a unit to compute, or a status; WAITING without a unit or all totals within `wait_s`.

        ConnectionError when this replica is closed; ResumableError if another program has taken its number.
        """
        until_s = time.monotonic() + wait_s
        with self._lock:
            while not sums.is_complete:
                if self._members.closed:
                    raise ConnectionError(LEAVES)
                if other := self._members.successor:
                    number = self._members.me.number
                    raise ResumableError(f"replica {number} was started again at {other.host}:{other.port}")
                if self._behind == self._members.step:
                    return Status.BEHIND
                self.follow_members()
                if (unit := sums.next_unit()) != Status.WAITING:
                    return unit
                if not self._lock.wait(until_s - time.monotonic()):  # other changes are notified, too
                    return Status.WAITING
            return Status.COMPLETE

    def put(self, step: int, unit: int, piece: int, values: np.ndarray) -> None:
        """Takes a piece of a unit that was computed here."""
        sums = self._sums[step]
        sums.put(unit, piece, values)
        self._add_up(step, sums, piece)

    def finish(self, step: int) -> list[int]:
        """Drops all of a step but its totals, which lagging peers need; returns the replicas that finished it."""
        with self._lock:
            self._members.me = self._members.me.changed(step=step + 1)
            self.follow_members()
            finished = self._plans[step].remaining
            self._sums[step].drop_values()
            lagging = [peer.step for peer in self._members.peers if step < peer.first]
            oldest = max(min([step - self._members.delay, *lagging]), step - KEPT_STEPS)
            self._sums = {at: sums for at, sums in self._sums.items() if at >= oldest}
            self._plans = {at: plan for at, plan in self._plans.items() if at > step}
        return finished

    def skip(self, step: int) -> None:
        """Continues from the peers' state after `step` steps, without totals of the steps that are not finished here.

        A peer that has asked for these totals would wait for them indefinitely.
        """
        with self._lock:
            unfinished = [at for at, sums in self._sums.items() if at < step and not sums.is_complete]
            self._skipped = range(min([*unfinished, self._members.step + 1]), step)
            for at in unfinished:
                self._plans.pop(at, None)
                self._sums.pop(at).end(LookupError(_SKIPPED))
            self._lock.notify_all()

    def compute_alone(self) -> None:
        """Continues without peers: the units of all steps under way must be computed here."""
        with self._lock:
            self._behind = None
            self._plans.clear()

    def close(self) -> None:
        """Ends the waiting of all threads."""
        with self._lock:
            for sums in self._sums.values():
                sums.end(ConnectionError(LEAVES))

    # -------------------------------------------------------------------------------------------------------- its plans
    def follow_members(self) -> None:
        """Begins to ask new peers, and divides the units of peers that no longer take part. The lock is held."""
        for peer in self._members.take_met():
            self._begin_asking(peer)
        for step, plan in [*self._plans.items()]:
            others = [number for number in plan.remaining if number != plan.me]
            self._leave_out(step, [number for number in others if not self._members.takes_part(number, step)])

    def leave_to(self, step: int, replicas: Iterable[int]) -> None:
        """Divides the units of a step among this replica and some others."""
        with self._lock:
            if plan := self._plans.get(step):
                self._leave_out(step, {*plan.remaining} - {*replicas})

    def _leave_out(self, step: int, numbers: Iterable[int]) -> None:
        """Divides the units of other replicas of a step among the rest. The lock is held."""
        plan = self._plans.get(step)
        if plan and (lost := {*numbers} & {*plan.remaining} - {plan.me}):
            self._plans[step] = plan.without(lost)
            self._plans[step].follow(self._sums[step])
            self._lock.notify_all()

    def _add_up(self, step: int, sums: StepSums, piece: int) -> None:
        if plan := self._plans.get(step):
            plan.add_up(sums, piece)

    # -------------------------------------------------------------------------------------------------- asking threads
    def _begin_asking(self, peer: Peer) -> None:
        try:
            for kind in ("sum", "total") * CONNECTIONS:  # while one waits, the others use the link
                threading.Thread(target=self.ask, args=(peer, kind), daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._members.lose(peer, error)

    def ask(self, peer: Peer, kind: str) -> None:
        """Asks a peer for one sum (or total) after the other, until the peer is gone."""
        try:
            with self._members.transport.connect(peer.address) as link:
                while (wanted := self._next_request(peer, kind)) is not None:
                    request, sums = wanted
                    try:
                        self._fetch(link, request, sums)
                    finally:
                        with self._lock:
                            self._requested.discard(request)
        except Exception as error:  # else its sums would be waited for indefinitely
            self._members.lose(peer, error)

    def _next_request(self, peer: Peer, kind: str) -> tuple[Request, StepSums] | None:
        """Returns the next request to a peer; waits until one is needed, and returns None when the peer is gone."""
        with self._lock:
            while not self._members.closed and self._members.knows(peer):
                self.follow_members()
                step = self._members.step
                plan, sums = self._plans.get(step), self._sums.get(step)
                if plan and sums and not sums.is_complete:
                    requested = {(r.piece, r.node) for r in self._requested if (r.peer, r.step) == (peer.number, step)}
                    find = plan.sum_to_request if kind == "sum" else plan.total_to_request
                    if wanted := find(peer.number, sums, requested):
                        request = Request(peer.number, step, *wanted)
                        self._requested.add(request)
                        return request, sums
                self._lock.wait()
        return None

    def _fetch(self, link: Link, request: Request, sums: StepSums) -> None:
        """Receives the sum or total of a request. PeerError if the peer does not send it."""
        step, piece, node = request.step, request.piece, request.node
        message: JsonObject = {"op": "total", "step": step, "piece": piece}
        if node:
            message |= {"op": "sum", "lo": node[0], "hi": node[1]}
        size = 4 * self._pieces[piece].size if node and node[1] - node[0] > 1 else self._encoded_sizes[piece]
        try:
            content = link.get_whole(message, size)
        except RefusedError as error:
            if node and TOTAL_IS_HERE in str(error):
                self._fetch(link, request._replace(node=None), sums)
            elif _GONE in str(error) or _SKIPPED in str(error):
                with self._lock:
                    if _GONE in str(error):
                        self._behind = step
                    else:
                        self._leave_out(step, [request.peer])
                    self._lock.notify_all()
                    self._lock.wait_for(lambda: self._members.step != step or self._members.closed)
            else:
                raise
            return
        if node:
            sums.receive(node, piece, content)
            self._add_up(step, sums, piece)
        else:
            sums.put_total(piece, content)

    # ----------------------------------------------------------------------------------------------- answering threads
    def answer(self, request: JsonObject) -> memoryview:
        """Answers `sum` and `total`. LookupError if the step is gone; ValueError for a malformed request."""
        op, step, piece = request["op"], request["step"], request["piece"]
        if type(step) is not int or type(piece) is not int or not 0 <= piece < len(self._pieces):
            raise ValueError("there is no such piece")
        if op == "total":
            content = self._await_step(step).wait_for_total(piece)
        elif op == "sum":
            node = int(request["lo"]), int(request["hi"])
            check_nodes([node], self._num_units)
            content = self._await_step(step).wait_for(node, piece)
        else:
            raise ValueError(f"{op} is no request")
        with self._lock:
            self.sent_bytes += content.nbytes
        return content

    def _await_step(self, step: int) -> StepSums:
        """Returns a step's sums, once it is begun here. LookupError if they are gone, or will never be here."""
        with self._lock:
            members = self._members
            self._lock.wait_for(
                lambda: members.closed or step in self._skipped or step in self._sums or members.step >= step
            )
            if members.closed:
                raise ConnectionError(LEAVES)
            if step in self._skipped:
                raise LookupError(_SKIPPED)
            if step not in self._sums:
                raise LookupError(_GONE)
            return self._sums[step]
