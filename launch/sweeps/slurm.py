"""A sweep as a SLURM array with one task per run, in files to read, edit and submit by hand."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from launch.sweeps.plan import ROOT, Run
from launch.sweeps.pool import MAX_ATTEMPTS, OUTPUT_FILE
from runtime.exit_codes import ExitCode

SRUN = "--kill-on-bad-exit=0"  # processes detect a loss themselves and exit with 75
RUNS_FILE, SCRIPT_FILE, JOB_FILE = "runs.txt", "sweep.sbatch", "slurm_job.txt"
SCRIPT = """#!/bin/bash
# Task N runs line N of {runs_file}. Written by sweep.py; to submit it by hand: sbatch {script_file}
#SBATCH --job-name={name}
#SBATCH --array=1-{count}{limit}
#SBATCH --output={output}/slurm/%A_%a.txt
#SBATCH --signal=TERM@120
#SBATCH --requeue
{options}
cd {root} || exit 1
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # since 22.05 not srun's by itself
bash -c "$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {runs_path})"
code=$?
if [ $code = {resumable} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then  # stopped at its time limit
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit $code
"""


def write_array(runs: Sequence[Run], workdir: Path, *, options: str, workers: int | None) -> Path:
    """Writes `runs.txt` and `sweep.sbatch` for the runs, and returns the path of the latter.

    `options` are passed to sbatch (`--partition=gpu --nodes=2`). At most `workers` tasks run at once. ValueError if the
    options or the directory contain characters that sbatch's option lines cannot express.
    """
    workdir = workdir.resolve()
    for name, value in (("--slurm", options), ("--workdir", str(workdir))):
        if "\n" in value:
            raise ValueError(f"{name}={value!r} contains a line break, which sbatch cannot read; remove it")
    if "\\" in str(workdir):  # in the name of an output file it would switch off %A and %a
        raise ValueError(f"--workdir={workdir} contains a backslash, which sbatch cannot read; choose another one")
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
            name=_directive(workdir.name),
            count=len(runs),
            limit=f"%{workers}" if workers else "",
            output=_directive(str(workdir).replace("%", "%%")),
            options="\n".join(f"#SBATCH {_directive(word)}" for word in shlex.split(options)),
            root=shlex.quote(str(ROOT)),
            runs_path=shlex.quote(str(workdir / RUNS_FILE)),
            runs_file=RUNS_FILE,
            script_file=SCRIPT_FILE,
            resumable=int(ExitCode.RESUMABLE),
            restarts=MAX_ATTEMPTS - 1,
        )
    )
    return script


def _directive(word: str) -> str:
    """Returns a word quoted for a line of sbatch's options, where even an escaped space ends an unquoted word."""
    if re.fullmatch(r"[\w%+,./:=@-]*", word):
        return word
    escaped = re.sub(r'["\\]', r"\\\g<0>", word)
    return f'"{escaped}"'


def _on_one_line(word: str) -> str:
    """Returns a word quoted for bash on one line: a line break becomes `\\n`."""
    if "\n" not in word:
        return shlex.quote(word)
    escaped = word.replace("\\", r"\\").replace("'", r"\'").replace("\n", r"\n")
    return f"$'{escaped}'"


def submit(script: Path) -> str:
    """Submits the array, records its job id and returns it. ValueError if sbatch is missing or fails."""
    job = _output("sbatch", "--parsable", str(script)).partition(";")[0]
    (script.parent / JOB_FILE).write_text(job + "\n")
    return job


def queued_job(workdir: Path) -> str:
    """Returns the id of the job submitted for this sweep if it is still in the queue, else ""."""
    file = workdir / JOB_FILE
    job = file.read_text().strip() if file.exists() else ""
    # Without --jobs, because squeue fails with --jobs for a job that ended long ago.
    ask, fix = ("squeue", "--me", "--noheader", "--format=%A %F"), f", or delete {file} if job {job} has ended"
    known = _output(*ask, fix=fix).split() if job else []
    return job if job in known else ""


def _output(*command: str, fix: str = "") -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise ValueError(f"{command[0]} is not installed; run the sweep on a host with SLURM's commands{fix}") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{command[0]}: {' '.join(error.stderr.split())}") from error
    return done.stdout.strip()
