"""Steps of a replica that is a world of its own (`sharding.replicas=independent`): one of those that come and go."""

import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from elastic.replicas.group import BehindError, Replicas
from elastic.replicas.payloads import Payload
from elastic.replicas.transport import Sockets
from input_pipeline import Dataset
from input_pipeline.batches import Batch as HostBatch
from input_pipeline.batches import batch_at
from runtime.events import Event
from runtime.files.run_directory import CHECKPOINTS, step_numbers
from runtime.files.run_directory import REPLICAS as FOLDER
from runtime.handshake import shared_token
from runtime.phases import Phase
from runtime.supervisor import Supervisor
from sharding.step import TrainState
from sharding.trees import Batch, GradsR
from training.experiment import Experiment
from training.replica_state import digest_of, own_shards, waiting_in, with_shards, with_waiting
from training.share_gradients import Gradients, Put
from training.share_rounds import Rounds

# the state after a step, its metrics, and the steps done
Done = tuple[TrainState, dict[str, Any], int]
SECTIONS = ("model", "data", "batch", "mesh", "sharding", "compression", "local_sgd", "optimizer")
COMPARED_EVERY = 100  # steps: replicas compare their parameters
RATE_STEP, RATE_MEMORY = 1.1, 0.5
STOP_S = 10.0  # for which a replica that is asked to stop still waits for the others' sums of a single step


class StoppedError(Exception):
    """The run stops within a step, a round, or before it has the others' state."""


@dataclass
class Late:
    """A step whose gradients are under way while the next one computes."""

    step: int
    grads_R: GradsR = None  # the mean `[1, ...]`, once it is here
    means: dict[str, np.float32] = field(default_factory=dict)


