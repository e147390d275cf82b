"""Members of a run with independent replicas, in threads over loopback; each checks the totals of every step."""

import threading
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from elastic.replicas.group import BehindError, Replicas
from elastic.replicas.payloads import Float32, Payload, make_payload
from elastic.replicas.transport import Sockets
from elastic.replicas.tree import added

TOKEN = "a" * 64
NUM_SHARES, SIZES, STEPS = 6, [40, 40, 17, 3], 4
STATE_BYTES = [8, 800, 16, 80]
PATIENCE_S = 60.0


def gradients(step: int, share: int, piece: int) -> np.ndarray:
    return np.random.default_rng((step, share, piece)).standard_normal(SIZES[piece]).astype(np.float32)


def payloads_of(codec: str) -> list[Payload]:
    return [make_payload(codec, 16)] * (len(SIZES) - 1) + [Float32()]


def totals(step: int, codec: str = "none") -> bytes:
    """Returns what a member alone would have."""
    found = []
    for piece, payload in enumerate(payloads_of(codec)):

        def sent(values: np.ndarray, payload: Payload = payload) -> np.ndarray:
            return payload.decode(payload.encode(values), values.size)

        leaves = {(i, i + 1): sent(gradients(step, i, piece)) for i in range(NUM_SHARES)}
        total = added((0, NUM_SHARES), leaves.get, np.add)
        assert total is not None
        found.append(sent(total).tobytes())
    return b"".join(found)


def state_of(step: int) -> list[np.ndarray]:
    return [np.full(size // 8, step, np.int64) for size in STATE_BYTES]


class Gone(Exception):
    """A member that ends in the middle of a step."""


class Loop:
    """A member that trains, in a thread of its own."""

    def __init__(
        self,
        folder: Path,
        number: int,
        codec: str = "none",
        steps: int = STEPS,
        silence_s: float = 30.0,
        late: int = 0,
        stall_s: float = inf,
        **processes: Any,
    ) -> None:
        """`processes`: `process` and `agree` of one of a member's several processes."""
        self.number, self.codec, self.steps, self.late = number, codec, steps, late
        self.computed: dict[int, list[int]] = {}
        self.fetched: list[int] = []
        self.before_share: Callable[[int, int], object] = lambda step, share: None  # may raise Gone
        self.before_step: Callable[[int], object] = lambda step: None
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.blocks: list[None] = []  # of the others' state
        self.error: BaseException | None = None
        self.replicas = Replicas(
            number=number,
            folder=folder,
            transport=Sockets(
                number=number,
                token=TOKEN,
                silence_s=silence_s,
                stall_s=stall_s,
                process=processes.get("process", 0),
            ),
            num_shares=NUM_SHARES,
            payloads=payloads_of(codec),
            sizes=SIZES,
            late=late,
            say=self.said.append,
            report=lambda event, **about: self.events.append((event, about)),
            **processes,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, *, joins: bool = False) -> "Loop":
        """Meets the others, and begins; `joins`: the others have begun."""
        assert self.replicas.members.meet(0) == joins
        if not joins:
            self.replicas.members.enter(0)
        return self

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
                if self.late:
                    self.replicas.compute(step, partial(self._compute, step))
                if step - self.late >= first:
                    self._sum(step - self.late)
            except BehindError:
                fetched = self.replicas.fetch_state(STATE_BYTES, lambda: self.blocks.append(None))
                assert fetched
                step, arrays = fetched
                first = step
                assert arrays == [array.tobytes() for array in state_of(step)]
                self.fetched.append(step)
                continue
            step += 1
        if self.late:
            self._sum(step - 1)
        self.replicas.members.leave(step)
        self.replicas.close()

    def _sum(self, step: int) -> None:
        found = self.replicas.sum(step, partial(self._compute, step))
        assert found.tobytes() == totals(step, self.codec), (self.number, step)

    def _compute(self, step: int, share: int) -> None:
        self.before_share(step, share)
        self.computed.setdefault(step, []).append(share)
        for piece in range(len(SIZES)):
            self.replicas.put(step, share, piece, gradients(step, share, piece))

    def end(self) -> None:
        """Waits for the end, and raises what it ended by."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"replica {self.number} hangs in step {self.replicas.members.me.step}"
        if self.error:
            raise self.error


def started(folder: Path, count: int, codec: str = "none", steps: int = STEPS, late: int = 0) -> list[Loop]:
    """Returns members that have met, in front of their first step."""
    return [Loop(folder, number, codec, steps, late=late).start() for number in range(count)]


def trained(loops: list[Loop]) -> None:
    for loop in loops:
        loop.go()
    for loop in loops:
        loop.end()
