"""Steps of a replica that is a world of its own (`sharding.replicas=independent`): one of those that come and go."""

import hashlib
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from configs.schema import Config
from files.run_directory import REPLICAS as FOLDER
from input_pipeline import Dataset
from input_pipeline.batches import Batch, batch_at
from replicas.group import BehindError, Replicas
from replicas.payloads import Float32, make_payload
from runtime.handshake import shared_token
from runtime.phases import Phase
from sharding.gradients import accumulated
from sharding.shares import FlatGradients, HandOut, build_share, build_update, gradient_shapes
from sharding.step import TrainState
from sharding.trees import GradsR, Params
from training.experiment import Experiment
from training.replica_state import by_waiting, digest_of, own_shards, waiting_in, with_shards, with_waiting

PIECES = 64  # at least, if they are not too small; fixed sizes: bits must not depend on the number of replicas
LEAST, MOST = 1 << 14, 1 << 20  # values of a piece
SECTIONS = ("model", "data", "batch", "mesh", "sharding", "compression", "local_sgd", "optimizer")
COMPARED_EVERY = 100  # steps: replicas compare their parameters
RATE_STEP, RATE_MEMORY = 1.3, 0.8
UNKNOWN = np.float32("nan")  # a mean


class Handed(NamedTuple):
    """What a share's backward pass has handed out of one layer, on one device."""

    share: "Share"
    name: str
    device: Any
    layer: Any
    leaves: Any


class Share:
    """A share that is being computed: its gradients, as they come."""

    def __init__(self, step: int, number: int, size: int, pieces: int, handings: int) -> None:
        """`handings` are the layers, of each device, that are handed out."""
        self.step, self.number = step, number
        self.left, self.is_whole = handings, threading.Event()
        self.flat = np.empty(size, np.float32)
        self.filled = [0] * pieces


@dataclass
class Late:
    """A step whose gradients are under way while the next one computes."""

    step: int
    grads_R: GradsR = None  # the mean `[1, ...]`, once it is here
    means: dict[str, np.float32] = field(default_factory=dict)


