"""Training steps of one independent replica: a separate JAX program that can join or leave a run."""

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from elastic.replicas.driver import BehindError, Replicas
from elastic.replicas.membership import Log
from elastic.replicas.round_ends import RoundEnds
from elastic.replicas.round_record import RoundRecord
from elastic.replicas.transport import Sockets
from input_pipeline.batches import UnitBatches
from input_pipeline.noise import RowData
from runtime.events import Event
from runtime.exit_codes import ResumableError
from runtime.files.json_objects import JsonObject
from runtime.files.run_directory import CHECKPOINTS, ROUNDS, step_numbers
from runtime.files.run_directory import REPLICAS as FOLDER
from runtime.handshake import shared_token
from runtime.phases import Phase
from runtime.supervisor import Supervisor
from sharding.step import TrainState
from training.experiment import Experiment
from training.gradient_units import GradientUnits
from training.partial_rounds import AsynchronousRounds, PartialRoundUnits
from training.replica_state import digest_of, local_shards, with_shards
from training.round_units import RoundUnits
from training.unit_loop import AtOnce, DelayedUpdate, Stop, StoppedError, UnitLoop, UpdateTiming, Work, agreed

# the state after a step, its metrics, and the steps done
Done = tuple[TrainState, dict[str, Any], int]
# each section with a key that changes the bits of a gradient, an update or a batch
SECTIONS = ("model", "data", "batch", "mesh", "sharding", "ablation", "compression", "local_sgd", "optimizer")
COMPARED_EVERY = 100  # steps: replicas compare their parameters


class ReplicaLog(Log):
    """Writes replicas that join, leave and are lost to events.jsonl, and prints them once this replica has met them."""

    def __init__(self, supervisor: Supervisor, say: Callable[[str], object], *, number: int, steps: int) -> None:
        """`steps` of training are one step of the replicas."""
        self._supervisor, self._say, self._number, self._steps = supervisor, say, number, steps
        self.has_met = False

    def say(self, text: str) -> None:
        self._say(text)

    def write(self, event: Event, *, replica: int, step: int, **fields: str) -> None:
        first, last = step * self._steps + 1, (step + 1) * self._steps  # the round's training steps
        row = last if event is Event.REPLICA_LEFT else first
        self._supervisor.events.write(event, replica=replica, step=row, **fields)
        name = f"replica {replica}" if replica != self._number else "this replica"
        texts = {
            Event.REPLICA_JOINED: f"{name} takes part from step {row} on",
            Event.REPLICA_LEFT: f"{name} leaves after step {row}",
            Event.REPLICA_LOST: f"{name} is lost in step {row}: {fields.get('why')}; the others do its part",
        }
        if self.has_met:
            self._say(texts[event])


