"""Trains a sharded language model.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart [--config.a.b=value ...]

On several machines, start it once per process: SLURM, Open MPI and Kubernetes are recognised, or give `--coordinator`,
`--num_processes` and `--process_id`. Exit codes: 0 finished; 75 stopped but resumable (run the same command again);
2 bad configuration; 1 anything else.
"""

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from checkpointing import CheckpointConfig, Checkpointer, CheckpointError, latest_config
from configs import door
from configs.door import Config
from elastic.interruption import EXIT_RESUMABLE, Interruption
from experiment import Experiment, make_experiment
from input_pipeline import Batches, Dataset, load
from metrics.environment import environment
from metrics.run_log import RunLog
from metrics.throughput import StepTimer, peak_flops
from sharding import drawing, hlo
from sharding.step import TrainState

EXIT_BAD_CONFIG = 2
# What a resumed run may change: none of it changes what is learned (DESIGN 6.2).
MAY_CHANGE = ("mesh.", "sharding.", "checkpoint.", "eval.", "sample.", "log_every", "batch.micro_size", "data.prefetch")


class NonFiniteError(RuntimeError):
    """Too many non-finite updates in a row."""


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code; a user's mistake is one line."""
    started_s = time.perf_counter()
    values = door.new_flags()
    flags.DEFINE_string("workdir", None, "the run's directory (default: runs/NAME-OF-CONFIG)", flag_values=values)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0", flag_values=values)
    flags.DEFINE_integer("num_processes", None, "number of processes", flag_values=values)
    flags.DEFINE_integer("process_id", None, "number of this process", flag_values=values)
    flags.DEFINE_boolean("debug", False, "show tracebacks", flag_values=values)
    code = EXIT_BAD_CONFIG
    try:
        config = door.parse(argv, values)
        start_jax(config, values)
        run = prepare(config, Path(values.workdir or Path("runs") / door.config_name(values)), started_s)
        code = 1
        return train(run)
    except (ValueError, OSError, CheckpointError, NonFiniteError) as error:
        expected = code == EXIT_BAD_CONFIG or isinstance(error, OSError | CheckpointError | NonFiniteError)
        if not expected or (values.is_parsed() and values.debug):
            traceback.print_exc()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return code


# ----------------------------------------------------------------------------------------------- preparation


def start_jax(config: Config, values: flags.FlagValues) -> None:
    """Sets the devices and the compilation cache, and joins the other processes if there are any."""
    if config.mesh.num_cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.mesh.num_cpu_devices)
    cache = Path(os.environ.get("MICS_JAX_CACHE", Path.home() / ".cache" / "mics-jax"))
    jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    by_hand = (values.coordinator, values.num_processes, values.process_id)
    if by_hand != (None, None, None):
        if None in by_hand:
            raise ValueError("--coordinator, --num_processes and --process_id belong together; give all three")
        jax.distributed.initialize(*by_hand)
    elif int(os.environ.get("SLURM_NTASKS", "1")) > 1 or not LAUNCHER_VARIABLES.isdisjoint(os.environ):
        jax.distributed.initialize()