class Work(Protocol):
    """What the shares of a step are, and what is done with their sums."""

    @property
    def steps(self) -> int:
        """Steps of training in one of the replicas'."""
        ...

    @property
    def forms(self) -> list[tuple[int, Payload]]:
        """Of each piece of a share its values, and how they travel."""
        ...

    def compile(self) -> jax.stages.Compiled:
        """Compiles all that a step needs; returns the program with the most of its work."""
        ...

    def begin(self, fail: Callable[[], object]) -> None:
        """Is called before the first share; `fail` is to be called where something fails in another thread."""
        ...

    def close(self) -> None:
        """Is called when the run ends."""
        ...

    def compute(self, state: TrainState, read: Callable[[int], Batch], put: Put) -> None:
        """Computes a share of what follows a state, and puts its pieces; `read(i)` returns its rows of step i of it."""
        ...

    def update(self, state: TrainState, total: np.ndarray) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after a step, and its metrics, from the sums of all pieces over all shares, `f32 [N]`."""
        ...


class Independent:
    """A replica's steps, whose shares are summed with the others'. Close it when the run ends.

    With `compression.delayed` a step's gradients travel beside the compute of the next one. Between two steps they are
    not here: in their place the state has the parameters by which they are computed, as long as they are under way
    (`_whole`), so what a lost replica owed of them can be computed again.

    With `local_sgd.inner_steps` a step of the replicas is a round: as many steps of training.
    """

    def __init__(
        self,
        ex: Experiment,
        supervisor: Supervisor,
        *,
        number: int,
        workdir: Path,
    ) -> None:
        """`number` is this replica's among those of the run in `workdir`. Nothing is compiled, and nobody met."""
        self._ex, self._supervisor, self._number, self._workdir = ex, supervisor, number, workdir
        self._enter, self._stop_requested = supervisor.enter, supervisor.stop_requested
        self._say: Callable[[str], object] = lambda text: None  # until it has met the others
        self._dataset: Dataset | None = None
        self._gradients = Gradients(ex)
        self._work: Work = Rounds(ex) if ex.config.local_sgd.inner_steps else self._gradients
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="shares")
        self._rows: dict[int, Future[HostBatch]] = {}
        self.wait_s = 0.0
        self._share_s, self._longest_s = 0.0, 0.0  # of a share: on average; the slowest of this step
        self._asked, self._announced, self._stopped = False, False, False
        self._asked_s: float | None = None  # when it was asked to stop, while it waited
        self._reported_bytes = 0  # sent to the others, up to the step before
        self._delays = ex.config.compression.delayed
        self._late: Late | None = None
        self._left: int | None = None  # after how many steps of the replicas
        self._compared = -1, True  # the last step that was, and whether this replica agreed
        self._lacks_state = False  # it was to take the others', and they did not come
        self._replicas: Replicas | None = None

    def compile(self) -> jax.stages.Compiled:
        """Compiles the update too, so that nobody waits for that once this replica has entered."""
        return self._work.compile()

    # ------------------------------------------------------------------------------------------------------ a member
    def read(self, dataset: Dataset, step: int) -> AbstractContextManager[object]:
        """ValueError for a step between two meetings."""
        if step % self._work.steps:
            raise ValueError(
                f"the state after step {step} lies between two meetings (local_sgd.inner_steps={self._work.steps}); go "
                f"on with sharding.replicas=one_world to step {step + -step % self._work.steps}"
            )
        self._dataset = dataset
        self._first = self._reading(step * self._ex.num_shares)
        return closing(self)

    def wait_for_data(self) -> None:
        self._first.result()

    def close(self) -> None:
        """Ends reading, and the connections to the others."""
        if self._replicas:
            left, self._left = self._left, None
            if left is not None:  # while it saved a checkpoint the others have got most of what they need
                self._replicas.members.leave(left)
            self._replicas.close()
        self._work.close()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def begin(self, step: int, say: Callable[[str], object]) -> None:
        assert self._dataset is not None
        sizes, payloads = zip(*self._work.forms, strict=True)
        elastic = self._ex.config.elastic
        transport = Sockets(
            number=self._number,
            token=shared_token(self._workdir),
            silence_s=elastic.silence_s,
            stall_s=elastic.stall_s + elastic.silence_s,  # before, it ends by itself
            process=jax.process_index(),
            progress=self._supervisor.progressed_s,
        )
        self._enter(Phase.CHECKING)  # another replica of this number, or others of another run, are a mistake
        self._replicas = Replicas(
            number=self._number,
            folder=self._workdir / FOLDER,
            transport=transport,
            num_shares=self._ex.num_shares,
            payloads=payloads,
            sizes=sizes,
            late=int(self._delays),
            run=fingerprint(self._ex, self._dataset),
            process=jax.process_index(),
            agree=self._agreed,
            saved=lambda: max(step_numbers(self._workdir / CHECKPOINTS), default=0) // self._work.steps,
            progress=self._waiting_alone,
            waits=self._waiting,
            say=say,
            report=self._report,
        )
        self._work.begin(self._replicas.close)
        if self.replicas.members.meet(at := step // self._work.steps):
            say(f"joining the replicas {', '.join(str(m.number) for m in self.replicas.members.others)}")
        else:
            self.replicas.members.enter(at)
        if (count := len(self.replicas.members.others) + 1) > (shares := self._ex.num_shares):
            idle = f"{count - shares} of {count} replicas have nothing to compute"
            wanted = f"sharding.shares={count} and " if self._ex.config.sharding.shares else ""
            least = count * self._ex.batches.rows_per_micro_step
            has = f"a step has {shares} share{'s' if shares > 1 else ''}"
            say(f"{idle}: {has}; {count} need {wanted}batch.global_size={least} or more")
        each, coded = -(-shares // count), payloads[0].bytes_per_value
        if count > 1 and self._work.steps == 1 and coded < 4 <= each * coded:  # StepSums.nodes_to_send
            how = f"as their sum in f32, not in {self._ex.config.compression.all_reduce}"
            say(f"a replica's {each} shares of a step travel {how}: sharding.shares, as many as replicas, sends less")
        self._say = say

    def _report(self, event: Event, *, replica: int, step: int, **about: str) -> None:
        """Writes into events.jsonl, and once this replica has met the others prints, that one joins, leaves or is lost.

        `step` counts steps of the replicas.
        """
        first, last = step * self._work.steps + 1, (step + 1) * self._work.steps  # of the steps of training in it
        row = last if event is Event.REPLICA_LEFT else first
        self._supervisor.events.write(event, replica=replica, step=row, **about)
        who = f"replica {replica}" if replica != self._number else "this replica"
        texts = {
            Event.REPLICA_JOINED: f"{who} takes part from step {row} on",
            Event.REPLICA_LEFT: f"{who} leaves after step {row}",
            Event.REPLICA_LOST: f"{who} is lost in step {row}: {about.get('why')}; the others do its part",
        }
        self._say(texts[event])

    def __call__(self, state: TrainState, step: int) -> Done | None:
        """Returns the state after a step, the metrics, and the steps done; None if it is to stop before that.

        A replica that joins, or was away for too long, takes the others' state first.
        """
        try:
            return self._done(state, step)
        except StoppedError:
            self._stopped = True
            return None

    def _done(self, state: TrainState, step: int) -> Done:
        """Returns what a call does. StoppedError within a round, and while it waits for the others."""
        self._enter(Phase.STEPPING)
        at = step // self._work.steps
        is_due = at == self._compared[0] or at % max(COMPARED_EVERY // self._work.steps, 1) == 0
        if is_due and not self._agrees(at, state):
            at, state = self._fetched(at, state)
        while True:
            self.wait_s = 0.0
            try:
                if self._late is not None and any(agreed(self.replicas.copies.are_wanted(at))):
                    state = self._whole(state)
                self.replicas.copies.at_step(at, [shard.data for shard in own_shards(state.checkpoint_state)])
                state, metrics = (self._delayed if self._delays else self._summed)(state, at)
                break
            except BehindError:
                at, state = self._fetched(at, state)
            except ConnectionError as error:  # closed where taking what a share has handed out failed
                raise self._gradients.error or error from error
        state, metrics = self._ex.block((state, metrics))
        self._tell_rate()
        self.wait_s /= self._work.steps
        if "loss" in metrics:
            metrics = {**metrics, "replicas": self.replicas.count}
        metrics = {**metrics, "collective_inter_bytes": self._newly_sent_bytes()}
        return state, metrics, (at + 1) * self._work.steps

    def _summed(self, state: TrainState, at: int) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after a step of the replicas, and its metrics."""
        return self._work.update(state, self.replicas.sum(at, partial(self._compute, at, lambda: state)))

    def _delayed(self, state: TrainState, at: int) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after the update by the gradients of the step before, and its metrics."""
        gradients = self._gradients
        self.replicas.compute(at, partial(self._compute, at, lambda: state))
        whole, means = self._whole(state), dict.fromkeys(gradients.means, np.float32("nan"))
        means = self._late.means if self._late else means | {"weight": np.float32(1)}  # unknown in the first step
        state, metrics = gradients.apply(with_waiting(whole, None), waiting_in(whole), means)
        if not self._late:
            metrics = {name: x for name, x in metrics.items() if name not in means}
        self._late = Late(at)
        return state, metrics

    def _whole(self, state: TrainState) -> TrainState:
        """Returns the state with the gradients that were under way in their place; waits for them."""
        late = self._late
        if late is None:
            return state
        if late.grads_R is None:
            before = lambda: replace(state, params=self._gradients.first_of_each(waiting_in(state)))
            flat, means = self._gradients.sums(self.replicas.sum(late.step, partial(self._compute, late.step, before)))
            late.means = {name: x / means["weight"] for name, x in means.items()}
            flat /= means["weight"]  # in place: new memory takes longer to touch than to fill
            late.grads_R = self._gradients.arrays(flat)
        return with_waiting(state, late.grads_R)

    def _agrees(self, at: int, state: TrainState) -> bool:
        """Whether the parameters after a step of the replicas are those of most others, who are asked once."""
        if self._compared[0] != at:
            self._compared = at, self.replicas.agrees(at, digest_of(state))
        return self._compared[1]

    def _fetched(self, step: int, state: TrainState) -> tuple[int, TrainState]:
        """Returns a step soon to come, and the others' state after it; what is given if nobody else is there."""
        self._lacks_state = True
        found = self.replicas.fetch_state(
            [shard.data.nbytes for shard in own_shards(state.checkpoint_state)], self._waiting_alone
        )
        self._lacks_state = False
        if found is None:
            self.replicas.members.enter(step)
            return step, state
        self._late = None
        # of a round that is stopped the state before it is saved
        return found[0], with_shards(state, found[1], consume=self._work.steps == 1)

    def _newly_sent_bytes(self) -> float:
        """Returns the bytes of sums that a device has sent to the others in each step of training since the last call.

        As an average over the devices of this process, whose host sends them.
        """
        sent = self.replicas.sent_bytes
        newly, self._reported_bytes = sent - self._reported_bytes, sent
        return newly / self._work.steps / jax.local_device_count()

    def _waiting_alone(self) -> None:
        """Is called while another member's answer is awaited: that is no hang, and may be stopped.

        Not with several processes, which would have to agree on when.
        """
        self._enter(Phase.STEPPING)
        if jax.process_count() == 1:
            self._asked |= self._stop_requested()
            if self._asked:
                raise StoppedError

    def _waiting(self) -> None:
        """Is called by all processes while the others' sums are awaited. StoppedError if the run stops before that.

        In a round at once: it may take longer than the notice that is given. The sums of a single step come soon, and
        then the others need not do this replica's part of it again: it waits for them, up to STOP_S.
        """
        self._enter(Phase.STEPPING)
        self._asked |= self._stop_requested()
        if not self._asked:
            return
        if self._asked_s is None:
            self._asked_s = time.monotonic()
        is_late = self._work.steps > 1 or time.monotonic() - self._asked_s > STOP_S
        if agreed(int(is_late))[0]:
            raise StoppedError

    def can_stop(self, step: int, *, asked: bool) -> bool:
        """One step after it has told the others: they need not do again what this replica has begun.

        At once after a wait that was ended, and where a step is a round, which may take longer than the notice.
        """
        self._asked |= asked  # jax says so of one step alone
        if self._stopped:
            return True
        is_short = self._work.steps == 1
        members = self.replicas.members
        is_needed = is_short and members.me.begun and not self._announced  # before that nobody waits for its shares
        if self._asked and is_needed and any(agreed(len(members.others))):
            members.tell(last=step)
            self._announced = True
            return False
        return self._asked

    def end(self, step: int, state: TrainState) -> None:
        self._asked_s = None  # delayed, the state waits for sums
        with suppress(BehindError, StoppedError):  # nobody needs anything of this one, or it waits no longer
            self._whole(state)
        self._enter(Phase.CLOSING)
        self._left = step // self._work.steps
        self.replicas.members.tell(step=self._left, last=self._left - 1)
        self.replicas.copies.close()  # nobody is to wait for what comes no more

    def state_for_checkpoint(self, state: TrainState) -> TrainState | None:
        """The one with the lowest number saves it: the others would save the same.

        None that is behind, lacks the others' state or stops waiting for it, and none with other parameters than most,
        which takes theirs before its next step. A replica that is asked to stop does not wait for the comparison.
        """
        if self._lacks_state:  # what it has may be gone
            return None
        try:
            state = self._whole(state)
        except (BehindError, StoppedError):  # as the next step will say again
            return None
        me = self.replicas.members.me
        with suppress(StoppedError):  # a round is not followed by another step, whose state could be saved
            if me.takes_part(me.step) and not self._agrees(me.step, state):
                return None
        return state.checkpoint_state if self.replicas.is_first else None

    @property
    def replicas(self) -> Replicas:
        """This replica among the others, once it has begun."""
        assert self._replicas
        return self._replicas

    # --------------------------------------------------------------------------------------------------- its shares
    def _compute(self, at: int, state: Callable[[], TrainState], number: int) -> None:
        """Computes a share of a step of the replicas; what it hands out is put into the sums meanwhile."""

        def read(inner: int) -> Batch:
            started_s = time.perf_counter()
            if self._work.steps > 1:
                self._enter(Phase.STEPPING)  # it is no hang
                self._asked |= self._stop_requested()
                if self._asked:
                    raise StoppedError
            batch = self._ex.batches.to_devices(self._read(at * self._work.steps + inner, number))
            self.wait_s += time.perf_counter() - started_s
            return batch

        started_s, waited_s = time.perf_counter(), self.wait_s
        self._work.compute(state(), read, partial(self.replicas.put, at, number))
        self._longest_s = max(self._longest_s, time.perf_counter() - started_s - (self.wait_s - waited_s))

    def _read(self, step: int, number: int) -> HostBatch:
        """Returns the rows of a share of a step of training, and begins to read those of the same share's next step."""
        index = step * self._ex.num_shares + number
        found = self._reading(index)
        self._reading(index + self._ex.num_shares)
        for old in [old for old in self._rows if old < index - self._ex.num_shares]:
            del self._rows[old]
        return found.result()

    def _reading(self, index: int) -> "Future[HostBatch]":
        assert self._dataset is not None
        if index not in self._rows:
            layout, threads = self._ex.batches, min(self._ex.config.data.prefetch, self._dataset.threads)
            about = {"global_size": layout.global_size, "rows": layout.local_rows, "threads": threads}
            self._rows[index] = self._reader.submit(batch_at, self._dataset, index, **about)
        return self._rows[index]

    def _agreed(self, value: int) -> list[int]:
        """Returns what `agreed` does; whoever waits for other replicas does so, and its processes are no hang."""
        self._enter(Phase.STEPPING)
        return agreed(value)

    def _tell_rate(self) -> None:
        """Tells the others how fast this replica is, by its slowest share of the step, if that has changed much.

        Of replicas that share a machine the last one computes fast while the others wait: it must not get more for it.
        """
        if self._longest_s:
            before_s = self._share_s or self._longest_s
            self._share_s = RATE_MEMORY * before_s + (1 - RATE_MEMORY) * self._longest_s
            self._longest_s = 0.0
        share_us = agreed(min(round(self._share_s * 1e6), 2**31 - 1))[0]
        known = self.replicas.members.me.rate
        if share_us and not known / RATE_STEP < 1e6 / share_us < known * RATE_STEP:
            self.replicas.members.tell(rate=1e6 / share_us)


def agreed(value: int) -> list[int]:
    """Returns the values of all processes of this replica, below 2**31. Every process must call it."""
    if jax.process_count() == 1:
        return [value]
    return [int(x) for x in multihost_utils.process_allgather(np.int32(value))]


def fingerprint(ex: Experiment, dataset: Dataset) -> str:
    """Returns a hash of what replicas must have in common for their gradients to be those of one run."""
    values = ex.config.to_dict()
    parts = {name: values[name] for name in ("seed", "num_steps", *SECTIONS)}
    devices = [jax.device_count(), jax.process_count(), jax.devices()[0].device_kind]
    parts |= {"data": [parts["data"], dataset.fingerprint], "base": {**ex.base_fingerprint}, "devices": devices}
    parts |= {"versions": [jax.__version__, version("jaxlib")]}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
