"""Trains a sharded model.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart [--config.a.b=value ...]
    python train.py [--config=configs/quickstart.py] --help    # the flags, and every key of the config

On several machines, start it once per process: SLURM, Open MPI and Kubernetes are recognised, or give `--coordinator`,
`--num_processes` and `--process_id`. Exit codes: 0 finished; 75 stopped but resumable (run the same command again);
2 a mistake in the config, the flags, the data or the work directory; 1 anything else.

`run` is the story of a run. What surrounds it (signals, other processes, errors, exit codes) is in
runtime/supervisor.py; what happens between two steps is in training/hooks.py.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags

from configs import command_line, losses
from configs.schema import Config, defaults
from elastic import check_path
from elastic.checkpointer import Checkpointer, CheckpointError
from elastic.snapshots import Snapshots
from runtime import launchers
from runtime.command_line import prepare_output
from runtime.events import Event
from runtime.files import run_directory
from runtime.files.paths import user_path
from runtime.phases import Phase
from runtime.supervisor import Supervisor, supervise
from runtime.workdir_lock import workdir_lock
from sharding import drawing
from training import groups, idle, resume
from training.datasets import load_datasets
from training.devices import unused_gpus, use_compilation_cache, use_devices
from training.experiment import Experiment, make_experiment
from training.hooks import CheckpointHook, Hook, Metrics, NonFiniteError, Periodic, Report, Validate, every
from training.independent import Independent
from training.log import announced, make_log, say
from training.memory import check_fits, check_step_fits
from training.metrics.writer import import_ahead
from training.sampling import Sampler
from training.steps import OneWorld, Steps
from training.validation import Validator
from training.weights_tokenizer import check_tokenizer


def main(
    argv: Sequence[str],
    *,
    ends_process: bool = False,
    hooks: Sequence[Hook] = (),
    make: Callable[[Config], Experiment] = make_experiment,
) -> int:
    """Runs the program and returns its exit code; a user's mistake is one line.

    `hooks` are called after each step, after those of the run; `make` makes the parts of the run from its config.
    """
    prepare_output()
    program = partial(from_command_line, argv, hooks=hooks, make=make)
    return supervise(program, expected=(CheckpointError, NonFiniteError), ends_process=ends_process)


def from_command_line(argv: Sequence[str], supervisor: Supervisor, **parts: Any) -> bool:
    """Runs what `argv` (program first) says and returns whether it is finished; `parts` are those of `run`."""
    supervisor.shows_tracebacks = "--debug" in argv
    values = command_line.new_flags()
    flags.DEFINE_string("workdir", None, "the run's directory (default: runs/NAME-OF-CONFIG)", flag_values=values)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0", flag_values=values)
    flags.DEFINE_integer("num_processes", None, "number of processes", flag_values=values)
    flags.DEFINE_integer("process_id", None, "number of this process", flag_values=values)
    flags.DEFINE_integer("group", None, "number of this replica (sharding.replicas=independent)", flag_values=values)
    flags.DEFINE_boolean("extend", False, "num_steps may be above that of the run in workdir", flag_values=values)
    flags.DEFINE_boolean("debug", False, "show tracebacks", flag_values=values)
    if command_line.asks_for_help(argv):
        print(command_line.help_text(__doc__ or "", argv, values))
        return True
    config = command_line.parse(argv, values)
    supervisor.shows_tracebacks = values.debug
    if values.workdir == "":
        raise ValueError("--workdir= names no folder; give one, or leave --workdir out")
    workdir = user_path(values.workdir or Path("runs") / command_line.config_name(values))
    check_path(workdir)
    address = launchers.Address(
        coordinator=values.coordinator, num_processes=values.num_processes, process_id=values.process_id
    )
    words = command_line.words_of_config(argv)
    group = groups.number(config, values.group)
    one_run = {"address": address, "words": words, "group": group, "extends": values.extend}
    return run(config, workdir, supervisor, **one_run, **parts)


def run(
    config: Config,
    workdir: Path,
    supervisor: Supervisor,
    *,
    address: launchers.Address = launchers.FROM_ENVIRONMENT,
    words: Sequence[str] = (),
    group: int | None = None,
    extends: bool = False,
    hooks: Sequence[Hook] = (),
    make: Callable[[Config], Experiment] = make_experiment,
) -> bool:
    """Trains, from where `workdir` is, and returns whether the run is finished; if not, it was asked to stop.

    `words` of the command line describe the config: other programs take them too. `group` is the number of an
    independent replica, which has a directory of its own in `workdir`. `extends`: num_steps may have been raised since.
    """
    started_s = time.perf_counter()
    resume.check_not_weights(config, workdir)
    whole, (config, workdir) = workdir, groups.of_group(config, workdir, group)

    # ------------------------------------------------------------------------------------------- devices and processes
    config = use_devices(config)
    elastic = config.elastic
    supervisor.join(
        address,
        workdir=workdir,
        silence_s=elastic.silence_s,
        stall_s=elastic.stall_s,
        is_awaited=group is not None,
    )
    use_compilation_cache()
    if group is None and resume.is_finished(config, workdir, extends=extends):
        return True

    # --------------------------------------------------- build: mesh, model, optimizer and data, checked but not made
    ex = build(config, workdir, make, words)
    data = load_datasets(ex, workdir, supervisor.register)
    validator = Validator(ex, data.validation, config.eval.num_batches * ex.num_shares, supervisor.enter)
    sampler = Sampler(ex, data.tokenizer, config.sample)
    if not resume.has_begun(workdir):
        ex.open_weights()  # only the headers: they are read when nothing was restored
        ex.open_adapters()
        if data.tokenizer:
            check_tokenizer(config, data.tokenizer)

    steps: Steps = OneWorld(ex, supervisor.enter)
    if group is not None:
        steps = Independent(ex, supervisor, number=group, workdir=whole)

    # ----------------------------------------------------------------------------------------------------------- resume
    supervisor.enter(Phase.RESTORING)
    supervisor.register(workdir_lock(workdir, others_go_on=group is not None))
    if group is not None:
        groups.check_number_is_free(whole, group)
    if group is None and resume.is_finished(config, workdir, extends=extends):  # by the attempt before
        return True
    resume.check_writable(workdir, whole / run_directory.CHECKPOINTS)
    checkpointer = Checkpointer(
        whole / run_directory.CHECKPOINTS,
        config.checkpoint,
        is_same_run=partial(resume.is_same_run, extends=extends),
        replica=group,
    )
    restores = partial(supervisor.enter, Phase.RESTORING)
    snapshots = Snapshots(workdir, elastic.memory_dir, elastic.snapshot_every, progress=restores)
    fingerprints = {**data.fingerprints, **ex.base_fingerprint}
    start = resume.restore(ex, workdir, checkpointer, snapshots, fingerprints, extends)
    if not (start.restored or ex.base_fingerprint):  # the initial state is made of them
        ex.same_weights()
    supervisor.enter(Phase.READING_FIRST)  # what the data lack is said before the step is compiled
    batches = steps.read(data.train, start.step)
    supervisor.register(batches)
    steps.wait_for_data()
    supervisor.enter(Phase.PREPARING)
    supervisor.started(nodes=ex.plan.layout.shape.num_nodes)
    if jax.process_index() == 0:
        import_ahead()  # beside the compilation
    with announced("compiling the step", say):
        step_fn = steps.compile()
    supervisor.enter(Phase.COMPARING)
    with resume.retry_if_world_too_small(workdir):
        needs = snapshots.needs(ex.state_shapes.checkpoint_state)
        taken = check_step_fits(ex, step_fn, needs, restored=start.restored is not None)
    supervisor.enter(Phase.LOADING if ex.has_weights else Phase.PREPARING)
    if start.restored:
        state = start.restored.state
        start = replace(start, restored=replace(start.restored, state=None))  # a replica that joins takes another one
        if ex.plan.frozen:
            with announced("reading the frozen parameters", say):
                state = replace(state, frozen=ex.frozen_params())
    else:
        with announced("making the initial state", say):
            state = ex.init_state()
    supervisor.enter(Phase.PREPARING)
    config_file = command_line.config_file(words)
    log = make_log(ex, data.train, workdir, start.step, step_fn, started_s, config_file)
    with log, checkpointer, snapshots, batches:
        examples = config.num_steps * config.batch.global_size
        advice = (
            *unused_gpus(config),
            *ex.batches.described,
            *idle.described(config, ex.plan.layout),
            *losses.described(config.to_dict(), defaults()),
        )
        at_start = (*taken, *advice, start.described(config.num_steps, workdir, may_join=group is not None))
        for line in (*at_start, *sampler.warnings, *data.described(examples)):
            log.say(line)
        supervisor.events.write(Event.RESTORED, **start.event)  # after this one world's metrics have no later step
        snapshots.begin(start.step, start.extension(config.num_steps))
        supervisor.completed(start.step)

        # ------------------------------------------------------------------------------------- loop, with its hooks
        step, last = start.step, config.num_steps
        metrics: Metrics = {}
        report = Report(ex, log, supervisor, steps, data)
        validate = Validate(validator=validator, log=log, report=report, supervisor=supervisor)
        keeper = CheckpointHook(
            log=log,
            report=report,
            checkpointer=checkpointer,
            snapshots=snapshots,
            supervisor=supervisor,
            state_for_checkpoint=steps.state_for_checkpoint,
            config=config.to_dict(),
            position={"seed": config.seed, **fingerprints},
        )
        loop = [
            every(1, report),
            every(config.eval.every, validate, at_end=True, done=step),
            Periodic(keeper.snapshot, due=lambda n: n < last and snapshots.due(n), at_stop=True, done=step),
            every(config.checkpoint.every, keeper.save, at_end=True, at_stop=True, done=keeper.saved()),
            *(hook if isinstance(hook, Periodic) else every(1, hook) for hook in hooks),
        ]
        if group is not None and config.eval.every:
            validator.compile(log.say)  # the others would wait for that once this replica has entered
        steps.begin(step, log.say)
        while step < last and not steps.can_stop(step, asked=supervisor.stop_requested()):
            if (done := steps(state, step)) is None:
                continue
            state, metrics, step = done
            supervisor.enter(Phase.RECORDING)
            for hook in loop:
                hook(step, state, metrics, is_last=step == last)

        # ----------------------------------------------------------------------------------------------------- close
        report.close()
        supervisor.enter(Phase.CLOSING)
        finished = step == last
        steps.end(step, state)
        for hook in loop:
            hook.close(step, state, metrics, finished=finished)
        sample = None
        if finished and sampler.wanted:
            with announced("sampling", log.say):
                sample = sampler(state.all_params)
        checkpointer.wait()
        snapshots.end(finished=finished)
        # a picture takes a second, and who is asked to stop has few
        mesh_png = drawing.mesh_png(ex.plan.layout) if finished and jax.process_index() == 0 else None
        log.close("finished" if finished else "interrupted", sample=sample, mesh_png=mesh_png)
        if not finished:
            log.say(f"stopped at step {step}; run the same command again to go on")
        supervisor.events.write(Event.STOPPED, step=step, why="finished" if finished else "asked to stop")
    return finished


def build(config: Config, workdir: Path, make: Callable[[Config], Experiment], words: Sequence[str]) -> Experiment:
    """Returns the parts of the run, after a check that its state fits the devices; `words` are those of the config."""
    with resume.retry_if_world_too_small(workdir):
        ex = make(config)
        check_fits(ex, words)
    return ex


if __name__ == "__main__":
    sys.exit(main(sys.argv, ends_process=True))
