"""Trains a sharded model.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart [--config.a.b=value ...]
    python train.py [--config=configs/quickstart.py] --help    # the flags, and every key of the config

On several machines, start it once per process: SLURM, Open MPI and Kubernetes are recognised, or give `--coordinator`,
`--num_processes` and `--process_id`. Exit codes: 0 finished; 75 stopped but resumable (run the same command again);
2 a mistake in the config, the flags, the data or the work directory; 1 anything else.

`run` has the phases of a run in their order. What surrounds it (signals, other processes, errors, exit codes) is in
runtime/supervisor.py; what happens between two steps is at the end of this file.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from absl import flags

from configs import command_line
from configs.schema import Config
from files import run_directory
from input_pipeline import Batches, Dataset
from metrics.run_log import RunLog
from metrics.units import format_seconds
from runtime import launch
from runtime.command_line import prepare_output
from runtime.consensus import broadcast, new_key
from runtime.events import Event
from runtime.exit_codes import ResumableError
from runtime.phases import Phase
from runtime.supervisor import Supervisor, supervise
from runtime.workdir_lock import workdir_lock
from sharding import drawing
from sharding.scopes import WorldTooSmallError
from sharding.step import TrainState
from state import Checkpointer, CheckpointError, check_path
from state.snapshots import Snapshots
from training import resume
from training.datasets import Datasets, load_datasets
from training.devices import use_compilation_cache, use_cpu_devices
from training.experiment import Experiment, make_experiment
from training.log import make_log
from training.memory import check_fits
from training.overlap import add_estimate, installed_plugins
from training.sampling import Sampler
from training.validation import Validation, Validator
from training.weights_tokenizer import check_tokenizer


class NonFiniteError(RuntimeError):
    """Too many non-finite updates in a row."""


class Hook(Protocol):
    """Something between two steps."""

    def __call__(self, step: int, state: TrainState, metrics: dict[str, jax.Array]) -> object:
        """Is called when `step` was dispatched; `metrics` are on the devices, and may not be there yet."""
        ...


def main(argv: Sequence[str], *, ends_process: bool = False, hooks: Sequence[Hook] = ()) -> int:
    """Runs the program and returns its exit code; a user's mistake is one line. `hooks` are called after each step."""
    prepare_output()
    program = partial(from_command_line, argv, hooks)
    return supervise(program, expected=(CheckpointError, NonFiniteError), ends_process=ends_process)


def from_command_line(argv: Sequence[str], hooks: Sequence[Hook], supervisor: Supervisor) -> bool:
    """Runs what `argv` (program first) says and returns whether it is finished."""
    supervisor.shows_tracebacks = "--debug" in argv
    values = command_line.new_flags(argv)
    flags.DEFINE_string("workdir", None, "the run's directory (default: runs/NAME-OF-CONFIG)", flag_values=values)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0", flag_values=values)
    flags.DEFINE_integer("num_processes", None, "number of processes", flag_values=values)
    flags.DEFINE_integer("process_id", None, "number of this process", flag_values=values)
    flags.DEFINE_boolean("standby", False, "compile, then wait for SIGUSR1 to process 0 (engines)", flag_values=values)
    flags.DEFINE_boolean("debug", False, "show tracebacks", flag_values=values)
    if command_line.asks_for_help(argv):
        print(command_line.help_text(__doc__ or "", argv, values))
        return True
    config = command_line.parse(argv, values)
    supervisor.shows_tracebacks = values.debug
    if values.workdir == "":
        raise ValueError("--workdir= names no folder; give one, or leave --workdir out")
    workdir = Path(values.workdir or Path("runs") / command_line.config_name(values))
    check_path(workdir)
    if values.standby:
        supervisor.stand_by()
    address = launch.Address(
        coordinator=values.coordinator, num_processes=values.num_processes, process_id=values.process_id
    )
    words = command_line.words_of_config(argv)
    return run(config, workdir, supervisor, address=address, words=words, hooks=hooks)