class Independent:
    """The programs of a replica, and their sums with the others'. Close it when the run ends.

    With `compression.delayed` a step's gradients travel beside the compute of the next one. Between two steps they are
    not here: in their place the state has the parameters by which they are computed, as long as they are under way
    (`_whole`), so what a lost replica owed of them can be computed again.
    """

    def __init__(self, ex: Experiment, enter: Callable[[Phase], object], *, number: int, workdir: Path) -> None:
        """`number` is this replica's among those of the run in `workdir`. Nothing is compiled, and nobody met."""
        self._ex, self._enter, self._number, self._workdir = ex, enter, number, workdir
        self._dataset: Dataset | None = None
        self._handed: queue.SimpleQueue[Handed | None] = queue.SimpleQueue()
        self._out = HandOut(hand=self._hand)
        self._current: Share | None = None
        self._error: BaseException | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="shares' rows")
        self._rows: dict[int, Future[Batch]] = {}
        self.wait_s = 0.0
        self._rate = 0.0
        self._asked, self._announced = False, False
        self._delays = ex.config.compression.delayed
        self._late: Late | None = None
        self._replicas: Replicas | None = None

    # ------------------------------------------------------------------------------------------------- the programs
    def compile(self) -> jax.stages.Compiled:
        """Returns the compiled share; compiles the update too, so that nobody waits for that once it has entered."""
        _ = self.update
        if self._delays:
            _ = self.first_of_each
        return self.share

    @cached_property
    def share(self) -> jax.stages.Compiled:
        """The compiled `share(params, batch) -> means`."""
        ex = self._ex
        program = build_share(accumulated(ex.model.objective), ex.plan, self._out)
        return jax.jit(program).lower(ex.state_shapes.all_params, ex.batches.shapes).compile()

    @cached_property
    def update(self) -> jax.stages.Compiled:
        """The compiled `update(state, grads_R, means) -> (state, metrics)`, which donates the state.

        With `compression.delayed` the state given has nothing in the place of the gradients that wait, and the one
        returned the parameters given, `[1, ...]`; it donates the gradients too.
        """
        ex, shapes = self._ex, self._ex.state_shapes
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        program, donated = build_update(ex.plan, ex.chain), (0,)
        if self._delays:
            program, donated, shapes = by_waiting(program), (0, 1), with_waiting(shapes, None)
        jitted = jax.jit(program, donate_argnums=donated, out_shardings=(shardings, ex.replicated))
        means = dict.fromkeys(self.means, jax.ShapeDtypeStruct((), np.float32, sharding=ex.replicated))
        return jitted.lower(shapes, gradient_shapes(ex.plan, shapes.params), means).compile()

    @cached_property
    def first_of_each(self) -> jax.stages.Compiled:
        """The compiled function from parameters `[1, ...]`, where gradients lie, to parameters `[...]`."""
        shapes = self._ex.state_shapes
        jitted = jax.jit(
            lambda tree: jax.tree.map(lambda x: x[0], tree),
            out_shardings=jax.tree.map(lambda x: x.sharding, shapes.params),
        )
        return jitted.lower(waiting_in(shapes)).compile()

    @cached_property
    def means(self) -> list[str]:
        """The names of the means, in the order of the last piece."""
        program = build_share(accumulated(self._ex.model.objective), self._ex.plan, self._out)
        return sorted(jax.eval_shape(program, self._ex.state_shapes.all_params, self._ex.batches.shapes))

    @cached_property
    def flat(self) -> FlatGradients:
        """The order of the gradients; compiles the share."""
        _ = self.share
        return FlatGradients.make(self._ex.plan, self._ex.state_shapes.params, self._out.order)

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Where the pieces of the gradients begin and end."""
        block = self._ex.config.compression.block
        size = min(max(-(-self.flat.size // PIECES), LEAST), MOST)
        size = -(-size // block) * block
        return [(start, min(start + size, self.flat.size)) for start in range(0, self.flat.size, size)]

    # ------------------------------------------------------------------------------------------------------ a member
    def read(self, dataset: Dataset, step: int) -> AbstractContextManager[object]:
        self._dataset = dataset
        self._first = self._reading(step * self._ex.num_shares)
        return closing(self)

    def await_rows(self) -> None:
        self._first.result()

    def close(self) -> None:
        """Ends reading, and the connections to the others."""
        if self._replicas:
            self._replicas.close()
        self._handed.put(None)
        self._reader.shutdown(wait=False, cancel_futures=True)

    def begin(self, step: int, say: Callable[[str], object]) -> None:
        compression = self._ex.config.compression
        payload = make_payload(compression.hop_two, compression.block)
        sizes = [stop - start for start, stop in self.bounds]
        self._replicas = Replicas(
            number=self._number,
            folder=self._workdir / FOLDER,
            token=shared_token(self._workdir),
            num_shares=self._ex.num_shares,
            payloads=[*[payload] * len(sizes), Float32()],
            sizes=[*sizes, len(self.means)],
            silence_s=self._ex.config.elastic.silence_s,
            late=int(self._delays),
            run=fingerprint(self._ex.config),
            process=jax.process_index(),
            agree=agreed,
            say=say,
        )
        threading.Thread(target=self._take, name="gradients", daemon=True).start()
        if self.replicas.members.meet(step):
            say(f"joining the replicas {', '.join(str(m.number) for m in self.replicas.members.others)}")
        else:
            self.replicas.members.enter(step)

    def __call__(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, jax.Array | float], int]:
        """Returns the state after a step, the metrics, and the steps done.

        A replica that joins, or was away for too long, takes the others' state first.
        """
        self._enter(Phase.STEPPING)
        if step % COMPARED_EVERY == 0 and not self.replicas.agrees(step, digest_of(state)):
            step, state = self._fetched(step, state)
        while True:
            self.wait_s = 0.0
            try:
                if self._late is not None and any(agreed(self.replicas.copies.are_wanted(step))):
                    state = self._whole(state)
                self.replicas.copies.at_step(step, [shard.data for shard in own_shards(state.to_keep)])
                state, grads_R, means = self._gradients(state, step)
                break
            except BehindError:
                step, state = self._fetched(step, state)
            except ConnectionError as error:  # closed by `_take`, where that failed
                raise self._error or error from error
        state, metrics = self._ex.block(self.update(state, grads_R, means))
        self._tell_rate()
        unknown = {name for name, x in means.items() if x is UNKNOWN}
        if unknown:
            return state, {name: x for name, x in metrics.items() if name not in unknown}, step + 1
        return state, {**metrics, "replicas": self.replicas.count}, step + 1

    def _gradients(self, state: TrainState, step: int) -> tuple[TrainState, GradsR, dict[str, np.float32]]:
        """Returns the state that the update of a step takes, and the gradients with their means."""
        params = lambda: state.all_params
        if not self._delays:
            flat, means = self._sum(step, params)
            return state, self._arrays(flat), means
        self.replicas.compute(step, partial(self._compute, step, params))
        whole, means = self._whole(state), dict.fromkeys(self.means, UNKNOWN) | {"weight": np.float32(1)}
        if self._late:  # not in the first step after a start
            means = self._late.means
        self._late = Late(step)
        return with_waiting(whole, None), waiting_in(whole), means

    def _sum(self, step: int, params: Callable[[], Params]) -> tuple[np.ndarray, dict[str, np.float32]]:
        """Returns the sums over all shares of a step's gradients, `f32 [N]`, and of its means."""
        totals = self.replicas.sum(step, partial(self._compute, step, params))
        return np.concatenate(totals[:-1]), dict(zip(self.means, totals[-1], strict=True))

    def _arrays(self, flat: np.ndarray) -> GradsR:
        return self.flat.arrays(flat, self._ex.state_shapes.params)

    def _whole(self, state: TrainState) -> TrainState:
        """Returns the state with the gradients that were under way in their place; waits for them."""
        late = self._late
        if late is None:
            return state
        if late.grads_R is None:
            before = lambda: replace(state, params=self.first_of_each(waiting_in(state))).all_params
            flat, means = self._sum(late.step, before)
            late.means = {name: x / means["weight"] for name, x in means.items()}
            late.grads_R = self._arrays(flat / means["weight"])
        return with_waiting(state, late.grads_R)

    def _fetched(self, step: int, state: TrainState) -> tuple[int, TrainState]:
        """Returns a step soon to come, and the others' state after it; what is given if nobody else is there."""
        found = self.replicas.fetch_state([shard.data.nbytes for shard in own_shards(state.to_keep)])
        if found is None:
            self.replicas.members.enter(step)
            return step, state
        self._late = None
        return found[0], with_shards(state, found[1])

    def may_stop(self, step: int, *, asked: bool) -> bool:
        """One step after it has told the others: they need not do again what this replica has begun."""
        self._asked |= asked  # jax says so of one step alone
        if self._asked and not self._announced and any(agreed(len(self.replicas.members.others))):
            self.replicas.members.tell(last=step)
            self._announced = True
            return False
        return self._asked

    def end(self, step: int, state: TrainState) -> None:
        with suppress(BehindError):  # then nobody needs anything of this one
            self._whole(state)
        self.replicas.members.leave(step)

    def to_save(self, state: TrainState) -> TrainState | None:
        """The one with the lowest number saves it, and none that is behind: the others would save the same."""
        try:
            state = self._whole(state)
        except BehindError:  # as the next step will say again
            return None
        return state.to_keep if self.replicas.is_first else None

    @property
    def replicas(self) -> Replicas:
        """This replica among the others, once it has begun."""
        assert self._replicas
        return self._replicas

    # --------------------------------------------------------------------------------------------------- its shares
    def _compute(self, step: int, params: Callable[[], Params], number: int) -> None:
        """Computes a share; what it hands out is put into the sums meanwhile."""
        started_s = time.perf_counter()
        batch = self._ex.batches.to_devices(self._read(step, number))
        self.wait_s += time.perf_counter() - started_s
        started_s = time.perf_counter()
        share = self._current = Share(step, number, self.flat.size, len(self.bounds), len(self.flat.slots))
        means = jax.device_get(self.share(params(), batch))
        share.is_whole.wait()  # the means of one device may be here while another one still hands out
        values = np.array([means[name] for name in self.means], np.float32)
        self.replicas.put(step, number, len(self.bounds), values)
        if self._error:
            raise self._error
        rate = 1 / (time.perf_counter() - started_s)
        self._rate = RATE_MEMORY * self._rate + (1 - RATE_MEMORY) * rate if self._rate else rate

    def _read(self, step: int, number: int) -> Batch:
        """Returns the rows of a share, and begins to read those that are likely to be next."""
        index = step * self._ex.num_shares + number
        found = self._reading(index)
        for ahead in (index + 1, index + self._ex.num_shares):
            self._reading(ahead)
        for old in [old for old in self._rows if old < index - self._ex.num_shares]:
            del self._rows[old]
        return found.result()

    def _reading(self, index: int) -> "Future[Batch]":
        assert self._dataset is not None
        if index not in self._rows:
            layout = self._ex.batches
            self._rows[index] = self._reader.submit(
                batch_at, self._dataset, index, global_size=layout.global_size, rows=layout.local_rows
            )
        return self._rows[index]

    def _hand(self, name: str, device: Any, layer: Any, leaves: Any) -> None:
        """Is called in the middle of the program, in a thread that computes: reading the arrays here may deadlock."""
        assert self._current
        self._handed.put(Handed(self._current, name, device, layer, leaves))

    def _take(self) -> None:
        """Puts what is handed out into the sums, piece by piece."""
        try:
            while (handed := self._handed.get()) is not None:
                share = handed.share
                device, layer = int(handed.device), int(handed.layer)
                start, stop = self.flat.put(share.flat, handed.name, device, layer, handed.leaves)
                for piece, (first, end) in enumerate(self.bounds):
                    common = min(stop, end) - max(start, first)
                    if common > 0:
                        share.filled[piece] += common
                        if share.filled[piece] == end - first:
                            self.replicas.put(share.step, share.number, piece, share.flat[first:end])
                share.left -= 1
                if not share.left:
                    share.is_whole.set()
        except BaseException as error:
            self._error = error
            self.replicas.close()
            if self._current:
                self._current.is_whole.set()

    def _tell_rate(self) -> None:
        """Tells the others how fast this replica is, if that has changed much."""
        rate, known = agreed(round(self._rate * 1e6))[0] / 1e6, self.replicas.members.me.rate
        if rate and not 1 / RATE_STEP < rate / known < RATE_STEP:
            self.replicas.members.tell(rate=rate)


def agreed(value: int) -> list[int]:
    """Returns the values of all processes of this replica, below 2**31. Every process must call it."""
    if jax.process_count() == 1:
        return [value]
    return [int(x) for x in multihost_utils.process_allgather(np.int32(value))]


def fingerprint(config: Config) -> str:
    """Returns a hash of what replicas must have in common for their gradients to be those of one run."""
    values = config.to_dict()
    parts = {name: values[name] for name in ("seed", "num_steps", *SECTIONS)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
