"""`Replicas`: one member's side of the sums of all steps.

Every member computes some shares of a step, and owns some pieces of the parameters. It asks the others for their sums
of its own pieces, and for the totals of the other pieces. It sends as many bytes as in a ring all-reduce. There is no
consensus: every member derives the same assignment of shares. If two differ for a moment, a request makes its receiver
compute a share that it had left to another member, and the values are the same (elastic/replicas/sums.py). So a lost
member costs its shares, not the step.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from elastic.replicas.members import NEVER, Member
from elastic.replicas.membership import AHEAD, ASK_S, MOST_BYTES, NOBODY, Membership, Report
from elastic.replicas.payloads import Payload
from elastic.replicas.plan import StepPlan
from elastic.replicas.state_copies import LEAVES, StateCopies, fetch_copies
from elastic.replicas.sums import COMPLETE, TOTAL_IS_HERE, WAITING, StepSums, check_nodes
from elastic.replicas.transport import Link, Transport
from elastic.replicas.tree import Node
from runtime.blobs import PeerError, RefusedError
from runtime.exit_codes import ResumableError

KEPT_STEPS = 64  # of which totals are kept, at most, for members that catch up
FETCHES = 5  # of the state
CONNECTIONS = 2  # to each of the others, for sums; as many for totals
LOOK_S = 0.02  # between two looks for a share that one of a member's processes needs
_GONE = "the step is gone"
_SKIPPED = "the step was not done here"
_BEHIND = -3  # in place of a share


class BehindError(ResumableError):
    """The others no longer have the totals of this member's next step: it needs their state."""


