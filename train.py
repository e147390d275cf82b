"""Trains a sharded model.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart [--config.a.b=value ...]
    python train.py [--config=configs/quickstart.py] --help    # the flags, and every key of the config

On several machines, start it once per process: SLURM, Open MPI and Kubernetes are recognised, or give `--coordinator`,
`--num_processes` and `--process_id`. Exit codes: 0 finished; 75 stopped but resumable (run the same command again);
2 a mistake in the config, the flags, the data or the work directory; 1 anything else.
"""

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from configs import door
from configs.door import Config
from input_pipeline import Batches, Dataset, TextDataset, load
from metrics.environment import environment
from metrics.run_files import RunFiles, read_run
from metrics.run_log import RunLog
from metrics.throughput import StepTimer, peak_flops
from metrics.units import one_line
from metrics.writer import METRICS_FILE
from runtime import launch
from runtime.command_line import escape_output
from runtime.consensus import broadcast, new_key
from runtime.handshake import shared_token
from runtime.heartbeat import IN_A_STEP, ElasticConfig, Heartbeat
from runtime.interruption import EXIT_RESUMABLE, Interruption
from runtime.rendezvous import meet
from runtime.standby import StandbyGate
from runtime.workdir_lock import workdir_lock
from sharding import drawing, hlo
from sharding.scopes import WorldTooSmallError
from sharding.step import TrainState
from state import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    Restored,
    check_path,
    latest_config,
)
from state.shared_hashing import damage
from state.snapshots import Snapshots
from training.experiment import Experiment, MeshConfig, make_experiment
from training.sampling import SampleConfig, Sampler
from training.validation import EvalConfig, Validation, Validator

EXIT_BAD_CONFIG = 2
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h
# What a resumed run may change: it is not what is learned (docs/training.md); data is known by its fingerprint.
MAY_CHANGE = ("mesh.", "sharding.", "checkpoint.", "elastic.", "eval.", "sample.", "log_every", "batch.micro_size")
MAY_CHANGE += ("model.remat", "model.attention", "data.prefetch", "data.path", "data.tokenizer_path")


class NonFiniteError(RuntimeError):
    """Too many non-finite updates in a row."""


