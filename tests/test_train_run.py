"""A run from its start to its end: its files, and that stopping it in the middle changes nothing."""

import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import multihost_utils
from jax.profiler import ProfileData
from support.running import (
    ROOT,
    arguments,
    arrays,
    at_step,
    check_same_end,
    compiled_once,
    finish,
    losses,
    manifest,
    rows,
    run_here,
    snapshot,
    start,
    steps_logged,
    stop_after,
)
from support.tables import check_rows

import train
from configs import command_line
from configs.schema import Config, ShardingConfig
from elastic.checkpointer import Checkpointer
from runtime.events import EventReader
from sharding import drawing
from sharding.scopes import make_layout
from training import devices, memory
from training.experiment import Experiment
from training.hooks import every
from training.metrics.report import profile_text
from training.resume import Start

RESUMABLE = 75
KEYS = {
    *("step", "loss", "learning_rate", "grad_norm", "skipped_steps", "data_wait_s"),
    *("collective_inter_bytes", "collective_intra_bytes"),
}


TEXT = {"data__source": "stdlib_text", "eval__every": 5, "sample__length": 8, "sample__prompt": "def "}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert run_here(*arguments(workdir)) == 0
    return workdir


def test_finished_run_is_complete_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
    workdir = tmp_path / "run"
    monkeypatch.setattr("training.log.losses.described", lambda *_: ["a note about losses"])
    args = arguments(workdir, **TEXT)
    assert run_here(*args) == 0
    said = capsys.readouterr().out
    assert "starting at step 0 of 10" in said and said.count("\na note about losses\n") == 1
    names = {"config.json", "environment.json", "metrics.jsonl", "tensorboard", "checkpoints", "report.html"}
    names |= {"summary.json", "sample.txt", "mesh.png", "collectives.json"}
    names |= {"attempts.json", "events.jsonl", f"lock-{socket.gethostname()}"}
    assert {path.name for path in workdir.iterdir()} == names
    first, last = losses(workdir)[0], losses(workdir)[-1]
    assert last < first - 0.5
    found = rows(workdir)
    assert all(row.keys() >= KEYS for row in found)
    documented = (ROOT / "docs" / "training.md").read_text().partition("\n## Metrics\n")[2]
    assert all(f"`{key}`" in documented for row in found for key in row)
    assert all(row.keys() >= {"step_time_s", "tokens_per_s"} for row in found[1:])
    assert [row["step"] for row in found if "validation_loss" in row] == [5, 10]
    assert all(row["validation_s"] > 0 for row in found if "validation_loss" in row)
    assert [row["step"] for row in found if "checkpoint_s" in row] == [6]
    summary = json.loads((workdir / "summary.json").read_text())
    expected = {"steps": 10, "final_loss": last, "validation_loss": found[-1]["validation_loss"]}
    assert summary.items() >= {**expected, "exit_reason": "finished", "skipped_steps": 0.0}.items()
    assert json.loads((workdir / "config.json").read_text())["model"]["hidden"] == 32
    assert json.loads((workdir / "environment.json").read_text())["devices"] == "8 x cpu"
    assert (workdir / "sample.txt").read_text().startswith("def ")
    layout = make_layout(ShardingConfig(partition_size=2), num_nodes=4, devices_per_node=2)
    assert (workdir / "mesh.png").read_bytes() == drawing.mesh_png(layout)
    assert manifest(workdir, 10)["metrics"] == {"validation_loss": summary["validation_loss"]}

    # on several CPU devices programs from the compilation cache can hang
    assert not (tmp_path / "cache" / "compiled").exists() and jax.config.jax_compilation_cache_dir is None

    before = snapshot(workdir)
    assert run_here(*args) == 0
    assert "is finished: 10 steps are done" in capsys.readouterr().out
    assert snapshot(workdir) == before

    shutil.rmtree(workdir / "checkpoints")
    before = snapshot(workdir)
    assert run_here(*args) == 2
    assert "holds this run, finished, whose checkpoints are gone; to train" in capsys.readouterr().err
    assert snapshot(workdir) == before


@pytest.mark.slow
def test_what_stays_idle_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPUs and virtual devices, which no launcher requested; rows of weight zero."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "DEVICES", tmp_path)
    args = arguments(tmp_path / "run", batch__global_size=12, batch__micro_size=2, num_steps=2, checkpoint__every=0)
    assert run_here(*args) == 0
    gpus, padding, *_ = capsys.readouterr().out.partition("\nmesh.num_cpu_devices=8: ")[2].splitlines()
    assert gpus == "this machine's GPUs stay idle; to train on them set it and mesh.devices_per_node to 0"
    assert padding.startswith("4 of 16 rows of a step are padding: the batch has 12, and 8 devices take 2 in ")
    config = command_line.parse(["train.py", *args[:1]])
    assert devices.unused_accelerators(config)
    (tmp_path / "nvidia0").rename(tmp_path / "accel0")
    assert "this machine's TPUs stay idle" in devices.unused_accelerators(config)[0]
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    assert not devices.unused_accelerators(config)