def run(
    config: Config,
    workdir: Path,
    supervisor: Supervisor,
    *,
    address: launch.Address = launch.FROM_ENVIRONMENT,
    words: Sequence[str] = (),
    hooks: Sequence[Hook] = (),
) -> bool:
    """Trains, from where `workdir` is, and returns whether the run is finished; if not, it was asked to stop.

    `words` of the command line describe the config: other programs take them too.
    """
    started_s = time.perf_counter()

    # ------------------------------------------------------------------------------------------- devices and processes
    elastic = config.elastic
    if devices := launch.virtual_devices():  # a launcher starts one process of several: none plays several nodes
        config = replace(config, mesh=replace(config.mesh, num_cpu_devices=devices, devices_per_node=0))
    if config.mesh.num_cpu_devices:
        use_cpu_devices(config.mesh.num_cpu_devices)
    elif config.sharding.overlap != "off":
        add_estimate(os.environ, installed_plugins())
    supervisor.join(address, workdir=workdir, silence_s=elastic.silence_s, stall_s=elastic.stall_s)
    use_compilation_cache()
    if resume.is_finished(config, workdir):
        return True

    # ----------------------------------------------------------------- mesh, model, optimizer, data: checked, not made
    try:
        ex = make_experiment(config)
        if not supervisor.stands_by:  # else the attempt before still has its memory
            check_fits(ex, words)
    except WorldTooSmallError as error:
        if not resume.has_begun(workdir):
            raise
        raise ResumableError(str(error)) from error  # maybe it began with more nodes: it goes on when they are back
    data = load_datasets(ex, workdir)
    supervisor.hold(data)
    validator = Validator(ex, data.validation, config.eval.num_batches)
    sampler = Sampler(ex, data.train, config.sample)
    if not resume.has_begun(workdir):
        ex.open_weights()  # only the headers: they are read when nothing was restored
        if data.tokenizer:
            check_tokenizer(config, data.tokenizer)

    # --------------------------------------------------------- standby: compiled while the attempt before still trains
    if supervisor.stands_by:
        if not supervisor.await_turn(ex.compile_train_step):
            return False
        started_s = time.perf_counter()
    supervisor.enter(Phase.RESTORING)
    supervisor.hold(workdir_lock(workdir))

    # ---------------------------------------------------------------------------------------------------------- restore
    if resume.is_finished(config, workdir):  # by the attempt before
        return True
    resume.check_writable(workdir, workdir / run_directory.CHECKPOINTS)
    checkpointer = Checkpointer(workdir / run_directory.CHECKPOINTS, config.checkpoint, is_same_run=resume.is_same_run)
    snapshots = Snapshots(workdir, elastic.memory_dir, elastic.snapshot_every)
    start = resume.restore(ex, workdir, checkpointer, snapshots, data.fingerprints)

    # ------------------------------------------------------- first batch: what it lacks is said before the step is made
    supervisor.enter(Phase.READING_FIRST)
    batches = make_batches(ex, data.train, start.step)
    supervisor.hold(batches)
    batches.await_next()

    # ------------------------------------------------------------------------------------------------- step and state
    supervisor.enter(Phase.PREPARING)
    supervisor.started(nodes=ex.plan.layout.shape.num_nodes)
    with announced("compiling the step", say):
        step_fn = ex.compile_train_step()
    if start.restored:
        state = start.restored.state
    else:
        with announced("making the initial state", say):
            state = ex.init_state()
    step, last = start.step, config.num_steps
    log = make_log(
        ex, data.train, workdir, start.step, step_fn, started_s
    )  # drops the rows of steps that are done again
    with log, checkpointer, snapshots, batches:
        log.say(start.described(config.num_steps, workdir))
        if sampler.warning:
            log.say(f"warning: {sampler.warning}")
        for line in data.described(config.num_steps * config.batch.global_size):
            log.say(line)
        supervisor.events.write(Event.RESTORED, **start.event)  # after this no row of a later step is in the metrics
        snapshots.begin(start.step)
        supervisor.completed(start.step)
        keeper = Keeper(ex, log, checkpointer, snapshots, data.fingerprints, supervisor)
        reporter = Reporter(ex, log, supervisor, data)

        # -------------------------------------------------------------------------------------------------------- loop
        while step < last and not supervisor.stop_requested():
            supervisor.enter(Phase.READING)
            batch = ex.batches.to_devices(next(batches))
            supervisor.enter(Phase.STEPPING)
            state, metrics = ex.block(step_fn(state, batch))
            step += 1
            evaluates, saves = is_due(step, config.eval.every, last), is_due(step, config.checkpoint.every, last)
            keeps = step < last and snapshots.due(step)
            reporter(step, metrics, batches.wait_s, at_once=evaluates or saves or keeps)
            supervisor.enter(Phase.RECORDING)
            validation = validate(validator, log, step, state) if evaluates else None
            if keeps:
                keeper.snapshot(step, state)
            if saves:
                keeper.save(step, state, validation)
            for hook in hooks:
                hook(step, state, metrics)
        reporter.close()

        # ----------------------------------------------------------------------------------------------------- close
        supervisor.enter(Phase.CLOSING)
        finished = step == last
        if not finished and start.step < step != snapshots.last_step:
            keeper.snapshot(step, state)
        keeper.save_if_new(step, state)
        sample = None
        if finished and sampler.wanted:
            with announced("sampling", log.say):
                sample = sampler(state.params)
        checkpointer.wait()
        snapshots.end(finished=finished)
        # a picture takes a second, and who is asked to stop has few
        mesh_png = drawing.mesh_png(ex.plan.layout) if finished and jax.process_index() == 0 else None
        log.close("finished" if finished else "interrupted", sample=sample, mesh_png=mesh_png)
        if not finished:
            log.say(f"stopped at step {step}; run the same command again to go on")
        supervisor.events.write(Event.STOPPED, step=step, why="finished" if finished else "asked to stop")
    return finished


