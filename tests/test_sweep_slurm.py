"""A sweep as a SLURM array: submitting it and running its tasks, with fake SLURM commands."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.sweeping import DIVERGES, FAILS, STOPS_ALWAYS, STOPS_ONCE, run_sweep, seeds, started, sweep_file
from support.tables import every_row

import sweep
from launch.sweeps.pool import claimed

PROGRAMS = {
    "sbatch": 'echo "$@" >> {log}; echo "77;cluster"',
    "squeue": "cat {folder}/queue 2> /dev/null || true",
    "srun": 'echo srun $1 $SRUN_CPUS_PER_TASK >> {log}; shift; exec "$@"',
    "scontrol": 'echo scontrol "$@" >> {log}',
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the fake commands on PATH and returns the file in which they log their arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in PROGRAMS.items():
        (folder / name).write_text("#!/bin/bash\n" + body.format(log=tmp_path / "asked", folder=tmp_path) + "\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "asked"


def run_task(folder: Path, number: int, **environment: str) -> int:
    """Runs a task of the array the way SLURM does, from another directory."""
    variables = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_JOB_ID": "77", **environment}
    script = folder / "runs" / "sweep.sbatch"
    return subprocess.run(["bash", str(script)], cwd="/", env={**os.environ, **variables}).returncode


def options_of(workdir: Path) -> list[str]:
    lines = (workdir / "sweep.sbatch").read_text().splitlines()
    return [word for line in lines if line.startswith("#SBATCH ") for word in words_of(line.removeprefix("#SBATCH "))]


def words_of(line: str) -> list[str]:
    """Returns the options in a line, by the rules of sbatch (get_argument in its opt.c), which are not the shell's."""
    words, word, quote, escaped = [], "", "", False
    for letter in line:
        if not escaped and letter == "\\":
            escaped = True
        elif not escaped and quote and letter == quote:
            quote = ""
        elif not escaped and not quote and letter in "\"'":
            quote = letter
        elif not quote and letter.isspace():
            words, word, escaped = [*words, word], "", False
        elif not escaped and not quote and letter == "#":
            break
        else:
            word, escaped = word + letter, False
    assert not quote and not escaped, line
    return [word for word in [*words, word] if word]


