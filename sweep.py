"""Runs many configs: the runs that a sweep file names, and compares them.

    python sweep.py --config=configs/sweeps/X.py [--sweep=lr,seed] [--workers=2] [--workdir=runs/sweeps/X] [--dry_run]
        [--emulate="--nodes=4 --devices_per_node=2 --rate=1gbit"] [--slurm="--partition=gpu --nodes=2"]
        [--ray=ADDRESS|local] [--search=N]

Each run is train.py in a directory named by the content of its config, so that the same command runs only the missing
runs. Writes `results.csv`, `results.md` and `index.html`. Exit codes: 0 all runs finished, or the SLURM array is
submitted; 75 stopped, the same command continues; 2 a mistake in the file or the flags; 1 a run failed,
or the machine.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from configs.overrides import Overrides
from launch.sweeps import slurm
from launch.sweeps.check import check_runs
from launch.sweeps.live import Live
from launch.sweeps.plan import PROGRAM, Run, SweepFile, load_file, plan, points
from launch.sweeps.pool import OUTPUT_FILE, Launcher, SweepJob, claimed, last_error, run_all, start_here
from launch.sweeps.records import Record, RunState, best, is_finished, metric_text, missing_metric, record
from launch.sweeps.report import write_report
from runtime.command_line import OneLineParser, check_installed, complain, make_folder, named_path, prepare_output
from runtime.exit_codes import ExitCode
from runtime.files import atomic


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The validated sweep of a command line."""

    options: argparse.Namespace
    file: SweepFile
    runs: list[Run]
    plan: Callable[[Iterable[Overrides]], list[Run]]  # further runs
    workdir: Path


def main(argv: Sequence[str], *, program: str = PROGRAM) -> int:
    """Runs the sweep, whose runs are processes of `program`; returns the exit code. A user's mistake is one line."""
    prepare_output()
    for number in (signal.SIGINT, signal.SIGTERM):  # both like Ctrl-C, also where a shell has it ignored
        signal.signal(number, signal.default_int_handler)
    try:
        if any(word.startswith("--config.") for word in argv):
            raise ValueError("sweep.py takes no --config.KEY; put it into the sweep file's get_config()")
        options = parser().parse_args(argv[1:])
        sweep = make_sweep(options, program)
        if options.dry_run:
            return show_plan(sweep)
        make_folder(sweep.workdir, "--workdir")
        if options.slurm is not None:
            return run_on_slurm(sweep)
        check_not_queued(sweep.workdir)
        with launcher(options) as (launch, workers):
            return (run_here if options.search is None else run_search)(sweep, launch, workers)
    except (ValueError, OSError) as error:
        return complain(error)
    except KeyboardInterrupt:
        return ExitCode.RESUMABLE


def run(
    config: str,
    overrides: Iterable[Overrides],
    *,
    workdir: Path,
    workers: int = 1,
    emulate: str = "",
    metric: str = "validation_loss",
    program: str = PROGRAM,
) -> list[Record]:
    """Runs a config file with each of the overrides, in this order, and returns a record of each run.

    `repetition` in the overrides distinguishes runs of the same config. Finished runs are not run again. Raises
    ValueError for a mistake in the overrides, KeyboardInterrupt if it was interrupted.
    """
    runs = plan(config, overrides, workdir=workdir, emulate=emulate, program=program)
    check_runs(runs)
    check_not_queued(workdir)
    with Live(metric) as live:
        jobs = run_all(runs, workers=workers, workdir=workdir, show=live.show)
    if left(jobs):
        raise KeyboardInterrupt
    return [record(job.run, job.state, job.error, metric) for job in jobs]


# ------------------------------------------------------------------------------------------- the command line