def test_programs_are_cached_where_jax_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JAX_COMPILATION_CACHE_DIR; else next to the tokens, separately on each node; on CPU devices nowhere."""
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "ours"))
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for told, used in (("", tmp_path / "ours" / "compiled"), (str(tmp_path), tmp_path)):
            monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", told)
            for platform in ("gpu", "cpu"):
                monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
                devices.use_compilation_cache()
                assert jax.config.jax_enable_compilation_cache == (platform == "gpu")
            assert jax.config.jax_compilation_cache_dir == str(used)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.slow
def test_lost_report_of_a_finished_run_is_recreated(tmp_path: Path, undisturbed: Path) -> None:
    """A run killed after its last checkpoint has nothing to train, but its report and sample are still to be made."""
    args = arguments(tmp_path)
    assert run_here(*args) == 0
    for name in ("summary.json", "report.html"):
        (tmp_path / name).unlink()
    assert run_here(*args) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 10 and summary["final_loss"] == losses(undisturbed)[-1]
    page = (tmp_path / "report.html").read_text().partition("Nodes over time")[2].partition("</section>")[0]
    attempts = [re.findall(r"<td[^>]*>([^<]*)", row) for row in re.findall("<tr>(<td.*?)</tr>", page)]
    assert [(nodes, end) for _, nodes, *_, end in attempts] == [("4", "finished")] * 2  # in one process
    check_same_end(tmp_path, undisturbed)


def test_unreadable_collectives_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bytes are left out of the metrics, and the report says why; a warning says so once."""

    def refuse(*_: object) -> None:
        raise ValueError("%while.1 has no trip count\nthat can be read")

    monkeypatch.setattr("sharding.hlo.read_collectives", refuse)
    assert run_here(*arguments(tmp_path)) == 0
    why = "the bytes of the collectives are not known: %while.1 has no trip count that can be read"
    assert capsys.readouterr().err.count(f"warning: {why}\n") == 1
    assert not any("collective_inter_bytes" in row or "collective_intra_bytes" in row for row in rows(tmp_path))
    assert why in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "collectives.json").read_text()) == {"problem": why}


def test_rows_are_written_before_their_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed right after a checkpoint resumes after it: the rows up to there are never written again.

    And saving does not use the preemption service: the processes agree on the step to stop at by the numbers they asked
    with, so only the loop may ask.
    """
    written: list[tuple[int, int]] = []
    asked: list[int] = []
    save = Checkpointer.save

    def look_and_save(self: Checkpointer, step: int, *args: Any, **kwargs: Any) -> None:
        written.append((step, steps_logged(tmp_path)))
        save(self, step, *args, **kwargs)

    monkeypatch.setattr(Checkpointer, "save", look_and_save)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: bool(asked.append(step)))
    assert run_here(*arguments(tmp_path, log_every=4, eval__every=6)) == 0
    assert [row["step"] for row in rows(tmp_path)] == [1, 4, 6, 8, 10]
    assert written == [(5, 2), (10, 5)] and asked == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_stops_and_the_same_command_resumes(
    tmp_path: Path, undisturbed: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path)
    handler = signal.getsignal(number)
    assert run_here(*args, make=lambda config: signal.raise_signal(number)) == RESUMABLE  # before the first step
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("stopped at once")
    assert run_here(*args, hooks=[stop_after(6, number)]) == RESUMABLE
    assert signal.getsignal(number) == handler
    assert "stopped at step 6; run the same command again to resume" in capsys.readouterr().out
    assert len(losses(tmp_path)) == 6
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == "interrupted"
    assert run_here(*args) == 0
    assert "resumed at step 6 of 10" in capsys.readouterr().out
    check_same_end(tmp_path, undisturbed)


@pytest.mark.slow
def test_second_ctrl_c_stops_immediately(tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(tmp_path)
    assert run_here(*args, hooks=[stop_after(6, signal.SIGINT)] * 2) == RESUMABLE
    assert capsys.readouterr().err.startswith("stopped at once; run the same command again")
    assert run_here(*args) == 0
    assert "resumed at step 5 of 10" in capsys.readouterr().out
    check_same_end(tmp_path, undisturbed)


def test_restart_without_checkpoint_is_reported() -> None:
    """Its steps are done again, from the first on."""
    said = {logged: Start(restored=None, logged=logged).described(10, Path("runs/x")) for logged in (0, 4)}
    lost = "no checkpoint and no snapshot is left; steps done again: 4"
    assert said == {
        0: "starting at step 0 of 10 in runs/x",
        4: f"starting again at step 0 of 10 in runs/x: {lost}",
    }


@pytest.mark.slow
def test_restart_after_deleted_checkpoints_does_all_steps_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(*arguments(tmp_path), hooks=[stop_after(4)]) == RESUMABLE
    done = losses(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    assert run_here(*arguments(tmp_path)) == 0
    said = f"starting again at step 0 of 10 in {tmp_path}: no checkpoint and no snapshot is left; steps done again: "
    assert f"{said}{len(done)}\n" in capsys.readouterr().out
    assert losses(tmp_path)[: len(done)] == done


def test_a_run_that_has_begun_waits_for_more_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_here(*arguments(tmp_path / "run"), hooks=[stop_after(2)]) == RESUMABLE
    monkeypatch.setattr(memory, "_free_bytes", lambda: 1000)
    capsys.readouterr()
    assert run_here(*arguments(tmp_path / "run")) == RESUMABLE
    assert capsys.readouterr().err.startswith("error: the state takes ")


@pytest.mark.parametrize("was_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_damaged_newest_checkpoint_falls_back_to_the_previous(
    was_killed: bool, tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose last checkpoint is damaged is not finished, even if it once was."""
    args = arguments(tmp_path)
    assert run_here(*args) == 0
    newest = tmp_path / "checkpoints" / "10"
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    if was_killed:  # before its end
        (tmp_path / "summary.json").unlink()
    assert run_here(*args) == 0
    captured = capsys.readouterr()
    assert "is damaged" in captured.err and "step 5 is used instead" in captured.err
    assert "resumed at step 5 of 10" in captured.out
    assert (tmp_path / "checkpoints" / "set_aside" / "10-1").is_dir()
    check_same_end(tmp_path, undisturbed)


