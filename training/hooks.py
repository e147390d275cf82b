"""Hooks: functions that are called after each step with its number, the state and the metrics.

    hooks = [every(1, report), every(40, validate, at_end=True), every(80, checkpoint.save, at_end=True, at_stop=True)]

The first reports the step, so that the others find its row in the log. docs/training.md shows a hook of a user.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from elastic.checkpointer import Checkpointer
from elastic.snapshots import Snapshots
from runtime.consensus import broadcast, new_key
from runtime.events import Event
from runtime.exit_codes import ResumableError
from runtime.files.json_objects import JsonObject
from runtime.files.run_directory import PROFILE
from runtime.phases import Phase
from runtime.supervisor import Supervisor
from sharding.step import TrainState
from training import profiling
from training.datasets import Datasets
from training.experiment import Experiment
from training.metrics.report import profile_text
from training.metrics.run_log import RunLog
from training.metrics_apart import MetricsApart
from training.validation import Validator
from training.world import Metrics, World


class NonFiniteError(RuntimeError):
    """Too many non-finite updates in a row."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The parts of a run that its hooks use."""

    ex: Experiment
    world: World
    data: Datasets
    validator: Validator
    log: RunLog
    checkpointer: Checkpointer
    snapshots: Snapshots
    supervisor: Supervisor
    train_step: jax.stages.Compiled
    fingerprints: Mapping[str, str]  # hashes of the data and the frozen weights, saved with the state


class Hook(Protocol):
    """Something between two steps."""

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> object:
        """Is called when `step` was dispatched; `metrics` are on the devices, and may not be there yet.

        A hook may add numbers to them for those after it.
        """
        ...


@dataclass
class Periodic:
    """A hook that calls another after some of the steps, and if wanted after the one at which the run ends."""

    hook: Hook
    due: Callable[[int], bool]
    at_end: bool = False  # also after the last step of the run
    at_stop: bool = False  # also before the run stops because it was asked to
    done: int = 0  # the newest step that called the hook, or need not

    def __call__(self, step: int, state: TrainState, metrics: Metrics, *, is_last: bool = False) -> None:
        """Calls the hook if `step` is due."""
        if self.due(step) or (is_last and self.at_end):
            self._call(step, state, metrics)

    def close(self, step: int, state: TrainState, metrics: Metrics, *, finished: bool) -> None:
        """Calls the hook when no step follows: the run is finished or asked to stop, maybe before its first step."""
        if step != self.done and (self.at_end if finished else self.at_stop):
            self._call(step, state, metrics)

    def _call(self, step: int, state: TrainState, metrics: Metrics) -> None:
        self.hook(step, state, metrics)
        self.done = step


def every(steps: int, hook: Hook, *, at_end: bool = False, at_stop: bool = False, done: int = 0) -> Periodic:
    """Returns the hook after every `steps`-th step (0: none), and at the end or where the run stops, if wanted."""
    due = lambda step: steps > 0 and step % steps == 0
    return Periodic(hook, due, at_end, at_stop, done)


class Pending(NamedTuple):
    """A step that was dispatched, and is not reported."""

    step: int
    metrics: Mapping[str, Any]  # means over all replicas; without a row, values of each replica
    has_row: bool
    counters: Mapping[str, float]