# ------------------------------------------------------------------------------------------------- between two steps


@dataclass(kw_only=True)
class Pending:
    """The numbers of a step that may still be running."""

    step: int
    metrics: dict[str, jax.Array]
    data_wait_s: float


class Reporter:
    """Logs every step, one step late where steps are dispatched asynchronously: nothing waits for numbers."""

    def __init__(self, ex: Experiment, log: RunLog, supervisor: Supervisor, data: Datasets) -> None:
        self._ex, self._log, self._supervisor, self._data = ex, log, supervisor, data
        self._rates = learning_rates(ex)
        self._pending: Pending | None = None
        self._has_reported = False
        self._warned = self._reported = 0  # steps

    def __call__(self, step: int, metrics: dict[str, jax.Array], data_wait_s: float, *, at_once: bool) -> None:
        """Takes a step that was dispatched; reports the one before it, and this one too if `at_once`."""
        self.flush()
        self._pending = Pending(step=step, metrics=metrics, data_wait_s=data_wait_s)
        if at_once or not self._ex.dispatches_asynchronously:
            self.flush()

    def flush(self) -> None:
        """Reports what was not reported yet."""
        pending, self._pending = self._pending, None
        if pending:
            self.report(pending)

    def close(self) -> None:
        """Reports what was not reported yet, and how often the model's warning applied."""
        self.flush()
        if self._warned > 1:
            self._log.say(f"the warning above applied to {self._warned} of {self._reported} steps")

    def report(self, pending: Pending) -> None:
        """Waits for a step and logs its numbers. NonFiniteError after too many non-finite updates in a row."""
        scalars = {name: float(value) for name, value in jax.device_get(pending.metrics).items()}
        self._supervisor.completed(pending.step)
        in_a_row = scalars.pop("skipped_in_a_row")
        updates = pending.step - int(scalars["skipped_steps"])  # a skipped step does not move the schedule
        if self._rates is not None:
            scalars["learning_rate"] = float(self._rates[max(updates, 1) - 1])
        scalars |= {"data_wait_s": pending.data_wait_s, **self._data.counters()}
        self._log.step(pending.step, scalars)
        self._reported += 1
        if warning := self._ex.model.warning(scalars):
            self._warned += 1
            if self._warned == 1:
                self._log.say(f"step {pending.step}: {warning}; said once, counted at the end")
        if not self._has_reported:
            self._has_reported = True
            self._supervisor.events.write(Event.FIRST_STEP, step=pending.step)
        if in_a_row >= self._ex.config.optimizer.max_skipped:
            raise NonFiniteError(
                f"{in_a_row:.0f} updates in a row were not finite, the last at step {pending.step}; the parameters "
                f"are as before them. Lower optimizer.learning_rate or set optimizer.clip_norm, in another --workdir"
            )


