"""`search`: runs whose values Optuna chooses, and that it prunes. Only this module uses Optuna.

The study is in the sweep's directory, so that the same command continues it. An interrupted trial is requested again.
It has the same values and therefore is the same run, which resumes.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    check_distribution_compatibility,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from configs.overrides import Overrides, Range, three_digits
from launch.sweeps.plan import Run, SweepFile
from launch.sweeps.pool import POLL_EVERY_S, Launcher, SweepJob, claimed, running, stopped_at_end
from launch.sweeps.records import Record, RunState, is_finished, missing_metric, record
from runtime.files import run_directory
from training.metrics.run_files import read_run, series

STUDY_FILE = "optuna.log"
ERROR = "error"  # attribute of a failed trial; a failed trial without it was interrupted
STATES = {
    TrialState.COMPLETE: RunState.FINISHED,
    TrialState.PRUNED: RunState.PRUNED,
    TrialState.RUNNING: RunState.STOPPED,
}
Planner = Callable[[Overrides], Run]  # raises ValueError for values that do not fit together


@dataclass(kw_only=True)
class TrialJob(SweepJob):
    """A job and the trials with its values. The first trial started it, and all trials end as it does."""

    trials: list[Trial]
    step: int = 0  # the last step reported to Optuna
    size_bytes: int = 0  # size of the metrics reported to Optuna
    is_pruned: bool = False


@dataclass(kw_only=True)
class Search:
    """A running search: its study, and the job of each trial of this program."""

    file: SweepFile
    study: optuna.Study
    plan: Planner
    jobs: list[TrialJob] = field(default_factory=list)

    def done(self) -> int:
        """Returns the number of trials that have ended without an interruption."""
        return sum(_has_ended(trial) for trial in self.study.get_trials(deepcopy=False))

    def begin(self, launch: Launcher, lock: int) -> None:
        """Starts the run of a new trial.

        The trial joins a running job with the same values, and ends at once without a valid run.
        """
        trial = self.study.ask(_distributions(self.file))
        try:
            run = self.plan(_values(self.file, trial.params))
        except ValueError as error:
            self._fail(trial, str(error))
            return
        if same := next((job for job in running(self.jobs) if job.run.name == run.name), None):
            same.trials.append(trial)
            return
        job = TrialJob(run=run, state=RunState.FINISHED if is_finished(run) else RunState.WAITING, trials=[trial])
        self.jobs.append(job)
        if job.state == RunState.FINISHED:
            self._tell(job)
        else:
            job.start(launch, lock)

    def watch(self, job: TrialJob, launch: Launcher, lock: int) -> None:
        """Reports a run's metric and end to Optuna. Stops the run if Optuna prunes it."""
        self._report(job)
        assert job.process is not None
        if not job.is_pruned and job.trials[0].should_prune():
            job.is_pruned = True
            job.process.send_signal(signal.SIGINT)
        job.look(stopping=job.is_pruned)
        if job.state == RunState.WAITING:  # stopped resumable without being asked
            job.start(launch, lock)
        elif job.state != RunState.RUNNING:
            self._tell(job)

    def _report(self, job: TrialJob) -> None:
        """Reports new values of the metric to the first trial, if the file has grown."""
        metrics = job.run.run_dir / run_directory.METRICS
        size_bytes = metrics.stat().st_size if metrics.exists() else 0
        if size_bytes == job.size_bytes:
            return
        job.size_bytes = size_bytes
        for step, value in series(read_run(job.run.run_dir).rows, self.file.metric):
            if step > job.step:
                job.trials[0].report(value, int(step))
                job.step = int(step)

    def _tell(self, job: TrialJob) -> None:
        """Ends the trials of a job that has ended.

        ValueError if it finished without the metric, and so did all before it.
        """
        found = record(job.run, job.state, job.error, self.file.metric)
        metric = found.metric
        measured = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if job.state == RunState.FINISHED and not measured and (lacking := missing_metric(found, self.file.metric)):
            raise ValueError(lacking)  # its trials are requested again, and count once METRIC is right
        if job.state == RunState.STOPPED:
            job.state = RunState.PRUNED
        for trial in job.trials:
            if job.state == RunState.PRUNED:
                self.study.tell(trial, state=TrialState.PRUNED)
            elif job.state == RunState.FINISHED and metric is not None and metric == metric:
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
    show: Callable[[Sequence[SweepJob]], None],
) -> tuple[bool, list[Record]]:
    """Runs trials until `count` have ended, including trials of earlier calls.

    Returns whether they have, and a record of each run. On Ctrl-C, running ones save and stop.
    """
    with claimed(workdir) as lock:
        going = Search(file=file, study=_study(file, workdir), plan=plan)
        _check_same_runs(going, workdir)
        with stopped_at_end(going.jobs, show):
            while going.done() < count or running(going.jobs):
                for job in running(going.jobs):
                    going.watch(job, launch, lock)
                now = running(going.jobs)
                if len(now) < workers and sum(len(job.trials) for job in now) < count - going.done():
                    going.begin(launch, lock)
                show(going.jobs)
                time.sleep(POLL_EVERY_S)
        return going.done() >= count, _records(going)