class Report:
    """Logs the steps, one step late where they are dispatched asynchronously: nothing waits for numbers.

    Replicas that drift apart exchange nothing between two syncs. So their metrics are combined only after a sync, and
    where a hook needs the row of its step.
    """

    def __init__(self, run: RunContext) -> None:
        self._ex, self._world, self._data = run.ex, run.world, run.data
        self._log, self._supervisor = run.log, run.supervisor
        self._rates = run.ex.learning_rates()
        self._pending: Pending | None = None
        self._apart = MetricsApart(run.ex) if run.ex.drifts_apart else None
        self._warned = self._reported = 0  # steps
        self._row_at = -1  # the last step with a row, if replicas drift apart

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Takes a step that was dispatched, and reports the one before it."""
        self.pass_by()
        has_row, found = True, {**metrics}
        if self._apart:
            self._apart.add(metrics)
            period = self._ex.config.log_every
            ends = self._world.synced and step // period > self._row_at // period
            has_row = ends or not self._reported
            if has_row:  # dispatched before the next step
                self._row_at, found = step, {**self._apart.together()}
            if ends:
                self._apart.begin()
        self._pending = Pending(step, found, has_row, {"data_wait_s": self._world.wait_s, **self._data.counters()})
        if not self._ex.dispatches_asynchronously and has_row:
            self.flush()

    def pass_by(self) -> None:
        """Reports the pending step if it has a row; else waits for it, and no hook can ask for its row any more."""
        pending = self._pending
        if pending is None or pending.has_row:
            self.flush()
            return
        self._pending = None
        self._supervisor.enter(Phase.STEPPING)
        jax.block_until_ready(pending.metrics)
        self._supervisor.enter(Phase.RECORDING)
        self._supervisor.completed(pending.step)
        self._log.passed(pending.step)

    def flush(self) -> None:
        """Reports the pending step."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if self._apart and not pending.has_row:
            pending = pending._replace(metrics=self._apart.together())
        self._report(pending)

    @contextmanager
    def apart(self, key: str, *, needs_row: bool = False) -> Iterator[None]:
        """Logs the seconds of its body, which do not count as training, after the pending step."""
        if needs_row:
            self.flush()
        else:
            self.pass_by()
        before = time.perf_counter()
        yield
        self._log.spent(key, time.perf_counter() - before)

    def close(self) -> None:
        """Reports the pending step, and how often the model's warning applied."""
        self.flush()
        if self._warned > 1:
            self._log.say(f"the warning above applied to {self._warned} of {self._reported} steps")

    def _report(self, pending: Pending) -> None:
        """Waits for a step and logs its numbers. NonFiniteError after too many non-finite updates in a row."""
        step = pending.step
        self._supervisor.enter(Phase.STEPPING)
        scalars = {name: float(value) for name, value in jax.device_get(pending.metrics).items()}
        self._supervisor.enter(Phase.RECORDING)
        self._supervisor.completed(step)
        in_a_row = scalars.pop("skipped_in_a_row")
        updates = step - int(scalars["skipped_steps"])  # a skipped step does not move the schedule
        if self._rates is not None:
            scalars["learning_rate"] = float(self._rates[max(updates, 1) - 1])
        self._log.step(step, {**scalars, **pending.counters})
        self._reported += 1
        if warning := self._ex.model.warning(scalars):
            self._warned += 1
            if self._warned == 1:
                self._log.say(f"step {step}: {warning}; said once, counted at the end")
        if self._reported == 1:
            config = self._ex.config
            size = config.local_sgd.inner_steps if config.sharding.replicas == "independent" else 0  # steps of a round
            self._supervisor.events.write(Event.FIRST_STEP, step=step, after=step - max(size, 1))
        if in_a_row >= self._ex.config.optimizer.max_skipped:
            raise NonFiniteError(
                f"{in_a_row:.0f} updates in a row were not finite, the last at step {step}; the parameters "
                f"are as before them. Lower optimizer.learning_rate or set optimizer.clip_norm, in another --workdir; "
                f"or, if it is the data of these steps, skip them with a larger optimizer.max_skipped"
            )


class Validate:
    """Measures and logs how good the model is on the validation data, and adds it to the metrics."""

    def __init__(self, run: RunContext, report: Report) -> None:
        self._run, self._report = run, report

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> None:
        run = self._run
        with self._report.apart("validation_s", needs_row=True):
            validation = run.validator(state.all_params, run.log.say)
            run.supervisor.enter(Phase.RECORDING)
            run.log.validation(step, validation.scalars(), validation.message)
        metrics |= validation.scalars()