class Keeper:
    """Keeps the state of a step: in the nodes' memories, or in a checkpoint."""

    def __init__(
        self,
        ex: Experiment,
        log: RunLog,
        checkpointer: Checkpointer,
        snapshots: Snapshots,
        fingerprints: Mapping[str, str],
        supervisor: Supervisor,
    ) -> None:
        self._log, self._checkpointer, self._snapshots = log, checkpointer, snapshots
        self._config = ex.config.to_dict()
        self._position = {"seed": ex.config.seed, **fingerprints}
        self._supervisor = supervisor
        self._saved = broadcast(new_key("saved"), lambda: checkpointer.latest_step() or 0)

    def snapshot(self, step: int, state: TrainState) -> None:
        """Keeps a state in memory, after the rows up to its step are written."""
        self._log.flush()
        before = time.perf_counter()
        if self._snapshots.save(step, state, data=self._data(step), config=self._config):
            self._supervisor.events.write(Event.SNAPSHOT_BEGUN, step=step)
        self._log.spent("snapshot_s", time.perf_counter() - before)

    def save(self, step: int, state: TrainState, validation: Validation | None = None) -> None:
        """Starts saving a checkpoint, after the rows up to its step are written."""
        self._log.flush()
        before = time.perf_counter()
        best = {} if validation is None else {"validation_loss": validation.loss}
        self._checkpointer.save(step, state, data=self._data(step), config=self._config, metrics=best)
        self._supervisor.events.write(Event.CHECKPOINT_BEGUN, step=step)
        self._log.spent("checkpoint_s", time.perf_counter() - before)
        self._saved = step

    def save_if_new(self, step: int, state: TrainState) -> None:
        """Saves a step that has no checkpoint."""
        if step != self._saved:
            self.save(step, state)

    def _data(self, step: int) -> dict[str, Any]:
        return {"step": step, **self._position}


def learning_rates(ex: Experiment) -> np.ndarray | None:
    """Returns the learning rate of each step, [num_steps]; None if the optimizer has its own."""
    return ex.schedule and np.asarray(jax.jit(jax.vmap(ex.schedule))(np.arange(ex.config.num_steps)))


def make_batches(ex: Experiment, dataset: Dataset, start_step: int) -> Batches:
    """Returns this process' rows of the batches from a step on."""
    return Batches(
        dataset,
        global_size=ex.batches.global_size,
        rows=ex.batches.local_rows,
        start_step=start_step,
        prefetch=ex.config.data.prefetch,
    )


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something is due after `step`: every `every` steps (0: never), and after the last one."""
    return step == last or (every > 0 and step % every == 0)


def say(text: str) -> None:
    """Prints a line in process 0."""
    if jax.process_index() == 0:
        print(text, flush=True)


@contextmanager
def announced(what: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Tells what begins, which may take minutes and prints nothing itself, and then how long it took."""
    before = time.perf_counter()
    tell(f"{what} ...")
    yield
    tell(f"{what}: done after {format_seconds(time.perf_counter() - before)}")


def validate(validator: Validator, log: RunLog, step: int, state: TrainState) -> Validation:
    """Measures and logs how good the model is on the validation data."""
    before = time.perf_counter()
    if not validator.is_compiled:
        with announced("compiling the validation", log.say):
            validator.compiled()
    validation = validator(state.params)
    log.validation(step, validation.scalars(), validation.message)
    log.spent("validation_s", time.perf_counter() - before)
    return validation


if __name__ == "__main__":
    sys.exit(main(sys.argv, ends_process=True))