def main(argv: Sequence[str], *, ends_process: bool = False) -> int:
    """Runs the program and returns its exit code; a user's mistake is one line.

    With `ends_process` nothing but the end of the process follows: SIGTERM does not change the exit code any more.
    """
    started_s = time.perf_counter()
    escape_output()
    values = door.new_flags(argv)
    flags.DEFINE_string("workdir", None, "the run's directory (default: runs/NAME-OF-CONFIG)", flag_values=values)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0", flag_values=values)
    flags.DEFINE_integer("num_processes", None, "number of processes", flag_values=values)
    flags.DEFINE_integer("process_id", None, "number of this process", flag_values=values)
    flags.DEFINE_boolean("standby", False, "compile, then wait for SIGUSR1 to process 0 (engines)", flag_values=values)
    flags.DEFINE_boolean("debug", False, "show tracebacks", flag_values=values)
    code, has_begun = EXIT_BAD_CONFIG, False
    heartbeat = Heartbeat()
    with Interruption(to_the_end=ends_process) as interruption:
        try:
            if door.asks_for_help(argv):
                print(door.help_text(__doc__ or "", argv, values))
                return 0
            config = door.parse(argv, values)
            workdir = Path(values.workdir or Path("runs") / door.config_name(values))
            check_path(workdir)
            elastic = door.settings(ElasticConfig, config.elastic, "elastic")
            turn = StandbyGate() if values.standby else None
            start_jax(config, values)
            token = shared_token(workdir) if jax.process_count() > 1 else ""
            code = EXIT_RESUMABLE  # a process that is lost before all have met
            peers = meet(values.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"), token)
            heartbeat.start(jax.process_index(), peers, elastic.silence_s, elastic.stall_s)
            code = EXIT_BAD_CONFIG
            if is_finished(config, workdir):
                return heartbeat.end(0)
            has_begun = (workdir / METRICS_FILE).exists()  # maybe with more nodes: it can go on when they are back
            checked = check(config)
            if turn:
                code = 1
                checked.experiment.compile_train_step()
                if not turn.comes(interruption):
                    return heartbeat.end(EXIT_RESUMABLE)
                started_s, code = time.perf_counter(), EXIT_BAD_CONFIG
            with workdir_lock(workdir):
                if is_finished(config, workdir):  # by the one before
                    return heartbeat.end(0)
                resumed = resume(checked, workdir)
                code = 1
                return heartbeat.end(train(prepare(resumed, started_s), interruption, heartbeat))
        except (ValueError, OSError, CheckpointError, NonFiniteError) as error:
            heartbeat.await_verdict(error)
            code = EXIT_RESUMABLE if has_begun and isinstance(error, WorldTooSmallError) else code
            known = OSError | CheckpointError | NonFiniteError | WorldTooSmallError
            expected = code == EXIT_BAD_CONFIG or isinstance(error, known)
            if not expected or (values.debug if values.is_parsed() else "--debug" in argv):
                traceback.print_exc()
            said = one_line(str(error), "--debug shows")
            print(f"error: {said}", file=sys.stderr)
            return heartbeat.end(code, failure=said)
        except KeyboardInterrupt:
            print("stopped at once; run the same command again to go on from the newest checkpoint", file=sys.stderr)
            return heartbeat.end(EXIT_RESUMABLE, failure="it was stopped at once")
        except Exception as error:
            heartbeat.await_verdict(error)
            traceback.print_exc()
            return heartbeat.end(1, failure=one_line(f"{type(error).__name__}: {error}", "--debug shows"))


# ----------------------------------------------------------------------------------------------- preparation


def start_jax(config: Config, values: flags.FlagValues) -> None:
    """Sets the devices and the compilation cache, and joins the other processes if there are any."""
    devices = launch.virtual_devices()
    if devices:  # a launcher starts one process of several: what one process plays alone does not hold
        config.mesh.update({"num_cpu_devices": devices, "devices_per_node": 0})
    if door.settings(MeshConfig, config.mesh, "mesh").num_cpu_devices:
        keep_freed_memory()
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.mesh.num_cpu_devices)
    launch.join(values.coordinator, values.num_processes, values.process_id)
    # XLA:CPU does not keep the order of collectives in a program that it loads from the cache (seen in jax 0.10.2):
    # its devices, each in another one, wait for each other for ever.
    if jax.default_backend() != "cpu" or jax.device_count() == 1:
        cache = Path(os.environ.get("MICS_JAX_CACHE") or Path.home() / ".cache" / "mics-jax")
        jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def keep_freed_memory() -> None:
    """Tells glibc to keep what XLA:CPU frees, since the next step allocates the same again (docs/performance.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
            mallopt(option, value)


def is_finished(config: Config, workdir: Path) -> bool:
    """Whether `workdir` holds this run and it is done, which is said. ValueError if it holds another run."""
    done = broadcast(new_key("finished"), lambda: says_finished(config, workdir))
    if done:  # with a last checkpoint that is damaged, `resume` says so, and goes on from the step before it
        done = damage(workdir / "checkpoints" / str(config.num_steps), new_key("finished-checkpoint")) is None
    if done and jax.process_index() == 0:
        print(f"{workdir} is finished: {config.num_steps} steps are done")
    return done


def says_finished(config: Config, workdir: Path) -> bool:
    """Whether `workdir` holds this run and says that it is done. ValueError with the differences if it is another."""
    files = read_run(workdir) if (workdir / METRICS_FILE).exists() else RunFiles(run_dir=workdir)
    saved = latest_config(workdir / "checkpoints") or files.config  # if it stopped before its first checkpoint
    if not saved:
        return False
    check_same_run(saved, config, workdir)
    return files.summary.get("exit_reason") == "finished"


def check_same_run(saved: Mapping[str, Any], config: Config, workdir: Path) -> None:
    """Raises ValueError with the differences if `saved` is the config of another run than this one."""
    changed = changed_keys(saved, json.loads(config.to_json()))
    if changed:
        changes = ", ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in changed.items())
        raise ValueError(f"{workdir} holds a run of another config: {changes}; choose another --workdir")


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the old and the new value of each key in which two configs are of different runs."""
    old, new = door.flat(saved), door.flat(config)
    keys = [key for key in sorted({*old, *new}) if not key.startswith(MAY_CHANGE)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a user wrote, checked against devices and data."""

    experiment: Experiment
    train_data: Dataset
    fingerprints: dict[str, str]  # of training and validation data, as checkpoints name them
    validate: Validator
    sample: Sampler
    saving: CheckpointConfig

    @property
    def config(self) -> Config:
        return self.experiment.config


def check(config: Config) -> Checked:
    """Checks the config against devices and data."""
    if config.num_steps < 1 or config.log_every < 1:
        raise ValueError(f"num_steps={config.num_steps} and log_every={config.log_every} must be at least 1")
    evaluation = door.settings(EvalConfig, config.eval, "eval")
    saving = door.settings(CheckpointConfig, config.checkpoint, "checkpoint")
    saving.check_validated(evaluation.every)
    experiment = make_experiment(config)
    train_data, validation_data = (load(experiment.data, split, config.seed) for split in ("train", "validation"))
    check_data(experiment, train_data, validation_data)
    return Checked(
        experiment=experiment,
        train_data=train_data,
        fingerprints={"fingerprint": train_data.fingerprint, "validation_fingerprint": validation_data.fingerprint},
        validate=Validator(experiment, validation_data, evaluation.num_batches),
        sample=Sampler(experiment, train_data, door.settings(SampleConfig, config.sample, "sample")),
        saving=saving,
    )


@dataclass(frozen=True, kw_only=True)
class Resumed(Checked):
    """And with what its work directory and the nodes' memories hold: nothing can be wrong from here on."""

    workdir: Path
    checkpointer: Checkpointer
    snapshots: Snapshots
    restored: Restored | None
    start: int  # steps done before
    saved: int  # the newest of them with a checkpoint


def resume(checked: Checked, workdir: Path) -> Resumed:
    """Restores what there is of the run."""
    ex = checked.experiment
    elastic = door.settings(ElasticConfig, ex.config.elastic, "elastic")
    check_writable(workdir, workdir / "checkpoints")
    is_same_run = lambda saved, config: not changed_keys(saved, config)
    checkpointer = Checkpointer(workdir / "checkpoints", checked.saving, is_same_run=is_same_run)
    snapshots = Snapshots(workdir, elastic.memory_dir, elastic.snapshot_every)
    restored = snapshots.restore(ex.state_shapes, checkpointer)
    if restored:  # what is only in memory, `is_finished` has not seen
        check_same_run(restored.config, ex.config, workdir)
    for key, now in checked.fingerprints.items():
        if restored and restored.data.get(key, now) != now:  # earlier versions saved the training data's alone
            what = "trained" if key == "fingerprint" else "validated"
            raise ValueError(
                f"{workdir} was {what} on other data: data.source={ex.data.source} has changed since "
                f"step {restored.step}; choose another --workdir"
            )
    return Resumed(
        **vars(checked),
        workdir=workdir,
        checkpointer=checkpointer,
        snapshots=snapshots,
        restored=restored,
        start=restored.step if restored else 0,
        saved=broadcast(new_key("saved"), lambda: checkpointer.latest_step() or 0),
    )


def check_writable(*folders: Path) -> None:
    """Raises ValueError for a folder that is there and cannot be written: it would end the run at its first save."""
    for folder in folders:
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{folder} cannot be written; change that, or choose another --workdir")


def check_data(experiment: Experiment, *datasets: Dataset) -> None:
    """Raises ValueError if the model has too few ids or classes, or if the processes do not see the same data."""
    for dataset in datasets:
        check_size(experiment, dataset)
        if jax.process_count() > 1:
            everyone = multihost_utils.process_allgather(np.frombuffer(bytes.fromhex(dataset.fingerprint), np.uint8))
            if not (everyone == everyone[0]).all():
                raise ValueError(f"the processes see different data for data.source={experiment.data.source}")


def check_size(experiment: Experiment, dataset: Dataset) -> None:
    """Raises ValueError if an example may hold an id, or a class, that the model does not have."""
    data, model = experiment.data, experiment.config.model
    if isinstance(dataset, TextDataset):
        key, there, what = "vocab_size", dataset.vocab_size, f"ids of data.tokenizer={data.tokenizer}"
    else:
        key, there, what = "num_classes", dataset.num_classes, f"classes of data.source={data.source}"
    if there > model[key]:
        raise ValueError(f"model.{key}={model[key]} is smaller than the {there} {what}; set model.{key}={there}")


@dataclass(frozen=True, kw_only=True)
class Run(Resumed):
    """All that training needs, ready."""

    step_fn: jax.stages.Compiled
    state: TrainState
    learning_rates: np.ndarray  # [num_steps], for the log
    log: RunLog


def prepare(resumed: Resumed, started_s: float) -> Run:
    """Compiles the step, initialises the state if none was restored, and starts the log."""
    ex, start, restored = resumed.experiment, resumed.start, resumed.restored
    step_fn = ex.compile_train_step()
    state = restored.state if restored else ex.init_state()
    rates = np.asarray(jax.jit(jax.vmap(ex.schedule))(np.arange(ex.config.num_steps)))
    beginning = how_it_begins(resumed)  # the log drops the steps that are done again
    log = make_log(ex, resumed.workdir, start, step_fn, started_s)
    log.say(beginning)
    resumed.snapshots.begin(start)
    return Run(**vars(resumed), step_fn=step_fn, state=state, learning_rates=rates, log=log)


def how_it_begins(resumed: Resumed) -> str:
    """Returns a line: where the run starts, what from, and how many steps are done again."""
    at = f"step {resumed.start} of {resumed.config.num_steps} in {resumed.workdir}"
    if not resumed.restored:
        return f"starting at {at}"
    logged = read_run(resumed.workdir).rows if (resumed.workdir / METRICS_FILE).exists() else ()
    again = max(0, logged[-1]["step"] - resumed.start) if logged else 0
    return f"resumed at {at}, from {resumed.restored.source}; steps done again: {again:.0f}"


def make_log(experiment: Experiment, workdir: Path, start: int, step_fn: Any, started_s: float) -> RunLog:
    """Returns the log of the run, with the collectives of the compiled step."""
    config, shape = experiment.config, experiment.plan.layout.shape
    collectives = hlo.read_collectives(step_fn.as_text(), shape)
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind)
    rows, data = experiment.batches.global_size, experiment.data
    unit, units_per_row = ("examples", 1) if data.objective == "classify" else ("tokens", data.seq_len)
    row = next(iter(data.row_arrays.values()))
    return RunLog(
        workdir,
        enabled=jax.process_index() == 0,
        start_step=start,
        num_steps=config.num_steps,
        log_every=config.log_every,
        timer=StepTimer(
            rows * units_per_row,
            unit,
            rows * experiment.model.flops_per_row(row.shape),
            peak and peak * shape.num_devices,
        ),
        files={
            "config": json.loads(config.to_json()),
            "environment": environment(
                {
                    "devices": f"{shape.num_devices} x {device.device_kind}",
                    "processes": jax.process_count(),
                    "mesh": shape.sizes,
                    "num_params": experiment.model.num_params,
                }
            ),
            "collectives": hlo.as_report(collectives),
        },
        constants=hlo.bytes_per_step(collectives),
        count_wire=jax.process_count() > 1,
        started_s=started_s,
    )


