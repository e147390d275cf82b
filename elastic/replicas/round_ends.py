"""`RoundEnds`: when a round of asynchronous local SGD ends, and how many steps each worker has done by then.

    arrive    a replica whose workers have done all inner steps tells the replica with the lowest number
    quorum    once `quorum` workers have arrived, the others have `grace_s` more seconds
    promise   then each other replica answers with the steps that its workers have begun, and stops after them
    record    the steps of all workers are written to the run's record, and sent to all replicas that arrive

No delta is late, because a round takes the steps that a worker has done; a replica that does not answer has done none.
Quorum and grace window: Decoupled DiLoCo (arXiv 2604.21428), where a slow learner hands in all steps to a later round.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from math import inf

from configs.schema import LocalSGDConfig
from elastic.replicas.membership import ASK_S, Membership
from elastic.replicas.peers import CONNECT_S, MOST_BYTES, Peer
from elastic.replicas.round_record import Round, RoundRecord
from elastic.replicas.state_copies import LEAVES
from runtime.blobs import PeerError
from runtime.exit_codes import ResumableError
from runtime.files import json_objects
from runtime.files.json_objects import JsonObject
from runtime.files.run_directory import ROUNDS

WorkerSteps = Mapping[int, int]  # each worker's steps in a round
LOOK_S = 1.0  # another replica may end a round too, after a lost connection: its line is read after this time


class RoundEnds:
    """The ends of rounds, for the training thread of a replica and for its threads that answer peers."""

    def __init__(self, config: LocalSGDConfig, record: RoundRecord, members: Membership) -> None:
        self._config, self._record, self._members, self._lock = config, record, members, members.lock
        self._number, self._begun = -1, dict[int, int]()  # the round here, and the steps that its workers have begun
        self._told: dict[int, int] | None = None  # these steps, when this replica arrived last
        self._promised = -1  # the last round whose workers may begin no more steps here
        self._arrived: dict[int, dict[int, WorkerSteps]] = {}  # by round and replica
        self._quorum_s: dict[int, float] = {}  # when a round had its quorum
        self._ending: set[int] = set()
        self._error: Exception | None = None

    # ------------------------------------------------------------------------------------------- by the training thread
    def begin(self, number: int) -> Round | None:
        """Begins a round; returns how it ended if it is recorded: its steps must be done again.

        ResumableError if the record cannot be read; ValueError for a record of another run.
        """
        with self._lock:
            self._number, self._begun, self._told = number, {}, None
            self._arrived = {each: steps for each, steps in self._arrived.items() if each >= number}
        try:
            return self._find(number)
        except OSError as error:
            raise ResumableError(f"cannot read the record of rounds: {error}") from error

    def steps(self, worker: int) -> Iterator[int]:
        """Yields the number of each inner step that a worker of this round does, until the round ends."""
        for step in range(self._config.inner_steps):
            with self._lock:
                if self._promised >= self._number or self._number in self._record.rounds:
                    return
                self._begun[worker] = step + 1
            yield step

    def arrive(self) -> None:
        """Tells the first replica the steps that this replica's workers have done, unless it knows them."""
        with self._lock:
            if self._told != self._begun and self._members.me.takes_part(self._number):
                self._told = {**self._begun}
                threading.Thread(target=self._arrive, args=(self._number, self._told), daemon=True).start()

    def ended(self) -> Round | None:
        """Returns how this round ended; None if it has not. ResumableError if a round cannot be recorded."""
        with self._lock:
            if self._error:
                raise ResumableError(f"cannot record a round: {self._error}") from self._error
            return self._record.rounds.get(self._number)

    # ------------------------------------------------------------------------------------------------- arriving threads
    def _arrive(self, number: int, steps: WorkerSteps) -> None:
        """Tells the first replica these steps, and waits for the end of the round."""
        rounds = self._record.rounds
        while not (self._members.closed or self._error or number in rounds or self._number != number):
            try:
                first = min(self._taking_part(number), key=lambda peer: peer.number)
                if first.number == self._members.me.number:
                    self._end_of(number, first.number, steps)
                    return
                with self._members.transport.connect(first.address) as link:
                    request = {"op": "arrive", "step": number, "steps": [*steps.items()]}
                    answer = json_objects.parse(link.ask(request, MOST_BYTES), "the end of a round")
                with self._lock:
                    rounds.setdefault(number, Round(**answer))
                    self._lock.notify_all()
            except (OSError, ValueError, TypeError):  # the first replica is lost or leaves, or a lost one came back
                with self._lock:
                    self._lock.wait_for(lambda: self._members.closed, ASK_S)

    def _taking_part(self, number: int) -> list[Peer]:
        """Returns the replicas that take part in a round, by their records."""
        return [peer for peer in (self._members.me, *self._members.peers) if peer.takes_part(number)]

    # ------------------------------------------------------------------------------------------------ answering threads
    def answer(self, request: JsonObject, process: int) -> memoryview:
        """Answers `arrive` with the end of a round, once it ends, and `promise` with the steps of workers here."""
        number = request["step"]
        if request["op"] == "promise":
            return memoryview(json.dumps([*self._promise(number).items()]).encode())
        ended = self._end_of(number, process, {int(worker): int(count) for worker, count in request["steps"]})
        return memoryview(json.dumps(asdict(ended)).encode())

    def _promise(self, number: int) -> WorkerSteps:
        """Returns the steps that the workers here have begun, after which they stop. LookupError before they begin."""
        with self._lock:
            self._promised = max(self._promised, number)
            if number != self._number:
                raise LookupError("the round is not begun here")
            return {**self._begun}

    def _end_of(self, number: int, replica: int, steps: WorkerSteps) -> Round:
        """Returns how a round ends in which a replica has arrived."""
        try:
            return self._find(number) or self._wait_for_end(number, replica, steps) or self._end(number)
        except PeerError:
            raise
        except (OSError, ValueError) as error:  # from the record
            self._error = error
            raise

    def _find(self, number: int) -> Round | None:
        with self._lock:
            known, most = self._record.find(number), self._config.inner_steps
        if known and max(known.steps) > most:
            raise ValueError(
                f"{ROUNDS} has a round of {max(known.steps)} steps, more than local_sgd.inner_steps={most}; set the "
                "value of the recorded run"
            )
        return known

    def _wait_for_end(self, number: int, replica: int, steps: WorkerSteps) -> Round | None:
        """Returns how a round has ended; None in the waiting thread that must end it."""
        with self._lock:
            known = self._arrived.setdefault(number, {})
            known[replica] = max(known.get(replica, {}), steps, key=lambda each: sum(each.values()))  # the newest
            self._lock.notify_all()
            while not (recorded := self._record.find(number)):
                if self._members.closed:
                    raise PeerError(LEAVES)
                me = self._members.me.number
                if replica == me and any(peer.number < me for peer in self._taking_part(number)):
                    raise PeerError("another replica ends the round")
                wait_s = inf if number in self._ending else self._remaining_s(number)
                if wait_s <= 0:
                    self._ending.add(number)
                    return None
                self._lock.wait(min(wait_s, LOOK_S))
            self._lock.notify_all()
            return recorded

    def _remaining_s(self, number: int) -> float:
        """Returns the seconds until a round ends: until all workers have arrived, or the grace window is over."""
        config, arrived = self._config, self._arrived[number].values()
        complete = {worker for steps in arrived for worker, count in steps.items() if count == config.inner_steps}
        if len(complete) == self._record.num_workers:
            return 0.0
        if len(complete) < config.quorum:
            return inf
        return self._quorum_s.setdefault(number, time.monotonic()) + config.grace_s - time.monotonic()

    def _end(self, number: int) -> Round:
        """Ends a round and records it."""
        with self._lock:
            by_replica = {**self._arrived[number]}
            asked = [peer for peer in self._taking_part(number) if peer.number not in by_replica]
        with ThreadPoolExecutor(len(asked) or 1) as pool:
            answers = pool.map(lambda peer: self._ask_promise(peer, number), asked)
            by_replica |= {peer.number: steps for peer, steps in zip(asked, answers, strict=True) if steps is not None}
        done = [0] * self._record.num_workers
        for steps in by_replica.values():
            for worker, count in steps.items():
                done[worker] = max(done[worker], count)
        with self._lock:
            ended = self._record.add(number, Round(replicas=sorted(by_replica), steps=done))
            self._lock.notify_all()
        return ended

    def _ask_promise(self, peer: Peer, number: int) -> WorkerSteps | None:
        """Returns the steps that a replica promises; None if it has not begun, or does not answer in time."""
        try:
            if peer.number == self._members.me.number:
                return self._promise(number)
            with self._members.transport.connect(peer.address, CONNECT_S) as link:
                content = link.ask({"op": "promise", "step": number}, MOST_BYTES)
            return {int(worker): int(count) for worker, count in json.loads(content)}
        except (PeerError, LookupError, ValueError, TypeError):
            return None
