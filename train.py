"""Trains a sharded model.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart [--config.a.b=value ...]
    python train.py [--config=configs/quickstart.py] --help    # the flags, and every key of the config

On several machines, start it once per process: SLURM, Open MPI, Kubernetes and Cloud TPU are recognised, or give
`--coordinator`, `--num_processes` and `--process_id`. Exit codes: 0 finished; 75 stopped but resumable (run the same
command again); 2 a mistake in the config, the flags, the data or the work directory; 1 anything else.

`run` is the story of a run. Signals, other processes, errors and exit codes are in runtime/supervisor.py, a step in
training/world.py, and the work between two steps in training/hooks.py.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax

import models
from configs.schema import Config
from elastic.checkpointer import Checkpointer, CheckpointError
from elastic.snapshots import Snapshots
from input_pipeline.noise import with_noise
from runtime.command_line import prepare_output
from runtime.consensus import broadcast, new_key
from runtime.phases import Phase
from runtime.supervisor import Supervisor, supervise
from training import flags, resume
from training.datasets import load_datasets
from training.devices import use_compilation_cache, use_devices
from training.experiment import Experiment, assemble, lay_out, make_plan
from training.hooks import CheckpointHook, Hook, NonFiniteError, Periodic, Profile, Report, RunContext, Validate, every
from training.log import advice, announced, close_log, make_log, prepare_log, say
from training.memory import check_fits, check_step_fits, one_line_if_too_large
from training.optimizer_chain import make_chain
from training.sampling import Sampler
from training.validation import EarlyStopping, Validator, past_losses
from training.weights_tokenizer import check_weights
from training.world import Metrics, make_world


def make_experiment(config: Config) -> Experiment:
    """Returns the parts of a run on all devices; nothing is allocated or compiled."""
    model = models.make_model(config)
    mesh, layout = lay_out(config, jax.devices())
    plan = make_plan(config, model, mesh, layout)
    optimizer = make_chain(config, plan, model.trained_specs())
    return assemble(config, model, plan, optimizer)


def main(
    argv: Sequence[str],
    *,
    ends_process: bool = False,
    hooks: Sequence[Hook] = (),
    make: Callable[[Config], Experiment] = make_experiment,
) -> int:
    """Runs the program and returns its exit code; a user's mistake is one line.

    `hooks` are called after each step, after the run's own hooks; `make` makes the parts of the run from its config.
    """

    def program(supervisor: Supervisor) -> bool:
        options = flags.parse(argv, __doc__ or "", supervisor)
        return options is None or run(options, supervisor, hooks=hooks, make=make)

    prepare_output()
    return supervise(program, expected=(CheckpointError, NonFiniteError), ends_process=ends_process)


def run(
    options: flags.Options,
    supervisor: Supervisor,
    *,
    hooks: Sequence[Hook] = (),
    make: Callable[[Config], Experiment] = make_experiment,
) -> bool:
    """Trains, from the newest state in the run's directory, and returns whether the run is finished.

    If it is not, the run was asked to stop.
    """
    started_s = time.perf_counter()
    resume.check_not_weights(options.config, options.workdir)

    # ------------------------------------------------------------------------------------------- devices and processes
    world = make_world(use_devices(options.config), options.workdir, options.group, supervisor)
    config, workdir, extends = world.config, world.workdir, options.extends
    world.join(options.address)
    use_compilation_cache()
    if world.is_finished(extends=extends):
        return True

    # ---------------------------------------------- build: mesh, model, plan, optimizer and data, checked but not made
    with resume.retry_if_world_too_small(workdir):
        ex = make(config)
        check_fits(ex, options.words)
    data = load_datasets(ex, workdir, supervisor.register)
    validator = Validator(ex, data.validation, config.eval.num_batches * ex.num_shares, supervisor.enter)
    sampler = Sampler(ex, data.tokenizer, config.sample)
    if not resume.has_begun(workdir):
        check_weights(ex, data.tokenizer)  # they are read when nothing was restored
    world.attach(ex)

    # ----------------------------------------------------------------------------------------------------------- resume
    supervisor.enter(Phase.RESTORING)
    world.lock()
    if world.is_finished(extends=extends):  # by the attempt before
        return True
    resume.check_writable(workdir, world.checkpoints)
    is_same_run = partial(resume.is_same_run, extends=extends)
    checkpointer = Checkpointer(world.checkpoints, config.checkpoint, is_same_run=is_same_run, replica=world.replica)
    restores = partial(supervisor.enter, Phase.RESTORING)
    snapshots = Snapshots(workdir, config.elastic.memory_dir, config.elastic.snapshot_every, progress=restores)
    fingerprints = {**data.fingerprints, **ex.base_fingerprint}
    start, state = resume.restore(ex, workdir, checkpointer, snapshots, fingerprints, extends)
    if state is None and not ex.base_fingerprint:  # the initial state is made of the weights
        ex.same_weights()
    supervisor.enter(Phase.READING_FIRST)  # errors of the data are printed before the step is compiled
    world.read(with_noise(data.train, config), start.step)
    supervisor.enter(Phase.PREPARING)
    supervisor.started(nodes=ex.plan.layout.shape.num_nodes)
    prepare_log()
    compares = partial(supervisor.enter, Phase.COMPARING)
    with resume.retry_if_world_too_small(workdir):
        with announced("compiling the step", say), one_line_if_too_large(ex, compares):
            train_step = world.compile()
        compares()
        needs = snapshots.needs(ex.in_files(ex.state_shapes))
        memory = check_step_fits(ex, train_step, needs, restored=state is not None)
    supervisor.enter(Phase.LOADING if ex.has_weights else Phase.PREPARING)
    if state is None:
        with announced("making the initial state", say):
            state = ex.init_state()
    elif ex.plan.frozen:
        with announced("reading the frozen parameters", say):
            state = replace(state, frozen=ex.frozen_params())
    supervisor.enter(Phase.PREPARING)
    data.write_skipped(workdir)
    log = make_log(ex, data.train, workdir, start.step, train_step, started_s, options.config_file)
    with log, checkpointer, snapshots, world:
        resumed = start.described(config.num_steps, workdir, may_join=world.is_awaited)
        examples = config.num_steps * config.batch.global_size
        for line in (*memory, *advice(ex), resumed, *start.warnings, *sampler.warnings, *data.described(examples)):
            log.say(line)
        supervisor.restored(**start.event)  # after this one world's metrics have no later step
        snapshots.begin(start.step, start.extension(config.num_steps))
        supervisor.completed(start.step)

        # ------------------------------------------------------------------------------------- loop, with its hooks
        step, last = start.step, config.num_steps
        metrics: Metrics = {}
        parts = RunContext(
            ex=ex,
            world=world,
            data=data,
            validator=validator,
            log=log,
            checkpointer=checkpointer,
            snapshots=snapshots,
            supervisor=supervisor,
            train_step=train_step,
            fingerprints=fingerprints,
        )
        report = Report(parts)
        losses = broadcast(new_key("validations"), lambda: past_losses(config, workdir, start.step))
        early = EarlyStopping(config.eval.patience, losses)
        checkpoint = CheckpointHook(parts, report)
        profile = Profile(parts, report, step)
        loop = [
            every(1, report),
            every(config.eval.every, Validate(parts, report), at_end=True, done=step),
            every(1, early),
            Periodic(checkpoint.snapshot, due=lambda n: n < last and snapshots.due(n), at_stop=True, done=step),
            every(config.checkpoint.every, checkpoint.save, at_end=True, at_stop=True, done=checkpoint.newest()),
            Periodic(profile, profile.is_due, at_end=True, at_stop=True, done=-1),
            *(hook if isinstance(hook, Periodic) else every(1, hook) for hook in hooks),
        ]
        if world.is_awaited and config.eval.every:
            validator.compile(log.say)  # other replicas would wait for that once this one has entered
        steps = world.steps(state, start.step, log.say) if not early.message else ()
        for step, state, metrics in steps:
            supervisor.enter(Phase.RECORDING)
            for hook in loop:
                hook(step, state, metrics, is_last=step == last)
            if early.message:
                break

        # ----------------------------------------------------------------------------------------------------- close
        report.close()
        supervisor.enter(Phase.CLOSING)
        finished = step == last or bool(early.message)
        for hook in loop:
            hook.close(step, state, metrics, finished=finished)
        sample = None
        if finished and sampler.wanted:
            with announced("sampling", log.say):
                sample = sampler(state.all_params)
        checkpointer.wait()
        snapshots.end(finished=finished)
        close_log(log, ex, finished=finished, sample=sample)
        if early.message:
            log.say(early.message)
        if not finished:
            log.say(f"stopped at step {step}; run the same command again to resume")
        supervisor.stopped(step, finished=finished)
    return finished


if __name__ == "__main__":
    sys.exit(main(sys.argv, ends_process=True))