# set by Open MPI, Kubernetes (an indexed Job or a JobSet), and by hand
LAUNCHER_VARIABLES = {"OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_INDEX", "JAX_COORDINATOR_ADDRESS"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that training needs, checked and ready: nothing a user wrote can be wrong from here on."""

    experiment: Experiment
    workdir: Path
    train_data: Dataset
    validation_data: Dataset
    checkpointer: Checkpointer
    step_fn: jax.stages.Compiled
    start: int  # steps done before
    state: TrainState
    log: RunLog

    @property
    def config(self) -> Config:
        return self.experiment.config


def prepare(config: Config, workdir: Path, started_s: float) -> Run:
    """Checks the config against devices, data and work directory, compiles, and restores or initialises the state."""
    if config.num_steps < 1:
        raise ValueError(f"num_steps={config.num_steps} must be at least 1")
    experiment = make_experiment(config)
    train_data, validation_data = (load(experiment.data, split, config.seed) for split in ("train", "validation"))
    check_data(experiment, train_data, validation_data)
    saved = latest_config(workdir / "checkpoints")
    if saved is not None:
        check_same_run(saved, json.loads(config.to_json()), workdir)
    checkpointer = Checkpointer(
        workdir / "checkpoints", door.settings(CheckpointConfig, config.checkpoint, "checkpoint")
    )
    step_fn = experiment.compile_train_step()
    restored = checkpointer.restore(experiment.state_shapes)
    if restored and restored.data["fingerprint"] != train_data.fingerprint:
        raise ValueError(
            f"{workdir} was trained on other data: data.source={experiment.data.source} has changed since "
            f"step {restored.step}; choose another --workdir"
        )
    start = restored.step if restored else 0
    log = make_log(experiment, workdir, start, step_fn, started_s)
    log.say(f"{'resumed at' if restored else 'starting at'} step {start} of {config.num_steps} in {workdir}")
    return Run(
        experiment=experiment,
        workdir=workdir,
        train_data=train_data,
        validation_data=validation_data,
        checkpointer=checkpointer,
        step_fn=step_fn,
        start=start,
        state=restored.state if restored else experiment.init_state(),
        log=log,
    )


def check_data(experiment: Experiment, *datasets: Dataset) -> None:
    """Raises ValueError if the model's vocabulary is too small, or if the processes do not see the same data."""
    vocab_size = experiment.model.config.vocab_size
    for dataset in datasets:
        if dataset.vocab_size > vocab_size:
            raise ValueError(
                f"model.vocab_size={vocab_size} is smaller than the {dataset.vocab_size} ids of "
                f"data.tokenizer={experiment.data.tokenizer}; set model.vocab_size={dataset.vocab_size}"
            )
        if jax.process_count() > 1:
            everyone = multihost_utils.process_allgather(np.frombuffer(bytes.fromhex(dataset.fingerprint), np.uint8))
            if not (everyone == everyone[0]).all():
                raise ValueError(f"the processes see different data for data.source={experiment.data.source}")


def check_same_run(saved: dict[str, Any], config: dict[str, Any], workdir: Path) -> None:
    """Raises ValueError with the differences if `workdir` holds a run of another config."""
    old, new = door.flat(saved), door.flat(config)
    keys = [key for key in sorted({*old, *new}) if not key.startswith(MAY_CHANGE) and old.get(key) != new.get(key)]
    if keys:
        changes = ", ".join(f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in keys)
        raise ValueError(f"{workdir} holds a run of another config: {changes}; choose another --workdir")


def make_log(experiment: Experiment, workdir: Path, start: int, step_fn: Any, started_s: float) -> RunLog:
    """Returns the log of the run, with the collectives of the compiled step."""
    config, shape = experiment.config, experiment.sharded.layout.shape
    collectives = hlo.read_collectives(step_fn.as_text(), shape)
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind)
    tokens = experiment.batch.global_size * experiment.data.seq_len
    return RunLog(
        workdir,
        enabled=jax.process_index() == 0,
        start_step=start,
        num_steps=config.num_steps,
        log_every=config.log_every,
        timer=StepTimer(tokens, experiment.model.flops_per_token * tokens, peak and peak * shape.num_devices),
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


def train(run: Run) -> int:
    """Trains to the end, or until asked to stop, and returns the exit code."""
    ex, config, log, state, step = run.experiment, run.config, run.log, run.state, run.start
    evaluate = Evaluation(run)
    saved_step = step if step else -1
    pending: Pending | None = None  # the numbers of a step are read while the next one runs
    with run.checkpointer, Interruption() as interruption, training_batches(run) as batches:
        while step < config.num_steps and not interruption.requested(step):
            batch = ex.to_devices(next(batches))
            state, metrics = run.step_fn(state, batch)
            step += 1
            previous, pending = pending, Pending(step=step, metrics=metrics, data_wait_s=batches.wait_s)
            if previous:
                report(run, previous)
            last = step == config.num_steps
            if last or (config.eval.every and step % config.eval.every == 0):
                report(run, pending)
                pending = None
                evaluate(step, state)
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                save(run, step, state)
                saved_step = step
        if pending:
            report(run, pending)
        finished = step == config.num_steps
        if not finished and step != saved_step:
            save(run, step, state)
        sample = sample_text(run, state) if finished and ex.can_sample and config.sample.length else None
        run.checkpointer.wait()
        mesh_png = drawing.mesh_png(ex.sharded.layout) if jax.process_index() == 0 else None
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
        global_size=ex.batch.global_size,
        rows=ex.local_rows,
        start_step=run.start,
        prefetch=ex.data.prefetch,
    )


