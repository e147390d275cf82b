"""`search`: runs whose values Optuna chooses, and that it prunes. Only this module uses Optuna.

The study is in the sweep's directory, so that the same command goes on with it. A trial that was interrupted is asked
for again: it has the same values, so it is the same run, which resumes.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from configs.overrides import Overrides, Range, three_digits
from metrics.run_files import read_run, series
from metrics.writer import METRICS_FILE
from sweeps.plan import Run, SweepFile
from sweeps.pool import POLL_EVERY_S, Job, Launcher, claimed, running, stop
from sweeps.records import Record, State, is_finished, record

STUDY_FILE = "optuna.log"
ERROR = "error"  # attribute of a trial that failed; without it a failed one was interrupted
STATES = {TrialState.COMPLETE: State.FINISHED, TrialState.PRUNED: State.PRUNED, TrialState.RUNNING: State.STOPPED}
Planner = Callable[[Overrides], Run]  # ValueError for values that do not go together


@dataclass(kw_only=True)
class Search:
    """A search that is going on: its study, and the job of each trial of this program."""

    file: SweepFile
    study: optuna.Study
    plan: Planner
    jobs: list[Job] = field(default_factory=list)
    trials: dict[str, Trial] = field(default_factory=dict)  # of the jobs that run, by name
    reported: dict[str, int] = field(default_factory=dict)  # the last step that a run's trial knows
    pruned: set[str] = field(default_factory=set)

    def done(self) -> int:
        """Returns the number of trials that have ended by themselves."""
        return sum(_has_ended(trial) for trial in self.study.get_trials(deepcopy=False))

    def begin(self, launch: Launcher, lock: int) -> None:
        """Starts the run of a new trial; a trial without one ends at once."""
        trial = self.study.ask()
        try:
            run = self.plan({key: _suggested(trial, key, self.file.search[key]) for key in self.file.search})
            if run.name in self.trials:
                raise ValueError(f"{run.name} is already running for another trial")
        except ValueError as error:
            self._fail(trial, str(error))
            return
        job = Job(run=run, state=State.WAITING)
        self.jobs.append(job)
        self.trials[run.name] = trial
        if is_finished(run):
            job.state = State.FINISHED
            self._tell(job)
        else:
            job.start(launch, lock)

    def watch(self, job: Job, launch: Launcher, lock: int) -> None:
        """Tells Optuna what a run has measured and how it ended; stops it if it is not worth going on."""
        name = job.run.name
        self._report(job)
        assert job.process is not None
        if name not in self.pruned and self.trials[name].should_prune():
            self.pruned.add(name)
            job.process.send_signal(signal.SIGINT)
        job.look(stopping=name in self.pruned)
        if job.state == State.WAITING:  # stopped resumable by itself
            job.start(launch, lock)
        elif job.state != State.RUNNING:
            self._tell(job)

    def _report(self, job: Job) -> None:
        name = job.run.name
        if not (job.run.run_dir / METRICS_FILE).exists():
            return
        for step, value in series(read_run(job.run.run_dir).rows, self.file.metric):
            if step > self.reported.get(name, 0):
                self.trials[name].report(value, int(step))
                self.reported[name] = int(step)

    def _tell(self, job: Job) -> None:
        """Ends the trial of a job that has ended."""
        trial = self.trials.pop(job.run.name)
        if job.state == State.STOPPED:
            job.state = State.PRUNED
            self.study.tell(trial, state=TrialState.PRUNED)
            return
        metric = record(job.run, job.state, job.error, self.file.metric).metric
        if job.state == State.FINISHED and metric is not None and metric == metric:
            self.study.tell(trial, metric)
        else:
            self._fail(trial, job.error or f"{self.file.metric} is not a number")

    def _fail(self, trial: Trial, error: str) -> None:
        trial.set_user_attr(ERROR, error)
        self.study.tell(trial, state=TrialState.FAIL)


def search(
    file: SweepFile,
    count: int,
    *,
    plan: Planner,
    workers: int,
    workdir: Path,
    launch: Launcher,
    show: Callable[[Sequence[Job]], None],
) -> tuple[bool, list[Record]]:
    """Runs trials until `count` have ended, those of earlier calls included.

    Returns whether they have, and a record of each run. On Ctrl-C, running ones save and stop.
    """
    with claimed(workdir) as lock:
        going = Search(file=file, study=_study(file, workdir), plan=plan)
        try:
            while going.done() < count or running(going.jobs):
                for job in running(going.jobs):
                    going.watch(job, launch, lock)
                if len(running(going.jobs)) < min(workers, count - going.done()):
                    going.begin(launch, lock)
                show(going.jobs)
                time.sleep(POLL_EVERY_S)
        except KeyboardInterrupt:
            pass
        finally:
            stop(going.jobs, show)
        return going.done() >= count, _records(going)


def corners(distributions: Mapping[str, Any]) -> list[Overrides]:
    """Returns points with each end of each range and each option, to be checked before anything runs."""
    first = {key: _ends(distribution)[0] for key, distribution in distributions.items()}
    return [{**first, key: value} for key, found in distributions.items() for value in _ends(found)]


def _study(file: SweepFile, workdir: Path) -> optuna.Study:
    """Returns the study in the directory, in which nothing runs."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(workdir / STUDY_FILE))),
        study_name=file.path.stem,
        direction="minimize" if file.goal == "min" else "maximize",
        pruner=optuna.pruners.MedianPruner(),
        load_if_exists=True,
    )
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
    return study


def _suggested(trial: Trial, key: str, distribution: Any) -> Any:
    """Returns Optuna's choice of a value, a number with three digits."""
    if isinstance(distribution, Range):
        return three_digits(trial.suggest_float(key, distribution.low, distribution.high, log=distribution.log))
    return trial.suggest_categorical(key, distribution.options)


def _ends(distribution: Any) -> Sequence[Any]:
    return (distribution.low, distribution.high) if isinstance(distribution, Range) else distribution.options


def _has_ended(trial: FrozenTrial) -> bool:
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED) or ERROR in trial.user_attrs


def _records(search: Search) -> list[Record]:
    """Returns a record of the run of each trial, also of those of earlier calls, in the order of their last trial."""
    found: dict[str, Record] = {}
    for trial in search.study.get_trials():
        if not (_has_ended(trial) or trial.state == TrialState.RUNNING):
            continue
        values = {
            key: three_digits(x) if isinstance(search.file.search[key], Range) else x for key, x in trial.params.items()
        }
        try:
            run = search.plan(values)
        except ValueError:  # it never ran
            continue
        state = STATES.get(trial.state, State.FAILED)
        found[run.name] = record(run, state, trial.user_attrs.get(ERROR, ""), search.file.metric)
    return list(found.values())