class Independent:
    """The steps of a replica, whose work units are summed with the ones of its peers. Close it when the run ends.

    With `local_sgd.inner_steps` a step of the replicas is a round: that number of steps of training.
    """

    def __init__(self, ex: Experiment, supervisor: Supervisor, *, number: int, workdir: Path) -> None:
        """`number` is the number of this replica in the run of `workdir`. Nothing is compiled or connected yet."""
        self._ex, self._supervisor, self._number, self._workdir = ex, supervisor, number, workdir
        self._gradients = GradientUnits(ex)
        self._work: Work = _work_of(ex, self._gradients)
        self._stop = Stop(supervisor.stop_requested, is_round=self._work.steps > 1)
        self._has_announced_stop = False
        self._replicas: Replicas | None = None
        self._reported_bytes = 0  # sent to peers, up to the step before
        self._left: int | None = None  # after how many steps of the replicas
        self._compared = -1, True  # the last step that was compared, and whether this replica had common parameters
        self._lacks_state = False  # it waited for its peers' state, which did not come
        self.wait_s = 0.0

    def compile(self) -> jax.stages.Compiled:
        return self._work.compile()

    # --------------------------------------------------------------------------------------------- beginning and end
    def read(self, dataset: RowData, step: int) -> AbstractContextManager[object]:
        """ValueError for a step between two meetings."""
        steps, layout = self._work.steps, self._ex.batches
        if step % steps:
            raise ValueError(
                f"the state after step {step} lies between two meetings (local_sgd.inner_steps={steps}); go "
                f"on with sharding.replicas=one_world to step {step + -step % steps}"
            )
        self._run = fingerprint(self._ex, dataset)
        self._rows = UnitBatches(
            dataset,
            num_units=self._ex.num_shares,
            global_size=layout.global_size,
            rows=layout.local_rows,
            start_step=step,
            prefetch=self._ex.config.data.prefetch,
        )
        return closing(self)

    def wait_for_data(self) -> None:
        self._rows.await_first()

    def begin(self, step: int, say: Callable[[str], object]) -> None:
        self._supervisor.enter(Phase.CHECKING)  # another replica of this number, or replicas of another run
        log = ReplicaLog(self._supervisor, say, number=self._number, steps=self._work.steps)
        self._replicas = replicas = self._connected(log)
        supervisor, layout = self._supervisor, self._ex.batches
        self._loop = UnitLoop(self._work, replicas, self._rows, layout, self._stop, supervisor.enter)
        self._timing = self._update_timing(at := step // self._work.steps)
        if replicas.members.meet(at):
            say(f"joining the replicas {', '.join(str(peer.number) for peer in replicas.members.peers)}")
        else:
            replicas.members.enter(at)
        for line in unit_warnings(self._ex, self._work, len(replicas.members.peers) + 1):
            say(line)
        log.has_met = True

    def _update_timing(self, at: int) -> UpdateTiming:
        """Returns when sums update the state. ValueError if the recorded rounds have other workers."""
        if isinstance(self._work, PartialRoundUnits):
            record = RoundRecord(self._workdir / ROUNDS, self._ex.num_shares)
            record.find(at)
            ends = RoundEnds(self._ex.config.local_sgd, record, self.replicas.members)
            self.replicas.handlers.update(arrive=ends.answer, promise=ends.answer)
            return AsynchronousRounds(self._loop, self._work, ends)
        delays = self._ex.config.compression.delayed
        return DelayedUpdate(self._loop, self._gradients) if delays else AtOnce(self._loop)

    def _connected(self, log: Log) -> Replicas:
        """Returns this replica, which its peers can connect to."""
        elastic = self._ex.config.elastic
        transport = Sockets(
            number=self._number,
            token=shared_token(self._workdir),
            silence_s=elastic.silence_s,
            stall_s=elastic.stall_s + elastic.silence_s,  # a process that hangs ends itself before
            process=jax.process_index(),
            progress=self._supervisor.progressed_s,
        )
        return Replicas(
            folder=self._workdir / FOLDER,
            transport=transport,
            num_units=self._ex.num_shares,
            pieces=self._work.unit_layout,
            delay=int(self._ex.config.compression.delayed),
            run=self._run,
            agree=self._agreed,
            progress=self._progress,
            log=log,
        )

    def can_stop(self, step: int, *, asked: bool) -> bool:
        """One step after it has told its peers: they need not compute again the units that this replica has begun.

        At once after a wait that was ended, and if a step is a round, which may take longer than the notice.
        """
        self._stop.is_asked |= asked
        if self._stop.has_ended_wait or not self._stop.is_asked:
            return self._stop.has_ended_wait
        members = self.replicas.members
        is_needed = self._work.steps == 1 and members.me.begun and not self._has_announced_stop
        if is_needed and any(agreed(len(members.peers))):
            members.tell(last=step)
            self._has_announced_stop = True
            return False
        return True

    def end(self, step: int, state: TrainState) -> None:
        self._stop.begin_wait()
        with suppress(BehindError, StoppedError):  # peers need nothing of this replica, or it no longer waits
            self._timing.completed(state)
        self._supervisor.enter(Phase.CLOSING)
        self._left = step // self._work.steps
        self.replicas.members.tell(step=self._left, last=self._left - 1)
        self.replicas.copies.close()  # peers must not wait for copies that will not come

    def close(self) -> None:
        """Ends reading, and the connections to the peers."""
        if self._replicas:
            left, self._left = self._left, None
            if left is not None:  # while it saved a checkpoint the peers have got most totals that they need
                self._replicas.members.leave(left)
            self._replicas.close()
        self._rows.close()

    # ------------------------------------------------------------------------------------------------------- the steps
    def __call__(self, state: TrainState, step: int) -> Done | None:
        """Returns the state after a step, the metrics, and the steps done; None if it must stop before that.

        A replica that joins, or was away for too long, takes its peers' state first.
        """
        try:
            return self._step(state, step)
        except StoppedError:
            self._stop.has_ended_wait = True
            return None

    def _step(self, state: TrainState, step: int) -> Done:
        """Does a step. StoppedError within a round, and while it waits for its peers."""
        self._supervisor.enter(Phase.STEPPING)
        at = step // self._work.steps
        is_due = at == self._compared[0] or at % max(COMPARED_EVERY // self._work.steps, 1) == 0
        if is_due and not self._has_common_parameters(at, state):
            at, state = self._fetched(at, state)
        while True:
            self._loop.wait_s = 0.0
            try:
                state = self._timing.prepared_for_copies(state, at)
                self.replicas.copies.at_step(at, [shard.data for shard in local_shards(state.checkpoint_state)])
                self._check_newest_checkpoint(at)
                state, metrics = self._timing.step(state, at)
                break
            except BehindError:
                at, state = self._fetched(at, state)
        state, metrics = self._ex.block((state, metrics))
        self._loop.tell_rate()
        self.wait_s = self._loop.wait_s / self._work.steps
        if "loss" in metrics:
            metrics = {**metrics, "replicas": self.replicas.count}
        metrics = {**metrics, "collective_inter_bytes": self._newly_sent_bytes()}
        return state, metrics, (at + 1) * self._work.steps

    def _check_newest_checkpoint(self, at: int) -> None:
        """ResumableError if this replica lags, no peer trains any more, and a checkpoint is newer than its state."""
        members = self.replicas.members
        if members.me.begun or not members.is_alone():
            return
        newest = max(step_numbers(self._workdir / CHECKPOINTS), default=0) // self._work.steps
        if max(self._agreed(newest)) > at:
            raise ResumableError(
                "no other replica trains any more, and the newest checkpoint is newer than the state here: run the "
                "same command again, which resumes from it"
            )

    def _has_common_parameters(self, at: int, state: TrainState) -> bool:
        """Whether the parameters after a step of the replicas are the ones of most peers, which are asked once."""
        if self._compared[0] != at:
            self._compared = at, self.replicas.compare(at, digest_of(state))
        return self._compared[1]

    def _fetched(self, step: int, state: TrainState) -> tuple[int, TrainState]:
        """Returns a step soon to come, and the peers' state after it; the arguments if no peer remains."""
        self._lacks_state = True
        fetched = self.replicas.fetch_state([shard.data.nbytes for shard in local_shards(state.checkpoint_state)])
        self._lacks_state = False
        if fetched is None:
            self.replicas.members.enter(step)
            return step, state
        self._timing.drop_pending()
        at, arrays = fetched
        # a round that is stopped saves the state before it
        return at, with_shards(state, arrays, consume=self._work.steps == 1)

    def state_for_checkpoint(self, state: TrainState) -> TrainState | None:
        """The replica with the lowest number saves it, because all others would save the same.

        None for a replica that lags, lacks its peers' state or stops waiting for it, and for a replica with other
        parameters than most, which takes theirs before its next step. A replica that is asked to stop does not wait for
        the comparison.
        """
        if self._lacks_state:  # its arrays may be deleted
            return None
        try:
            state = self._timing.completed(state)
        except (BehindError, StoppedError):  # the next step raises it again
            return None
        me = self.replicas.members.me
        with suppress(StoppedError):  # a round is not followed by another step, whose state could be saved
            if me.takes_part(me.step) and not self._has_common_parameters(me.step, state):
                return None
        return state.checkpoint_state if self.replicas.is_first else None

    @property
    def replicas(self) -> Replicas:
        """This replica among its peers, once it has begun."""
        assert self._replicas
        return self._replicas

    def _progress(self) -> None:
        """Is called while a peer's answer is awaited: the process does not hang, and may be stopped."""
        self._supervisor.enter(Phase.STEPPING)
        if jax.process_count() == 1:  # several would have to agree on when to stop
            self._stop.end_if_asked()

    def _agreed(self, value: int) -> list[int]:
        """Returns the result of `agreed` and marks progress: a replica that waits for peers does not hang."""
        self._supervisor.enter(Phase.STEPPING)
        return agreed(value)

    def _newly_sent_bytes(self) -> float:
        """Returns the bytes of sums that a device has sent to peers in each step of training since the last call.

        As an average over the devices of this process, whose host sends them.
        """
        sent = self.replicas.exchange.sent_bytes
        newly, self._reported_bytes = sent - self._reported_bytes, sent
        return newly / self._work.steps / jax.local_device_count()


def _work_of(ex: Experiment, gradients: GradientUnits) -> Work:
    """Returns the work units of a run. ValueError if they are asynchronous rounds, and cannot be."""
    local = ex.config.local_sgd
    if not local.quorum:
        return RoundUnits(ex) if local.inner_steps else gradients
    if local.quorum > ex.num_shares:
        raise ValueError(f"local_sgd.quorum={local.quorum} must be at most the {ex.num_shares} workers of a round")
    if jax.process_count() > 1:
        raise ValueError("local_sgd.quorum needs replicas of one process each; set local_sgd.quorum=0")
    return PartialRoundUnits(ex)


def unit_warnings(ex: Experiment, work: Work, count: int) -> list[str]:
    """Returns lines about work units that do not fit `count` replicas: some have none, or send more than they could."""
    lines, units, coded = [], ex.num_shares, work.unit_layout[0].payload.bytes_per_value
    if count > units:
        idle = f"{count - units} of {count} replicas have nothing to compute"
        wanted = f"sharding.shares={count} and " if ex.config.sharding.shares else ""
        least = count * ex.batches.rows_per_micro_step
        has = f"a step has {units} share{'s' if units > 1 else ''}"
        lines.append(f"{idle}: {has}; {count} need {wanted}batch.global_size={least} or more")
    each = -(-units // count)
    if count > 1 and work.steps == 1 and coded < 4 <= each * coded:  # StepSums.nodes_to_send
        how = f"as their sum in f32, not in {ex.config.compression.all_reduce}"
        less = "sharding.shares, as many as replicas, sends less"
        lines.append(f"a replica's {each} shares of a step travel {how}: {less}")
    return lines


def fingerprint(ex: Experiment, dataset: RowData) -> str:
    """Returns a hash of all settings that replicas must have in common to compute gradients of one run."""
    values = ex.config.to_dict()
    parts: JsonObject = {name: values[name] for name in ("seed", "num_steps", *SECTIONS)}
    devices = [jax.device_count(), jax.process_count(), jax.devices()[0].device_kind]
    parts |= {"data": [parts["data"], dataset.fingerprint], "base": {**ex.base_fingerprint}, "devices": devices}
    parts |= {"versions": [jax.__version__, version("jaxlib")]}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