class Replicas:
    """This member, and its sums with the others. Close it, so that they notice at once."""

    def __init__(
        self,
        *,
        number: int,
        folder: Path,
        transport: Transport,
        num_shares: int,
        payloads: Sequence[Payload],
        sizes: Sequence[int],
        late: int = 0,
        run: str = "",
        process: int = 0,
        agree: Callable[[int], Sequence[int]] = lambda value: [value],
        saved: Callable[[], int] = lambda: 0,
        progress: Callable[[], object] = lambda: None,
        waits: Callable[[], object] = lambda: None,
        say: Callable[[str], object] = print,
        report: Report = lambda event, **fields: None,
    ) -> None:
        """`sizes` are the values of each piece; `folder` has one folder for each member, and `run` is equal in all.

        `late`: 1 if the shares of a step are computed before the step in front of it is summed, else 0.

        In a member of several processes each process owns a shard of the gradients and talks to the same-numbered
        process of the other members. `agree` returns the values of all of them, by number; they call all methods
        together.

        `saved` returns the steps done in the newest checkpoint. While this member waits for the others' sums, all its
        processes call `waits` together; while it waits for another answer, each calls `progress` by itself. An error
        of either ends the wait. `report` gets the members that join, leave and are lost.
        """
        self._num_shares, self._payloads, self._sizes = num_shares, payloads, sizes
        zeros = (np.zeros(size, np.float32) for size in sizes)
        self._encoded_sizes = [len(payload.encode(x)) for payload, x in zip(payloads, zeros, strict=True)]
        self._progress, self._waits = progress, waits
        self._agree, self._saved, self._say = agree, saved, say
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._late = late
        self._steps: dict[int, StepSums] = {}
        self._plans: dict[int, StepPlan] = {}  # of the steps that are begun, and not summed
        self._under_way: set[tuple[int, int, int, Node | None]] = set()  # member, step, piece, node that were asked for
        self._skipped = range(0)  # steps that this member did not end: it has the others' state after them
        self._behind: int | None = None  # the step of which the others no longer have the totals
        self._has_fetched = False  # a state, since this member took part
        self._fetched = -1  # the step of the others' state that this member takes, after which it has hashes
        self._digests: dict[int, str] = {}  # of the last step that was compared
        self.copies = StateCopies(self._changed)
        self.count = 1  # members that took part in the last step to its end
        self.is_first = True  # it saves the checkpoint, which would be the same in all
        self.sent_bytes = 0  # sums and totals for other members
        self._is_ready = threading.Event()  # the service answers then
        self._transport = transport
        self._service = transport.serve(self._answer)
        address = self._service.address
        self.members = Membership(
            Member(number=number, host=address.host, port=address.port, run=run),
            folder=folder,
            transport=transport,
            process=process,
            late=late,
            changed=self._changed,
            agree=agree,
            say=say,
            report=report,
            on_met=self._ask_always,
            on_change=self._do_without,
        )
        self._is_ready.set()
        try:
            self.members.publish()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all connections; more than once is allowed."""
        with self._changed:
            if self.members.closed:
                return
            self.members.closed = True
            self.copies.close()
            for sums in self._steps.values():
                sums.end(ConnectionError(LEAVES))
            self._changed.notify_all()
        self._service.close()
        self.members.withdraw()

    # ------------------------------------------------------------------------------------------------------ their state
    def agrees(self, step: int, digest: str) -> bool:
        """Whether this member's parameters after `step` steps, by their hash, equal the parameters of most members.

        Names the members that differ. With as many members on both sides the one with the lowest number is right. False
        in all processes of a member whose parameters differ in one of them. The lowest of the others is now the first.
        """
        with self._changed:
            self._digests = {step: digest}
            self._changed.notify_all()
        said = {self.members.me.number: digest}
        for member in [one for one in self.members.others if one.takes_part(step)]:  # one may end once all have asked
            with contextlib.suppress(PeerError):  # lost, or elsewhere: it will be noticed where it matters
                said[member.number] = self._ask(member, {"op": "digest", "step": step}).decode(errors="replace")
        found = [said[number] for number in sorted(said)]
        right = max(found, key=lambda one: (found.count(one), -found.index(one)))
        for number, one in said.items():
            if one != right and number != self.members.me.number:
                self._say(f"replica {number} has other parameters after step {step}: it takes those of the others")
        first = min(number for number, one in said.items() if one == right)
        self.is_first = any(self._agree(int(first == self.members.me.number)))
        return all(self._agree(int(digest == right)))

    def _ask(self, member: Member, request: dict[str, Any]) -> bytes:
        """Returns a member's answer, however long it makes progress on it. PeerError if it does not answer."""
        with self._transport.connect(member.address) as link:
            return link.ask(request, MOST_BYTES, self._progress)

    def fetch_state(
        self, sizes: Sequence[int], progress: Callable[[], object] = lambda: None
    ) -> tuple[int, list[memoryview]] | None:
        """Returns a step soon to come and the state after it: of arrays of `sizes` bytes each their bytes.

        `progress` is called now and then, in several threads; an error of it ends this.

        All others send a part each, at the same time. ResumableError if they do not. None if no other member is there
        any more, which it waits for if all of them leave: its own state is as right as theirs was a few steps ago. If
        it has fetched a state before and did not catch up, the others wait for it at that step.
        """
        tries, takes_part, self._has_fetched = 1, self._has_fetched, True
        while tries <= FETCHES:
            self.members.tell(first=NEVER, begun=False)
            if (newest := self.members.newest_step()) == NOBODY:
                with self._changed:
                    self._behind = None
                    self._plans.clear()  # what is under way is to be computed here
                return None
            step = newest + AHEAD * tries
            self._fetched = step
            self.members.tell(step=step, first=step if takes_part else NEVER)  # from which on they keep the totals
            begun = [member.address for member in self.members.others if member.trains and member.last >= step]
            if not any(self._agree(len(begun))):
                progress()  # they save a checkpoint, which may take minutes
                with self._changed:
                    if self._changed.wait_for(lambda: self.members.closed, ASK_S):
                        raise ConnectionError(LEAVES)
                continue
            found, why = {}, "another process of this replica did not get its part" if begun else "none has it"
            try:
                found = fetch_copies(self._transport.connect, begun, step, sizes, progress) if begun else {}
            except PeerError as error:  # lost meanwhile, or further than it was thought
                why = str(error)
            if all(self._agree(int(len(found) == len(sizes)))):
                self._skip(step)
                self.members.look(step, first=True)  # the steps in between say nothing of its speed
                return step, [found[number] for number in range(len(sizes))]
            self._say(f"the others' state did not come ({why}): try {tries} of {FETCHES}")
            tries += 1
        raise ResumableError("the other replicas do not send the state that this one needs")

    def _skip(self, step: int) -> None:
        """Continues from the others' state after `step` steps, without totals of the steps that it did not finish.

        A member that has asked for these totals would wait for them indefinitely.
        """
        with self._changed:
            undone = [old for old, sums in self._steps.items() if old < step and not sums.is_complete]
            self._skipped = range(min([*undone, self.members.step + 1]), step)
            for old in undone:
                self._plans.pop(old, None)
                self._steps.pop(old).end(LookupError(_SKIPPED))
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- the steps
    def compute(self, step: int, compute: Callable[[int], None]) -> None:
        """Computes this member's shares of a step, which is summed later, while the one before it is summed."""
        sums = self._begin(step)
        while (share := self._next_share(sums, 0)) >= 0:
            sums.begin(share)
            compute(share)

    def sum(self, step: int, compute: Callable[[int], None]) -> np.ndarray:
        """Returns the totals of all pieces of a step, `f32 [N]`, one after the other.

        `compute(share)` computes a share, and puts its pieces. It is called for this member's shares, for the shares of
        lost members, and for shares that another member asks for. A member that does not take part yet receives the
        totals. BehindError if the others no longer have them.
        """
        sums = self._begin(step)
        with self._changed:
            self.members.step, self.members.me = step, self.members.me.changed(step=step)
            self._changed.notify_all()
        while (share := self._next_share(sums, LOOK_S)) != COMPLETE:
            if share == WAITING:
                self._waits()
            else:
                sums.begin(share)
                compute(share)
        with self._changed:
            self.members.me = self.members.me.changed(step=step + 1)
            left = self._plans[step].left
            self._forget(step)
        self.count, self.is_first = len(left), bool(self._agree(int(left[0] == self.members.me.number))[0])
        return sums.totals()

    def put(self, step: int, share: int, piece: int, values: np.ndarray) -> None:
        """Takes a piece of a share that was computed here."""
        sums = self._steps[step]
        sums.put(share, piece, values)
        self._add_up(step, sums, piece)

    def _begin(self, step: int) -> StepSums:
        """Divides a step among the known members, unless it is under way; returns its sums.

        A member that was about to enter later does so now if all others have left before: it has all their totals.
        BehindError for a step that no known member did: they entered later, or took their state from others.
        ResumableError if this member was behind, is alone now, and a newer checkpoint is there.
        """
        if step in self._plans:
            return self._steps[step]
        if self.members.me.first == NEVER:
            self.members.choose_entry(step)
        if not self.members.me.begun:
            if self.members.is_alone():
                if max(self._agree(self._saved())) > step:
                    raise ResumableError(
                        "nobody else trains any more, and the newest checkpoint is newer than the state here: run the "
                        "same command again, which goes on from it"
                    )
            elif self.members.all_leave_before(step):
                self.members.enter(step)
            elif not any(self._agree(int(any(m.takes_part(step) for m in (self.members.me, *self.members.others))))):
                raise BehindError(f"the other replicas were not there in step {step}")
        with self._changed:
            me = self.members.me
            self.members.step, self.members.me = step - self._late, me.changed(begun=me.takes_part(step))
            self._has_fetched &= not me.takes_part(step)
            rates = {m.number: m.rate for m in (me, *self.members.others) if m.takes_part(step)}
            plan = StepPlan(me=me.number, num_shares=self._num_shares, num_pieces=len(self._sizes), rates=rates)
            sums = self._steps.get(step) or StepSums(
                self._num_shares, self._payloads, self._sizes, self._lock, self._changed
            )
            self._steps[step], self._plans[step] = sums, plan
            plan.follow(sums)
            self._changed.notify_all()
        return sums

    def _next_share(self, sums: StepSums, wait_s: float) -> int:
        """Returns a share that one of this member's processes needs, WAITING or COMPLETE; the same in all of them."""
        try:
            found = sums.look(self._check, wait_s)
        except BehindError:
            found = _BEHIND
        said = self._agree(found)
        if _BEHIND in said:
            raise BehindError(f"the other replicas no longer have the totals of step {self.members.step}")
        wanted = [share for share in said if share >= 0]
        return min(wanted) if wanted else max(said)

    def _check(self) -> None:
        if self.members.closed:
            raise ConnectionError(LEAVES)
        if other := self.members.successor:
            raise ResumableError(f"replica {self.members.me.number} was started again at {other.host}:{other.port}")
        if self._behind == self.members.step:
            raise BehindError

    def _forget(self, step: int) -> None:
        """Drops all but the last totals, and the ones by which other members catch up."""
        self._steps[step].drop_values()
        catching_up = [m.step for m in self.members.others if step < m.first]
        oldest = max(min([step - self._late, *catching_up]), step - KEPT_STEPS)
        for old in [old for old in self._steps if old < oldest]:
            del self._steps[old]
        for old in [old for old in self._plans if old <= step]:
            del self._plans[old]

    # -------------------------------------------------------------------------------------------------- asking others
    def _ask_always(self, member: Member) -> None:
        """Asks a member for sums and totals, until one of the two is gone."""
        try:
            for kind in ("sum", "total") * CONNECTIONS:  # while one waits, the others use the link
                threading.Thread(target=self._pull, args=(member, kind), daemon=True).start()
        except RuntimeError as error:  # no more threads
            self.members.lose(member, error)

    def _do_without(self, number: int) -> None:
        """Divides a member's shares of the steps in which it no longer takes part, and drops copies for a lost one."""
        if number not in (member.number for member in self.members.others):
            self.copies.drop(number)
        for step in self._plans:
            if not self.members.takes_part(number, step):
                self._leave_out(number, step)

    def _leave_out(self, number: int, step: int) -> None:
        """Divides another member's shares of a step among the rest."""
        plan = self._plans.get(step)
        if plan and number in plan.left and number != plan.me:
            self._plans[step] = plan.without([number])
            self._plans[step].follow(self._steps[step])
            self._changed.notify_all()

    def _add_up(self, step: int, sums: StepSums, piece: int) -> None:
        if plan := self._plans.get(step):
            plan.add_up(sums, piece)

    def _pull(self, member: Member, kind: str) -> None:
        """Asks a member for one thing after the other, as long as it is there."""
        try:
            with self._transport.connect(member.address) as link:
                while (wanted := self._next(member, kind)) is not None:
                    step, sums, piece, node = wanted
                    try:
                        self._fetch(link, member.number, step, sums, piece, node)
                    finally:
                        with self._lock:
                            self._under_way.discard((member.number, step, piece, node))
        except Exception as error:  # else its sums would be waited for indefinitely
            self.members.lose(member, error)

    def _next(self, member: Member, kind: str) -> tuple[int, StepSums, int, Node | None] | None:
        """Returns the next request to a member; waits until one is needed, and returns None when the member is gone."""
        with self._changed:
            while not self.members.closed and self.members.knows(member):
                step = self.members.step
                plan, sums = self._plans.get(step), self._steps.get(step)
                if plan and sums and not sums.is_complete:
                    ask = plan.sum_to_ask if kind == "sum" else plan.total_to_ask
                    busy = {each[2:] for each in self._under_way if each[:2] == (member.number, step)}
                    if found := ask(member.number, sums, busy):
                        piece, node = found
                        self._under_way.add((member.number, step, piece, node))
                        return step, sums, piece, node
                self._changed.wait()
        return None

    def _fetch(self, link: Link, number: int, step: int, sums: StepSums, piece: int, node: Node | None) -> None:
        """Gets a sum, or with `node` None the total. PeerError if the member does not give it."""
        request = {"op": "total", "step": step, "piece": piece}
        if node:
            request |= {"op": "sum", "lo": node[0], "hi": node[1]}
        size = 4 * self._sizes[piece] if node and node[1] - node[0] > 1 else self._encoded_sizes[piece]
        try:
            content = link.get_whole(request, size)
        except RefusedError as error:
            if node and TOTAL_IS_HERE in str(error):
                self._fetch(link, number, step, sums, piece, None)
            elif _GONE in str(error) or _SKIPPED in str(error):
                with self._changed:
                    if _GONE in str(error):
                        self._behind = step
                    else:
                        self._leave_out(number, step)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self.members.step != step or self.members.closed)
            else:
                raise
            return
        if node:
            sums.take(node, piece, content)
            self._add_up(step, sums, piece)
        else:
            sums.put_total(piece, content)

    # ------------------------------------------------------------------------------------------------ answering others
    def _answer(self, request: dict[str, Any], process: int, stream: BinaryIO) -> memoryview:
        """Answers a request. LookupError if there is no such thing; ValueError closes the connection."""
        del stream
        self._is_ready.wait()
        if self.members.closed:
            raise ConnectionError(LEAVES)
        op = request["op"]
        if op in ("member", "self"):
            return self.members.answer(request, process)
        if op in ("copy", "state"):
            return self.copies.answer(request, process)
        if op == "digest":
            step, here = request["step"], self.members
            with self._changed:
                passed = lambda: here.step >= step or max(self._digests, default=-1) > step
                # it leaves, or takes the others' state: a member that asks for a hash does not send that meanwhile
                never = lambda: here.closed or not here.me.takes_part(step) or step <= self._fetched
                self._changed.wait_for(lambda: step in self._digests or passed() or never())
                return memoryview(self._digests[step].encode())
        step, piece = request["step"], request["piece"]
        if type(step) is not int or type(piece) is not int or not 0 <= piece < len(self._sizes):
            raise ValueError("there is no such piece")
        if op == "total":
            content = self._await(step).wait_for_total(piece)
        elif op == "sum":
            node = int(request["lo"]), int(request["hi"])
            check_nodes([node], self._num_shares)
            content = self._await(step).wait_for(node, piece)
        else:
            raise ValueError(f"{op} is no request")
        with self._changed:
            self.sent_bytes += content.nbytes
        return content

    def _await(self, step: int) -> StepSums:
        """Returns a step's sums, once it is begun here. LookupError if they are gone, or it never will be."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.members.closed or step in self._skipped or step in self._steps or self.members.step >= step
            )
            if self.members.closed:
                raise ConnectionError(LEAVES)
            if step in self._skipped:
                raise LookupError(_SKIPPED)
            if step not in self._steps:
                raise LookupError(_GONE)
            return self._steps[step]
