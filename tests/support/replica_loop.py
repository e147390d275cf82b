"""Independent replicas in threads over loopback; each checks the totals of every step."""

import threading
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from elastic.replicas.driver import BehindError, Replicas, Step
from elastic.replicas.membership import Log
from elastic.replicas.payloads import LOSSLESS, Payload
from elastic.replicas.sums import Piece, Status, added
from elastic.replicas.transport import Sockets

TOKEN = "a" * 64
NUM_UNITS, SIZES, STEPS = 6, [40, 40, 17, 3], 4
STATE_BYTES = [8, 800, 16, 80]
PATIENCE_S = 60.0


def gradients(step: int, unit: int, piece: int) -> np.ndarray:
    return np.random.default_rng((step, unit, piece)).standard_normal(SIZES[piece]).astype(np.float32)


def pieces_of(codec: str) -> list[Piece]:
    payloads = [Payload(codec=codec, block=16)] * (len(SIZES) - 1) + [LOSSLESS]
    return [*map(Piece, SIZES, payloads)]


def compute(step: Step, number: int, unit: int) -> None:
    """Computes a unit, and puts its pieces."""
    for piece in range(len(SIZES)):
        step.put(unit, piece, gradients(number, unit, piece))


def totals(step: int, codec: str = "none") -> bytes:
    """Returns the totals of one replica alone."""
    found = []
    for piece, (_, payload) in enumerate(pieces_of(codec)):

        def sent(values: np.ndarray, payload: Payload = payload) -> np.ndarray:
            return payload.decode(payload.encode(values), values.size)

        leaves = {(i, i + 1): sent(gradients(step, i, piece)) for i in range(NUM_UNITS)}
        total = added((0, NUM_UNITS), leaves.get, np.add)
        assert total is not None
        found.append(sent(total).tobytes())
    return b"".join(found)


def state_of(step: int) -> list[np.ndarray]:
    return [np.full(size // 8, step, np.int64) for size in STATE_BYTES]


def summed(
    replicas: Replicas, number: int, compute: Callable[[Step, int], object], waits: Callable[[], object] = lambda: None
) -> np.ndarray:
    """Returns the totals of a step; `waits` is called while the peers' sums are awaited."""
    step = replicas.step(number)
    for unit in step.units():
        if unit is Status.WAITING:
            waits()
        else:
            compute(step, unit)
    return step.totals()


def check_step(replicas: Replicas, number: int, codec: str = "none") -> None:
    """Does a step, and checks its totals."""
    found = summed(replicas, number, lambda step, unit: compute(step, number, unit))
    assert found.tobytes() == totals(number, codec), number


class Gone(Exception):
    """A replica that ends in the middle of a step."""


class Recorded(Log):
    """Keeps all that is reported."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def write(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


class Loop:
    """A replica that trains, in a separate thread."""

    def __init__(
        self,
        folder: Path,
        number: int,
        codec: str = "none",
        steps: int = STEPS,
        silence_s: float = 30.0,
        delay: int = 0,
        stall_s: float = inf,
        **processes: Any,
    ) -> None:
        """`processes`: `process` and `agree` if the replica has several processes, and `progress`."""
        self.number, self.codec, self.steps, self.delay = number, codec, steps, delay
        self.computed: dict[int, list[int]] = {}
        self.fetched: list[int] = []
        self.before_unit: Callable[[int, int], object] = lambda step, unit: None  # may raise Gone
        self.before_step: Callable[[int], object] = lambda step: None
        self.log = Recorded()
        self.blocks: list[None] = []  # each call while it waits for a peer's hash or state
        self.error: BaseException | None = None
        self.replicas = Replicas(
            folder=folder,
            transport=Sockets(
                number=number,
                token=TOKEN,
                silence_s=silence_s,
                stall_s=stall_s,
                process=processes.pop("process", 0),
            ),
            num_units=NUM_UNITS,
            pieces=pieces_of(codec),
            delay=delay,
            log=self.log,
            **{"progress": lambda: self.blocks.append(None)} | processes,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, *, joins: bool = False) -> "Loop":
        """Meets its peers, and begins; `joins`: they have begun."""
        assert self.replicas.members.meet(0) == joins
        if not joins:
            self.replicas.members.enter(0)
        return self

    def note_copies(self, asked: set[int], name: int) -> None:
        """Adds a name to `asked` when a peer asks this replica for its state."""
        answer = self.replicas.copies.answer
        self.replicas.copies.answer = lambda request, member: asked.add(name) or answer(request, member)

    def go(self) -> "Loop":
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self._train()
        except Gone:
            self.replicas.close()
        except BaseException as error:
            self.error = error
            self.replicas.close()

    def _train(self) -> None:
        step = first = 0
        while step < self.steps:
            self.before_step(step)
            self.replicas.copies.at_step(step, state_of(step))
            try:
                if self.delay:
                    begun = self.replicas.step(step)
                    for unit in begun.units_without_waiting():
                        self._compute(begun, step, unit)
                if step - self.delay >= first:
                    self._sum(step - self.delay)
            except BehindError:
                fetched = self.replicas.fetch_state(STATE_BYTES)
                assert fetched
                step, arrays = fetched
                first = step
                assert arrays == [array.tobytes() for array in state_of(step)]
                self.fetched.append(step)
                continue
            step += 1
        if self.delay:
            self._sum(step - 1)
        self.replicas.members.leave(step)
        self.replicas.close()

    def _sum(self, number: int) -> None:
        found = summed(self.replicas, number, lambda step, unit: self._compute(step, number, unit))
        assert found.tobytes() == totals(number, self.codec), (self.number, number)

    def _compute(self, step: Step, number: int, unit: int) -> None:
        self.before_unit(number, unit)
        self.computed.setdefault(number, []).append(unit)
        compute(step, number, unit)

    def end(self) -> None:
        """Waits for the end, and raises the error that ended it, if any."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"replica {self.number} hangs in step {self.replicas.members.me.step}"
        if self.error:
            raise self.error


def started(folder: Path, count: int, codec: str = "none", steps: int = STEPS, delay: int = 0) -> list[Loop]:
    """Returns replicas that have met, before their first step."""
    return [Loop(folder, number, codec, steps, delay=delay).start() for number in range(count)]


def trained(loops: list[Loop]) -> None:
    for loop in loops:
        loop.go()
    for loop in loops:
        loop.end()