def parser() -> OneLineParser:
    """Returns the parser of the flags."""
    flags = OneLineParser(prog="sweep.py", description="Runs the configs of a sweep file.")
    flags.add_argument("--config", required=True, help="configs/sweeps/X.py")
    flags.add_argument("--sweep", default="", help="names of the file's sweeps to combine (default: all)")
    flags.add_argument(
        "--workers", type=int, help="runs at a time (default: 1; as many as fit with --ray; no limit in SLURM)"
    )
    flags.add_argument("--workdir", type=named_path, help="where the runs' directories are (default: runs/sweeps/X)")
    flags.add_argument("--emulate", help="options of launch.emulate; they override those of the file")
    flags.add_argument("--slurm", help="options of sbatch: the runs become tasks of an array")
    flags.add_argument("--ray", metavar="ADDRESS", help="of a Ray cluster that runs them, or local")
    flags.add_argument("--search", type=int, metavar="N", help="N runs with values that Optuna chooses from SEARCH")
    flags.add_argument(
        "--dry_run", action="store_true", help="only show the runs; with --slurm, also report and write its files"
    )
    return flags


def make_sweep(options: argparse.Namespace, program: str) -> Sweep:
    """Validates the file and the flags before any run starts, and lists the runs."""
    file = load_file(options.config)
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers={options.workers} must be at least 1")
    if options.search is None:
        wanted = points(file, [name for name in options.sweep.split(",") if name])
    else:
        wanted = points_of_search(file, options)
    workdir = options.workdir or Path("runs/sweeps") / file.path.stem
    emulate = f"{file.emulate} {options.emulate or ''}"
    planned = partial(plan, options.config, workdir=workdir, emulate=emulate, program=program)
    runs = planned(wanted)
    if options.slurm is not None and any(run.emulate for run in runs):
        raise ValueError("--slurm and the emulated cluster exclude each other; the sweep sets options of the latter")
    if options.ray is not None and (options.slurm is not None or any(run.emulate for run in runs)):
        raise ValueError("--ray excludes --slurm and the emulated cluster; choose one of them")
    check_runs(runs)
    if len(runs) < len(wanted) and options.search is None:
        print(f"{len(wanted) - len(runs)} of {len(wanted)} runs have the config of another one and are left out")
    return Sweep(options=options, file=file, runs=runs, plan=planned, workdir=workdir)


def points_of_search(file: SweepFile, options: argparse.Namespace) -> list[Overrides]:
    """Returns the end points of the search space of `--search`. ValueError if it cannot search the file."""
    check_installed("optuna", "--search")
    if options.search < 1 or options.sweep or options.slurm is not None:
        raise ValueError(f"--search={options.search} must be at least 1, and takes neither --sweep nor --slurm")
    if not file.search:
        raise ValueError(f"--search: {file.path.name} has no SEARCH, such as {{'seed': choice(0, 1)}}")
    from launch.sweeps.search import corners

    return corners(file.search)


# ------------------------------------------------------------------------------------------------ launchers


def show_plan(sweep: Sweep) -> int:
    """Prints the planned runs and their commands; with --slurm also the results so far."""
    for run in sweep.runs:
        print(f"{'finished' if is_finished(run) else 'to do':8}  {run.name}\n          {shlex.join(run.command)}")
    todo, options = missing(sweep.runs), sweep.options
    if options.search is not None:
        print(f"these are the ends of what {options.search} runs choose from, in {sweep.workdir}")
        return 0
    print(f"{len(sweep.runs)} runs, {len(todo)} to do, in {sweep.workdir}")
    if options.slurm is not None and (job := report_on_slurm(sweep)):
        print(f"job {job} runs them already")  # its tasks read their lines of runs.txt when they begin
    elif options.slurm is not None and todo:
        print(f"wrote {slurm.write_array(todo, sweep.workdir, options=options.slurm, workers=options.workers)}")
    return 0


@contextmanager
def launcher(options: argparse.Namespace) -> Iterator[tuple[Launcher, int]]:
    """Yields a function that starts runs (locally or in Ray), and the number of runs at a time."""
    if options.ray is None:
        yield start_here, options.workers or 1
        return
    check_installed("ray", "--ray")
    from launch.sweeps.ray_runs import connected

    with connected(options.ray) as runs:
        yield runs, min(options.workers or runs.capacity, runs.capacity)