def test_checkpoint_of_a_frozen_attempt_is_not_overwritten(
    tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Process 0 of the earlier run continues its commit while this run, with other settings, is before the step."""
    saved = tmp_path / "checkpoints" / "5"
    commits = at_step(3, lambda: shutil.copytree(undisturbed / "checkpoints" / "5", saved))
    assert run_here(*arguments(tmp_path, eval__num_batches=2), hooks=[commits]) == 0
    assert (
        f"{saved} was saved by an earlier attempt or another replica of this run and verifies: it stays"
        in capsys.readouterr().err
    )
    assert snapshot(saved) == snapshot(undisturbed / "checkpoints" / "5")
    check_same_end(tmp_path, undisturbed)


# Steps may run ahead, as on GPUs; says how many rows are written after each step that is dispatched.
RUNS_AHEAD = """
from training.experiment import Experiment
Experiment.dispatches_asynchronously = property(lambda self: True)
def say(step, *_):
    print("written", running.steps_logged(running.Path({workdir!r})), "after", step)
parts["hooks"].append(say)
"""


@pytest.mark.slow
def test_delayed_logging_changes_no_row(tmp_path: Path) -> None:
    """Not even when the run is stopped with a step still to be logged; evaluations and checkpoints wait for theirs."""
    changes = {"mesh__num_cpu_devices": 1, "mesh__devices_per_node": 1, "sharding__partition_size": 1}
    changes |= {"eval__every": 3, "log_every": 1}
    late, direct = tmp_path / "late", tmp_path / "direct"
    one = start(arguments(late, **changes), stop_after=8, first=RUNS_AHEAD.format(workdir=str(late)))
    other = start(arguments(direct, **changes), stop_after=8)
    (code, out, err), (other_code, _, other_err) = finish(one, other)
    assert (code, other_code) == (RESUMABLE, RESUMABLE), (err, other_err)
    said = [tuple(map(int, line.split()[1::2])) for line in out.splitlines() if line.startswith("written ")]
    # after a validation (3, 6) the row of its step waits for the step time; before a checkpoint (5) it is written
    assert said == [(0, 1), (0, 2), (2, 3), (2, 4), (5, 5), (5, 6), (5, 7), (6, 8)]
    keys = ("step", "loss", "grad_norm", "learning_rate", "skipped_steps", "validation_loss")
    assert [[row.get(key) for key in keys] for row in rows(late)] == [
        [row.get(key) for key in keys] for row in rows(direct)
    ]
    assert [row["step"] for row in rows(late)] == [*range(1, 9)]
    one_end, other_end = arrays(late, 8), arrays(direct, 8)
    assert [name for name in one_end if one_end[name].tobytes() != other_end[name].tobytes()] == []


def test_what_compiles_is_said_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal too; and afterwards how long it took."""
    before: dict[str, str] = {}

    def first(name: str, original: Callable[[], object]) -> object:
        before[name] = capsys.readouterr().out
        return original()

    def make(config: Config) -> Experiment:
        ex = compiled_once(config)
        for name in ("compile_train_step", "init_state", "compile_eval_step"):
            vars(ex)[name] = partial(first, name, getattr(ex, name))
        return ex

    assert run_here(*arguments(tmp_path / "run", **TEXT), make=make) == 0
    step, state, validation = before.values()
    assert step.endswith("compiling the step ...\n")
    assert re.search(r"^compiling the step: done after \S+ \S*s\nmaking the initial state \.\.\.\n$", state)
    assert re.search(r"^making the initial state: done after \S+ \S*s$", validation, re.MULTILINE)
    assert validation.endswith("compiling the validation ...\n")
    rest = capsys.readouterr().out
    assert re.match(r"compiling the validation: done after \S+ \S*s\nstep 5: validation loss", rest)
    assert re.search(r"^sampling \.\.\.\nsampling: done after \S+ \S*s$", rest, re.MULTILINE)


# ------------------------------------------------------------------------------------------------------------- hooks


def called(wanted: dict[str, Any], *, steps: int, begin: int = 0, last: int = 10, moments: int = 4) -> list[int]:
    """Returns the steps after which a hook is called, in a run that ends after so many `steps` of its `last`."""
    seen: list[int] = []
    hook = every(moments, lambda step, state, metrics: seen.append(step), **wanted)
    for step in range(begin + 1, steps + 1):
        hook(step, None, {}, is_last=step == last)
    hook.close(steps, None, {}, finished=steps == last)
    return seen


def test_a_hook_is_called_when_it_is_due() -> None:
    def check(wanted: dict[str, Any], run: dict[str, int], steps: list[int]) -> None:
        assert called(wanted, **run) == steps

    check_rows(
        [
            ({}, {"steps": 10}, [4, 8]),
            ({}, {"steps": 10, "moments": 0}, []),
            ({"at_end": True}, {"steps": 10}, [4, 8, 10]),
            ({"at_end": True}, {"steps": 8, "last": 8}, [4, 8]),
            ({"at_end": True}, {"steps": 6}, [4]),
            ({"at_stop": True}, {"steps": 10}, [4, 8]),
            ({"at_stop": True}, {"steps": 6}, [4, 6]),
            ({"at_stop": True}, {"steps": 4}, [4]),
            ({"at_stop": True, "done": 5}, {"begin": 5, "steps": 5}, []),
            ({"at_stop": True, "done": 4}, {"begin": 5, "steps": 5}, [5]),  # its step was restored from elsewhere
            ({"at_end": True, "done": 8}, {"begin": 10, "steps": 10}, [10]),
        ],
        check,
    )


def test_the_hook_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """After the last step of 10, since none is a hundredth."""
    monkeypatch.setattr(sys, "argv", ["mine.py", *arguments(tmp_path)])
    monkeypatch.setattr(train, "main", partial(train.main, make=compiled_once))
    (listing,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    with pytest.raises(SystemExit, match="0"):
        exec(listing, {})
    params = [x for name, x in arrays(tmp_path, 10).items() if name.startswith("params")]
    assert f"\n10 {max(abs(x).max() for x in params)}\n" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")  # jax's, with Python 3.12
def test_the_steps_that_the_config_names_are_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their trace has each step and the phases; the summary is printed, and in the report."""
    assert run_here(*arguments(tmp_path, profile__start=3, profile__steps=2)) == 0
    (event,) = [event for event in EventReader(tmp_path).new() if event["event"] == "profiled"]
    assert (event["step"], event["steps"]) == (3, 2) and event["step_s"] > 0 and event["collectives"]
    summary = profile_text(event)
    assert summary in capsys.readouterr().out and summary in (tmp_path / "report.html").read_text()
    (file,) = tmp_path.glob("profile/process_0/**/*.xplane.pb")
    events = [e for plane in ProfileData.from_file(str(file)).planes for line in plane.lines for e in line.events]
    assert sorted(dict(e.stats)["step_num"] for e in events if e.name == "step") == [3, 4]
    assert {"reading", "stepping", "recording"} <= {e.name for e in events}


def test_a_trace_of_the_first_step_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is stopped or resumed within or after these steps has no summary."""
    assert run_here(*arguments(tmp_path, profile__start=1, profile__steps=5), hooks=[stop_after(1)]) == RESUMABLE
    assert run_here(*arguments(tmp_path, profile__start=1, profile__steps=5)) == 0
    assert len([*tmp_path.glob("profile/process_0/**/*.xplane.pb")]) == 1
    assert "Profile of" not in capsys.readouterr().out