# -------------------------------------------------------------------------------------------------- training


def train(run: Run, interruption: Interruption, heartbeat: Heartbeat) -> int:
    """Trains to the end, or until asked to stop, and returns the exit code."""
    ex, config, log, state, step = run.experiment, run.config, run.log, run.state, run.start
    saved_step = run.saved
    pending: Pending | None = None  # the numbers of a step are read while the next one runs
    with log, run.checkpointer, run.snapshots, training_batches(run) as batches:
        while step < config.num_steps and not interruption.requested():
            heartbeat.completed(pending.step - 1 if pending else step)  # `pending` may still be running
            heartbeat.does("reads a batch")
            batch = ex.batches.to_devices(next(batches))
            heartbeat.does(IN_A_STEP)
            state, metrics = ex.block(run.step_fn(state, batch))
            step += 1
            previous, pending = pending, Pending(step=step, metrics=metrics, data_wait_s=batches.wait_s)
            if previous:
                report(run, previous)
            last = step == config.num_steps
            evaluates = last or (config.eval.every and step % config.eval.every == 0)
            saves = last or (config.checkpoint.every and step % config.checkpoint.every == 0)
            keeps = not last and run.snapshots.due(step)
            if evaluates or saves or keeps or not ex.dispatches_asynchronously:
                report(run, pending)
                pending = None
            heartbeat.does("")  # these have time-outs of their own, or take long
            validation = validate(run, step, state) if evaluates else None
            if keeps:
                snapshot(run, step, state)
            if saves:
                save(run, step, state, validation)
                saved_step = step
        if pending:
            report(run, pending)
        finished = step == config.num_steps
        if not finished and run.start < step != run.snapshots.last_step:
            snapshot(run, step, state)
        if step != saved_step:
            save(run, step, state)
        sample = run.sample(state.params) if finished and run.sample.wanted else None
        run.checkpointer.wait()
        run.snapshots.end(finished=finished)
        # a picture takes a second, and who is asked to stop has few
        mesh_png = drawing.mesh_png(ex.plan.layout) if finished and jax.process_index() == 0 else None
        log.close("finished" if finished else "interrupted", sample=sample, mesh_png=mesh_png)
        if not finished:
            log.say(f"stopped at step {step}; run the same command again to go on")
    return 0 if finished else EXIT_RESUMABLE