def corners(distributions: Mapping[str, object]) -> list[Overrides]:
    """Returns points with each end of each range and each option, to be checked before any run starts."""
    first = {key: _ends(distribution)[0] for key, distribution in distributions.items()}
    return [{**first, key: value} for key, found in distributions.items() for value in _ends(found)]


def _study(file: SweepFile, workdir: Path) -> optuna.Study:
    """Returns the study in the directory, with no running trials. ValueError if it belongs to another SEARCH."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(workdir / STUDY_FILE))),
        study_name=file.path.stem,
        direction="minimize" if file.goal == "min" else "maximize",
        pruner=optuna.pruners.MedianPruner(),
        load_if_exists=True,
    )
    _check_same_search(file, study, workdir)
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
    return study


def _check_same_search(file: SweepFile, study: optuna.Study, workdir: Path) -> None:
    """Raises ValueError if a key of earlier trials is missing or has other options. The ends of a range may change."""
    now = _distributions(file)
    before = {key: old for trial in study.get_trials(deepcopy=False) for key, old in trial.distributions.items()}
    for key, old in before.items():
        try:
            check_distribution_compatibility(old, now[key])
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{workdir} holds a search with SEARCH[{key!r}] from {old}; choose another --workdir"
            ) from error


def _check_same_runs(search: Search, workdir: Path) -> None:
    """Raises ValueError if the finished trials belong to another METRIC, GOAL or base config."""
    file, study = search.file, search.study
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    for key, now in (("METRIC", file.metric), ("GOAL", file.goal)):
        if complete and (old := study.user_attrs.get(key, now)) != now:
            raise ValueError(f"{workdir} holds a search with {key}={old!r}; choose another --workdir")
        study.set_user_attr(key, now)
    runs = [search.plan(_values(file, trial.params)).run_dir for trial in complete]
    if runs and not any(run.exists() for run in runs):  # their names contain a hash of all values
        raise ValueError(
            f"{workdir} holds a search with another base config, or without its runs: there is no {runs[0].name}; "
            "choose another --workdir"
        )


def _distributions(file: SweepFile) -> dict[str, BaseDistribution]:
    """Returns the distributions of SEARCH for Optuna."""
    return {
        key: FloatDistribution(found.low, found.high, log=found.log)
        if isinstance(found, Range)
        else CategoricalDistribution(found.options)
        for key, found in file.search.items()
    }


def _values(file: SweepFile, params: Mapping[str, Any]) -> Overrides:
    """Returns the values that Optuna chose, with numbers rounded to three digits."""
    return {key: three_digits(x) if isinstance(file.search[key], Range) else x for key, x in params.items()}


def _ends(distribution: Any) -> Sequence[Any]:
    return (distribution.low, distribution.high) if isinstance(distribution, Range) else distribution.options


def _has_ended(trial: FrozenTrial) -> bool:
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED) or ERROR in trial.user_attrs


def _records(search: Search) -> list[Record]:
    """Returns a record of each trial's run, including earlier calls, in the order of their last trial."""
    found: dict[str, Record] = {}
    for trial in search.study.get_trials():
        if not (_has_ended(trial) or trial.state == TrialState.RUNNING):
            continue
        try:
            run = search.plan(_values(search.file, trial.params))
        except ValueError:  # it never ran
            continue
        state = STATES.get(trial.state, RunState.FAILED)
        found[run.name] = record(run, state, trial.user_attrs.get(ERROR, ""), search.file.metric)
    return list(found.values())
