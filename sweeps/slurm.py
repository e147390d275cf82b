"""A sweep as a SLURM array: one task a run, written as files that can be read, edited and submitted by hand."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from runtime.exit_codes import ExitCode
from sweeps.plan import ROOT, Run
from sweeps.pool import MAX_STARTS, OUTPUT_FILE

SRUN = "--kill-on-bad-exit=0"  # the others notice a lost process by themselves, and leave with 75
RUNS_FILE, SCRIPT_FILE, JOB_FILE = "runs.txt", "sweep.sbatch", "slurm_job.txt"
SCRIPT = """#!/bin/bash
# Task N runs line N of {runs_file}. Written by sweep.py; to submit it by hand: sbatch {script_file}
#SBATCH --job-name={name}
#SBATCH --array=1-{count}{limit}
#SBATCH --output="{workdir}/slurm/%A_%a.txt"
#SBATCH --signal=TERM@120
#SBATCH --requeue
{options}
cd {root} || exit 1
bash -c "$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {runs_path})"
code=$?
if [ $code = {resumable} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then  # stopped at its time limit
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit $code
"""


def write_array(runs: Sequence[Run], workdir: Path, *, options: str, workers: int | None) -> Path:
    """Writes `runs.txt` and `sweep.sbatch` for the runs, and returns the latter.

    `options` are sbatch's (`--partition=gpu --nodes=2`); at most `workers` tasks run at once. ValueError for a line
    break in them or in the directory: sbatch reads its options line by line.
    """
    workdir = workdir.resolve()
    for name, value in (("--slurm", options), ("--workdir", str(workdir))):
        if "\n" in value:
            raise ValueError(f"a line break in {name}={value!r}: sbatch cannot read it; leave it out")
    for folder in (workdir / "slurm", *(run.run_dir for run in runs)):
        folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for run in runs:
        command, output = " ".join(map(_on_one_line, run.command)), shlex.quote(str(run.run_dir / OUTPUT_FILE))
        lines.append(f"srun {SRUN} {command} >> {output} 2>&1\n")
    (workdir / RUNS_FILE).write_text("".join(lines), newline="\n")
    script = workdir / SCRIPT_FILE
    script.write_text(
        SCRIPT.format(
            name=workdir.name,
            count=len(runs),
            limit=f"%{workers}" if workers else "",
            workdir=workdir,
            options="\n".join(f"#SBATCH {shlex.quote(word)}" for word in shlex.split(options)),
            root=shlex.quote(str(ROOT)),
            runs_path=shlex.quote(str(workdir / RUNS_FILE)),
            runs_file=RUNS_FILE,
            script_file=SCRIPT_FILE,
            resumable=int(ExitCode.RESUMABLE),
            restarts=MAX_STARTS - 1,
        )
    )
    return script


def _on_one_line(word: str) -> str:
    """Returns a word as bash reads it; a line break in it is written `\\n`, since a task is a line."""
    if "\n" not in word:
        return shlex.quote(word)
    escaped = word.replace("\\", r"\\").replace("'", r"\'").replace("\n", r"\n")
    return f"$'{escaped}'"


def submit(script: Path) -> str:
    """Submits the array and returns its job id, which is also kept; ValueError if sbatch is missing or refuses."""
    job = _output("sbatch", "--parsable", str(script)).partition(";")[0]
    (script.parent / JOB_FILE).write_text(job + "\n")
    return job


def queued_job(workdir: Path) -> str:
    """Returns the id of the job that was submitted for this sweep if it is still in the queue, else ""."""
    kept = workdir / JOB_FILE
    job = kept.read_text().strip() if kept.exists() else ""
    # Without --jobs: squeue does not know the id of a job that ended long ago, and fails.
    known = _output("squeue", "--me", "--noheader", "--format=%A %F").split() if job else []
    return job if job in known else ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise ValueError(f"there is no {command[0]} here; start the sweep where SLURM's commands are") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{command[0]}: {' '.join(error.stderr.split())}") from error
    return done.stdout.strip()