@dataclass(frozen=True, kw_only=True)
class Pending:
    """The numbers of a step that may still be running."""

    step: int
    metrics: dict[str, jax.Array]
    data_wait_s: float


def training_batches(run: Run) -> Batches:
    """Returns this process' rows of the batches from the run's first step on."""
    ex = run.experiment
    return Batches(
        run.train_data,
        global_size=ex.batches.global_size,
        rows=ex.batches.local_rows,
        start_step=run.start,
        prefetch=ex.data.prefetch,
    )


def report(run: Run, pending: Pending) -> None:
    """Waits for a step and logs its numbers. NonFiniteError after too many non-finite updates in a row."""
    scalars = {name: float(value) for name, value in jax.device_get(pending.metrics).items()}
    in_a_row = scalars.pop("skipped_in_a_row")
    updates = pending.step - int(scalars["skipped_steps"])  # a skipped step does not move the schedule
    rate = float(run.learning_rates[max(updates, 1) - 1])
    run.log.step(pending.step, scalars | {"learning_rate": rate, "data_wait_s": pending.data_wait_s})
    if in_a_row >= run.experiment.max_skipped:
        raise NonFiniteError(
            f"{in_a_row:.0f} updates in a row were not finite, the last at step {pending.step}; the parameters are as "
            f"before them. Lower optimizer.learning_rate or set optimizer.clip_norm, in another --workdir"
        )