class Profile:
    """Traces the steps from `profile.start` on, and logs the time of their collectives."""

    def __init__(self, run: RunContext, report: Report, step: int) -> None:
        """`step` steps are done; a run that resumes after `profile.start` traces nothing."""
        self._run, self._report, self._config = run, report, run.ex.config.profile
        self._folder = run.world.workdir / PROFILE / f"process_{jax.process_index()}"
        self._started_s: float | None = None
        if self.is_due(step):
            self._start()

    def is_due(self, step: int) -> bool:
        """Whether the trace starts or ends after a step."""
        return step == self._config.start - 1 or (self._started_s is not None and step == self._last)

    def __call__(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Starts the trace, or ends it. If the run stops during the trace, it has no summary."""
        jax.block_until_ready(state)
        if self._started_s is not None:
            seconds, self._started_s = time.perf_counter() - self._started_s, None
            with self._report.apart("profile_s"):
                jax.profiler.stop_trace()
                if step == self._last:
                    self._log(seconds / self._config.steps)
        elif self.is_due(step):
            self._start()

    @property
    def _last(self) -> int:
        return self._config.start - 1 + self._config.steps

    def _start(self) -> None:
        profiling.start_trace(self._folder)
        self._started_s = time.perf_counter()

    def _log(self, step_s: float) -> None:
        run, config = self._run, self._config
        shape = run.ex.plan.layout.shape
        try:
            times = profiling.collective_times(self._folder, run.train_step.as_text() or "", shape, config.steps)
        except Exception as error:  # XLA promises nothing about its text and its traces
            run.log.say(f"the trace in {self._folder} cannot be read: {' '.join(str(error).split())}")
            return
        fields = {"step": config.start, "steps": config.steps, "step_s": step_s, "collectives": times}
        run.supervisor.events.write(Event.PROFILED, **fields)
        run.log.say(f"{profile_text(fields)} Trace: {self._folder}")


class CheckpointHook:
    """Saves the state of a step, in the nodes' memories or in a checkpoint, after the rows up to it are written."""

    def __init__(self, run: RunContext, report: Report) -> None:
        self._run, self._report, self._config = run, report, run.ex.config.to_dict()

    def newest(self) -> int:
        """Returns the newest step with a checkpoint, 0 without any."""
        return broadcast(new_key("saved"), lambda: self._run.checkpointer.latest_step() or 0)

    def snapshot(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Begins a snapshot in memory."""
        with self._report.apart("snapshot_s"):
            self._run.log.flush()
            saved = self._run.ex.in_files(state)
            if self._run.snapshots.save(step, saved, data=self._data(step), config=self._config):
                self._run.supervisor.events.write(Event.SNAPSHOT_BEGUN, step=step)

    def save(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Starts saving a checkpoint. ResumableError, after the save, if the run's directory was deleted meanwhile."""
        checkpointer = self._run.checkpointer
        is_lost = broadcast(new_key("is-lost"), self._run.log.is_lost)
        saved = self._run.world.state_for_checkpoint(state)
        if saved is not None:
            self._save(step, self._run.ex.in_files(saved), metrics)
        if is_lost:
            checkpointer.wait()
            raise ResumableError(
                f"{checkpointer.directory.parent} was deleted or moved during the run: its metrics and earlier "
                f"checkpoints are gone{f', step {step} is saved there again' if saved else ''}; run the same command "
                "again to resume"
            )

    def _save(self, step: int, state: TrainState, metrics: Metrics) -> None:
        with self._report.apart("checkpoint_s"):
            self._run.log.flush()
            best = {name: float(metrics[name]) for name in ("validation_loss",) if name in metrics}
            self._run.checkpointer.save(step, state, data=self._data(step), config=self._config, metrics=best)
            self._run.supervisor.events.write(Event.CHECKPOINT_BEGUN, step=step)

    def _data(self, step: int) -> JsonObject:
        """Returns the position in the data after a step."""
        return {"step": step, "seed": self._run.ex.config.seed, **self._run.fingerprints}
