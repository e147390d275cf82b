"""Opens and closes the log of a run, with the facts about the experiment that metrics, report and user need."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from configs import losses
from configs.schema import defaults
from input_pipeline import Dataset, ImageDataset
from runtime.files import run_directory
from sharding import drawing, hlo
from sharding.mesh import MeshShape
from training import idle
from training.devices import unused_accelerators
from training.experiment import Experiment
from training.metrics.environment import environment
from training.metrics.run_log import RunLog
from training.metrics.throughput import StepTimer, peak_flops
from training.metrics.units import format_seconds
from training.metrics.writer import import_ahead
from training.overlap import users_xla_flags
from training.registered import CONFIG_FILE


def prepare_log() -> None:
    """Begins to import TensorBoard's package in a thread: it takes seconds, which pass during the compilation."""
    if jax.process_index() == 0:
        import_ahead()


def make_log(
    experiment: Experiment,
    data: Dataset,
    workdir: Path,
    start: int,
    step_fn: jax.stages.Compiled,
    started_s: float,
    config_file: str,
) -> RunLog:
    """Returns the log of the run, with the collectives of the compiled step; `config_file` is the path of its --config.

    The padding of rows of whole documents counts neither as tokens nor as FLOPs.
    """
    config, shape = experiment.config, experiment.plan.layout.shape
    is_independent = config.sharding.replicas == "independent"
    collectives, sent = _collectives(step_fn, shape)
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind)
    rows, filled = config.batch.global_size, 1.0 if isinstance(data, ImageDataset) else data.filled
    unit, units_per_row = (
        ("examples", 1) if isinstance(data, ImageDataset) else ("tokens", filled * config.data.seq_len)
    )
    row = next(iter(data.row_arrays.values()))
    return RunLog(
        workdir,
        enabled=jax.process_index() == 0,
        start_step=start,
        num_steps=config.num_steps,
        log_every=1 if experiment.drifts_apart else config.log_every,  # their steps with rows are chosen before
        sink=config.sink,
        timer=StepTimer(
            rows * units_per_row,
            unit,
            rows * filled * experiment.model.flops_per_row(row.shape),
            peak and peak * shape.num_devices,
        ),
        files={
            run_directory.CONFIG: config.to_dict(),
            run_directory.ENVIRONMENT: environment(
                {
                    CONFIG_FILE: config_file,
                    "devices": f"{shape.num_devices} x {device.device_kind}",
                    "processes": jax.process_count(),
                    "mesh": shape.sizes,
                    "num_params": experiment.model.num_params,
                    "num_trained": experiment.model.num_trained,
                    "xla_flags": users_xla_flags(),
                    "xla_options": experiment.train_options(experiment.memory_of_run),
                }
            ),
            run_directory.COLLECTIVES: collectives,
        },
        constants=sent,
        count_wire=jax.process_count() > 1 or is_independent,
        started_s=started_s,
        may_join=is_independent,
    )


def advice(experiment: Experiment) -> list[str]:
    """Returns lines about settings that waste devices, have no effect on them, or raise the loss."""
    config = experiment.config
    return [
        *unused_accelerators(config),
        *experiment.batches.described,
        *idle.described(config, experiment.plan.layout),
        *losses.described(config.to_dict(), defaults()),
    ]


def close_log(log: RunLog, experiment: Experiment, *, finished: bool, sample: str | None) -> None:
    """Writes summary and report, with the sample of text, if any.

    A finished run also gets a picture of its mesh. That takes a second, and a run that is asked to stop has few.
    """
    mesh_png = drawing.mesh_png(experiment.plan.layout) if finished and jax.process_index() == 0 else None
    log.close("finished" if finished else "interrupted", sample=sample, mesh_png=mesh_png)


def _collectives(step_fn: jax.stages.Compiled, shape: MeshShape) -> tuple[dict[str, object], dict[str, int]]:
    """Returns the content of collectives.json, and the bytes for the metrics: none, if the program cannot be read.

    XLA promises nothing about its text, so an error in reading it does not end the run.
    """
    try:
        collectives = hlo.read_collectives(step_fn.as_text() or "", shape)
        return hlo.as_report(collectives), hlo.bytes_per_step(collectives)
    except Exception as error:
        why = f"the bytes of the collectives are not known: {' '.join(str(error).split()) or type(error).__name__}"
        if jax.process_index() == 0:
            print(f"warning: {why}", file=sys.stderr)
        return {"problem": why}, {}


def say(text: str) -> None:
    """Prints a line in process 0."""
    if jax.process_index() == 0:
        print(text, flush=True)


@contextmanager
def announced(work: str, say: Callable[[str], None]) -> Iterator[None]:
    """Announces its body, which may take minutes and prints nothing itself, and then its duration."""
    before = time.perf_counter()
    say(f"{work} ...")
    yield
    say(f"{work}: done after {format_seconds(time.perf_counter() - before)}")