def validate(run: Run, step: int, state: TrainState) -> Validation:
    """Measures and logs how good the model is on the validation data."""
    validation = run.validate(state.params)
    run.log.validation(step, validation.scalars(), validation.said)
    run.log.spent("validation_s", validation.time_s)
    return validation


def position(run: Run, step: int) -> dict[str, Any]:
    """Returns where a step is in the data."""
    return {"step": step, "seed": run.config.seed, **run.fingerprints}


def snapshot(run: Run, step: int, state: TrainState) -> None:
    """Keeps the state in the nodes' memories, after the rows up to its step are written."""
    run.log.flush()
    before = time.perf_counter()
    run.snapshots.save(step, state, data=position(run, step), config=json.loads(run.config.to_json()))
    run.log.spent("snapshot_s", time.perf_counter() - before)


def save(run: Run, step: int, state: TrainState, validation: Validation | None = None) -> None:
    """Starts saving a checkpoint, after the rows up to its step are written."""
    run.log.flush()
    before = time.perf_counter()
    best = {} if validation is None else {"validation_loss": validation.loss}
    run.checkpointer.save(step, state, data=position(run, step), config=json.loads(run.config.to_json()), metrics=best)
    run.log.spent("checkpoint_s", time.perf_counter() - before)


if __name__ == "__main__":
    sys.exit(main(sys.argv, ends_process=True))