def test_an_array_is_submitted_run_and_reported(
    slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sweep_file(tmp_path, seeds(0, FAILS, STOPS_ONCE))
    flags = ["--slurm=--partition=gpu --nodes=2 --comment='two words'", "--workers=2"]
    assert run_sweep(tmp_path, config, *flags) == 0
    assert slurm.read_text() == f"--parsable {tmp_path / 'runs' / 'sweep.sbatch'}\n"
    assert "submitted 3 runs as job 77" in capsys.readouterr().out
    options = options_of(tmp_path / "runs")
    assert "--array=1-3%2" in options and "--requeue" in options
    assert options[-3:] == ["--partition=gpu", "--nodes=2", "--comment=two words"]
    assert started(tmp_path) == []

    (tmp_path / "queue").write_text("77 77\n78 77\n")
    assert [run_task(tmp_path, 1), run_task(tmp_path, 2)] == [0, 1]
    assert run_sweep(tmp_path, config, *flags) == 0
    assert "job 77 is in the queue" in capsys.readouterr().out and slurm.read_text().count("parsable") == 1

    assert run_task(tmp_path, 3) == 75
    assert slurm.read_text().splitlines()[-1] == "scontrol requeue 77_3"
    assert run_task(tmp_path, 3, SLURM_RESTART_COUNT="1", SLURM_CPUS_PER_TASK="5") == 0
    assert slurm.read_text().endswith("srun --kill-on-bad-exit=0 5\n")
    assert (
        started(tmp_path) == [0, FAILS, STOPS_ONCE, STOPS_ONCE]
        and slurm.read_text().count("srun --kill-on-bad-exit=0") == 4
    )

    (tmp_path / "queue").unlink()
    for dry, submitted in (["--dry_run"], 1), ([], 2):
        assert run_sweep(tmp_path, config, *flags, *dry) == 0
        out = capsys.readouterr().out
        assert f"failed: seed={FAILS}-" in out and ": error: the loss is not a number\n" in out
        assert slurm.read_text().count("parsable") == submitted
    assert "submitted 1 runs" in out
    assert options_of(tmp_path / "runs")[1] == "--array=1-1%2"
    (tmp_path / "queue").write_text("77 77\n")
    assert run_sweep(tmp_path, config, *flags) == 0  # it has not begun again
    assert "3 runs: 1 waiting, 2 finished." in (tmp_path / "runs" / "results.md").read_text()
    assert run_task(tmp_path, 1) == 1 and started(tmp_path)[-1] == FAILS
    outputs = [path.name for path in (tmp_path / "runs").glob(f"seed={FAILS}-*/output*")]
    assert sorted(outputs) == ["output.1.txt", "output.txt"]


def test_a_dry_run_submits_nothing_and_requeuing_is_limited(slurm: Path, tmp_path: Path) -> None:
    assert run_sweep(tmp_path, sweep_file(tmp_path, seeds(STOPS_ALWAYS)), "--slurm=--time=1:00:00", "--dry_run") == 0
    assert not slurm.exists()
    assert {"--array=1-1", "--time=1:00:00"} <= {*options_of(tmp_path / "runs")}
    assert run_task(tmp_path, 1, SLURM_RESTART_COUNT="3") == 75
    assert "scontrol" not in slurm.read_text()


def test_a_dry_run_leaves_the_array_that_is_queued_as_it_is(
    slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tasks read their lines when they begin: a shorter list would give them others."""
    file = sweep_file(tmp_path, seeds(0, DIVERGES))
    assert run_sweep(tmp_path, file, "--slurm=") == 0
    assert run_task(tmp_path, 1) == 0
    (tmp_path / "queue").write_text("77 77\n")
    before = (tmp_path / "runs" / "runs.txt").read_text()
    assert run_sweep(tmp_path, file, "--slurm=", "--dry_run") == 0
    assert (tmp_path / "runs" / "runs.txt").read_text() == before
    assert "runs them already" in capsys.readouterr().out


def test_missing_slurm_commands_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run_sweep(tmp_path, sweep_file(tmp_path, seeds(0)), "--slurm=") == 2
    assert "error: sbatch is not installed; run the sweep on a host" in capsys.readouterr().err


def test_an_array_and_a_sweep_here_exclude_each_other(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would train in the same directories; once the array has left the queue it excludes nothing."""
    config = sweep_file(tmp_path, seeds(0))
    with claimed(tmp_path / "runs"):
        assert run_sweep(tmp_path, config, "--slurm=") == 2
    assert not slurm.exists() and "runs is in use by another sweep or its runs" in capsys.readouterr().err
    assert run_sweep(tmp_path, config, "--slurm=") == 0
    (tmp_path / "queue").write_text("77 77\n")
    assert run_sweep(tmp_path, config) == 2
    assert "error: job 77 is in SLURM's queue for " in capsys.readouterr().err
    with pytest.raises(ValueError, match="job 77"):
        sweep.run(config, [{"seed": 0}], workdir=tmp_path / "runs")
    (tmp_path / "queue").unlink()
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        assert run_sweep(tmp_path, config) == 2
    assert f"or delete {tmp_path}/runs/slurm_job.txt if job 77 has ended\n" in capsys.readouterr().err
    assert started(tmp_path) == [] and run_sweep(tmp_path, config) == 0 and started(tmp_path) == [0]


def test_a_value_reaches_its_task_unchanged(slurm: Path, tmp_path: Path) -> None:
    """There is one line per task, whatever characters the values contain."""
    prompts = ("To be,\nor not", "\n", "it's $HOME\n\\n `id` \"\t", "\n' \\' \\\\\n\n", "ünï\ncode", "plain")
    assert (
        run_sweep(tmp_path, sweep_file(tmp_path, f"def sweep_x(): return over('sample.prompt', {prompts})"), "--slurm=")
        == 0
    )
    assert len((tmp_path / "runs" / "runs.txt").read_text().split("\n")) == len(prompts) + 1
    assert [run_task(tmp_path, i + 1) for i in range(len(prompts))] == [0] * len(prompts)
    given = [json.loads(path.read_text())[-1] for path in (tmp_path / "runs").glob("*/arguments.json")]
    assert sorted(given) == sorted(f"--config.sample.prompt={prompt}" for prompt in prompts)


STANDING_FOR = {"%": "%", "A": "77", "a": "1"}  # as sbatch's manual has it, of task 1 of job 77


@every_row("name", ["a b", "it's 50%j", 'a"b#c', "$HOME `x`", "ünï 100%%"])
def test_directives_say_what_was_given(name: str, slurm: Path, tmp_path: Path) -> None:
    """Whatever the name of the directory has in it; `%` would stand for numbers of the job."""
    workdir, comment = tmp_path / name, "it's 5 \\ \"o'clock\" # now"
    flags = [f"--slurm=--comment={shlex.quote(comment)} --error=%j", f"--workdir={workdir}"]
    assert run_sweep(tmp_path, sweep_file(tmp_path, seeds(0)), *flags) == 0
    options = options_of(workdir)
    assert f"--job-name={name}" in options and options[-2:] == [f"--comment={comment}", "--error=%j"]
    (output,) = [option for option in options if option.startswith("--output=")]
    written = re.sub("%(.)", lambda found: STANDING_FOR[found[1]], output.removeprefix("--output="))
    assert written == f"{workdir}/slurm/77_1.txt" and (workdir / "slurm").is_dir()
    assert slurm.read_text().endswith(f"--parsable {workdir / 'sweep.sbatch'}\n")


@every_row(("folder", "options"), [("runs", "--comment='a\nb'"), ("run\ns", ""), ("run\\s", "")])
def test_what_no_directive_can_say_is_refused(
    folder: str, options: str, slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--slurm={options}", f"--workdir={tmp_path / folder}"]
    assert run_sweep(tmp_path, sweep_file(tmp_path, seeds(0)), *flags) == 2
    assert " which sbatch cannot read; " in capsys.readouterr().err
    assert not slurm.exists()