def run_here(sweep: Sweep, launch: Launcher, workers: int) -> int:
    """Runs the missing runs, waits for them, writes the report and returns the exit code."""
    with Live(sweep.file.metric) as live:
        jobs = run_all(sweep.runs, workers=workers, workdir=sweep.workdir, show=live.show, launch=launch)
    report(sweep, [record(job.run, job.state, job.error, sweep.file.metric) for job in jobs])
    if left(jobs):
        print(f"stopped with {len(left(jobs))} of {len(jobs)} runs to do; run the same command again to resume")
        return ExitCode.RESUMABLE
    return 1 if any(job.state == RunState.FAILED for job in jobs) else 0


def run_search(sweep: Sweep, launch: Launcher, workers: int) -> int:
    """Runs the requested number of trials, writes the report and returns the exit code."""
    from launch.sweeps.search import search

    with Live(sweep.file.metric) as live:
        enough, records = search(
            sweep.file,
            sweep.options.search,
            plan=lambda overrides: sweep.plan([overrides])[0],
            workers=workers,
            workdir=sweep.workdir,
            launch=launch,
            show=live.show,
        )
    if records:
        report(sweep, records)
    if not enough:
        print("stopped; run the same command again to resume")
        return ExitCode.RESUMABLE
    return 1 if any(r.state == RunState.FAILED for r in records) else 0


def check_not_queued(workdir: Path) -> None:
    """Raises ValueError if the sweep's array is in SLURM's queue: its tasks train in the same directories."""
    if job := slurm.queued_job(workdir):
        raise ValueError(
            f"job {job} is in SLURM's queue for {workdir}: give --slurm, or scancel {job}, or choose another --workdir"
        )


def run_on_slurm(sweep: Sweep) -> int:
    """Reports the results so far, and submits missing or failed runs unless the last array is still in the queue."""
    job, todo = report_on_slurm(sweep), missing(sweep.runs)
    if job:
        print(f"job {job} is in the queue; the same command again shows how far it is (scancel {job} ends it)")
    elif todo:
        with claimed(sweep.workdir):
            script = slurm.write_array(todo, sweep.workdir, options=sweep.options.slurm, workers=sweep.options.workers)
            for run in todo:  # output of an earlier array must not be read as this array's
                atomic.set_aside(run.run_dir / OUTPUT_FILE)
            job = slurm.submit(script)
        print(f"submitted {len(todo)} runs as job {job}; the same command again reports on them")
    return 0


def report_on_slurm(sweep: Sweep) -> str:
    """Reports the results so far, and returns the id of the last array if it is still in the queue, else ""."""
    job = slurm.queued_job(sweep.workdir)
    report(sweep, [left_by_slurm(run, bool(job), sweep.file.metric) for run in sweep.runs])
    return job


def left_by_slurm(run: Run, queued: bool, metric: str) -> Record:
    """Returns the record of a run of a SLURM task. No process waited for the task: an unfinished run has failed."""
    output = run.run_dir / OUTPUT_FILE
    if is_finished(run):
        return record(run, RunState.FINISHED, "", metric)
    if not output.exists():
        return record(run, RunState.WAITING, "", metric)
    return record(run, RunState.RUNNING if queued else RunState.FAILED, "" if queued else last_error(output), metric)


def missing(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs that are still to do."""
    return [run for run in runs if not is_finished(run)]


def left(jobs: Sequence[SweepJob]) -> list[SweepJob]:
    """Returns the jobs that an interruption has left to do."""
    return [job for job in jobs if job.state in (RunState.WAITING, RunState.STOPPED)]


def report(sweep: Sweep, records: list[Record]) -> None:
    """Writes the tables and the page, and prints their paths and the best run."""
    page = write_report(sweep.file, records, sweep.workdir)
    for failed in (r for r in records if r.state == RunState.FAILED):
        print(f"failed: {failed.run.name}: {failed.error}")
    finished = [r for r in records if r.state == RunState.FINISHED]
    if finished and all(lacking := [missing_metric(r, sweep.file.metric) for r in finished]):
        print(lacking[0])
    if winner := best(records, sweep.file.goal):
        print(f"best {sweep.file.metric}: {metric_text(sweep.file.metric, winner.metric)} in {winner.run.run_dir.name}")
    print(f"report: {page}")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