def report(run: Run, pending: Pending) -> None:
    """Waits for a step and logs its numbers. NonFiniteError after too many non-finite updates in a row."""
    scalars = {name: float(value) for name, value in pending.metrics.items()}
    in_a_row = scalars.pop("skipped_in_a_row")
    rate = float(run.experiment.schedule(pending.step - 1))
    run.log.step(pending.step, scalars | {"learning_rate": rate, "data_wait_s": pending.data_wait_s})
    if in_a_row >= run.experiment.max_skipped:
        raise NonFiniteError(
            f"{in_a_row:.0f} updates in a row were not finite, the last at step {pending.step}; the parameters are as "
            f"before them. Lower optimizer.learning_rate or set optimizer.clip_norm, and start from an earlier step"
        )


def save(run: Run, step: int, state: TrainState) -> None:
    """Starts saving a checkpoint."""
    before = time.perf_counter()
    position = {"step": step, "seed": run.config.seed, "fingerprint": run.train_data.fingerprint}
    best = {} if run.log.validation_loss is None else {"validation_loss": run.log.validation_loss}
    run.checkpointer.save(step, state, data=position, config=json.loads(run.config.to_json()), metrics=best)
    run.log.spent("checkpoint_s", time.perf_counter() - before)


class Evaluation:
    """The validation loss on the same first rows of the validation data, compiled and loaded when first used."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._evaluate: jax.stages.Compiled | None = None
        self._batches: list[dict[str, jax.Array]] = []

    def __call__(self, step: int, state: TrainState) -> None:
        """Logs the mean validation loss in nats a token and bits a byte."""
        before = time.perf_counter()
        if self._evaluate is None:
            self._evaluate = self._run.experiment.compile_eval_step()
            self._batches = self._load()
        sums = [self._evaluate(state.params, batch) for batch in self._batches]
        total, weight = np.sum([[float(x) for x in pair] for pair in sums], axis=0)
        loss = float(total / weight)
        bits = loss / math.log(2) / self._run.validation_data.bytes_per_token
        self._run.log.validation(step, loss, bits)
        self._run.log.spent("validation_s", time.perf_counter() - before)

    def _load(self) -> list[dict[str, jax.Array]]:
        ex, data = self._run.experiment, self._run.validation_data
        size = ex.batch.global_size
        count = min(ex.config.eval.num_batches, max(len(data) // size, 1))
        with Batches(data, global_size=size, rows=ex.local_rows, start_step=0, prefetch=1) as batches:
            return [ex.to_devices(next(batches)) for _ in range(count)]


def sample_text(run: Run, state: TrainState) -> str:
    """Returns a prompt continued by the model."""
    settings, tokenizer = run.config.sample, run.train_data.tokenizer
    prompt = tokenizer.encode(settings.prompt)
    length = min(settings.length, run.experiment.model.config.max_len - len(prompt))
    ids = run.experiment.generate(state.params, prompt, length=length, temperature=settings.temperature)
    return tokenizer.decode(ids)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
