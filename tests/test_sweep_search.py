"""`sweep.py --search`, with the real Optuna: its values, pruning, Ctrl-C, and the continuation by the same command."""

import csv
import importlib.util
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused
from support.sweeping import DIVERGES, FAILS, WAITS, run_sweep, seeds, start_sweep, started, sweep_file, wait_for
from support.tables import every_row

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("optuna"), reason="needs Optuna: make .venv/optuna-installed"),
]
TIMEOUT_S = 240
# the loss of the tests' program is 1000 times the learning rate, plus the seed
RATES = "SEARCH = {'optimizer.learning_rate': log_uniform(1e-4, 1e-1)}\n"


def states(folder: Path) -> list[str]:
    """Returns the column `state` of results.csv."""
    with open(folder / "runs" / "results.csv", newline="") as file:
        return [row["state"] for row in csv.DictReader(file)]


def results(folder: Path) -> list[float]:
    """Returns the learning rates of the runs' arguments, in the order in which they began."""
    files = sorted((folder / "runs").glob("*/arguments.json"), key=lambda file: file.stat().st_mtime_ns)
    words = [word for file in files for word in json.loads(file.read_text())]
    return [float(word.partition("=")[2]) for word in words if word.startswith("--config.optimizer.learning_rate=")]


def test_optuna_chooses_the_values_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sweep_file(tmp_path, RATES)
    assert run_sweep(tmp_path, config, "--search=3") == 0
    first = results(tmp_path)
    assert len(first) == 3 == len(set(first)) and all(1e-4 <= rate <= 1e-1 for rate in first)
    assert all(float(f"{rate:.3g}") == rate for rate in first)
    assert f"best validation_loss: {1000 * min(first):.4f}" in capsys.readouterr().out
    assert run_sweep(tmp_path, config, "--search=3") == 0 and results(tmp_path) == first
    assert run_sweep(tmp_path, config, "--search=5") == 0
    assert results(tmp_path)[:3] == first and len(results(tmp_path)) == 5


# Like train.py with a validation at each of two steps; with a rate above 0.01 it is bad, and waits after the first one.
PRUNABLE = """
import json, signal, sys, time
from pathlib import Path
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
folder, rate = Path(flags["workdir"]), float(flags["config.optimizer.learning_rate"])
folder.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
def row(step):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(dict(step=step, loss=rate, validation_loss=rate)) + "\\n")
row(1)
if rate > 0.02:
    time.sleep(300)
row(2)
(folder / "summary.json").write_text(json.dumps(dict(exit_reason="finished", steps=2, validation_loss=rate)))
"""


def test_bad_runs_are_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose first validation is worse than the median of six earlier ones is stopped, and has not failed."""
    script = tmp_path / "prunable.py"
    script.write_text(PRUNABLE)

    def search(low: float, high: float, count: int) -> int:
        config = sweep_file(tmp_path, f"SEARCH = {{'optimizer.learning_rate': uniform({low}, {high})}}\n")
        return run_sweep(tmp_path, config, f"--search={count}", script=str(script))

    assert search(0.001, 0.01, 6) == 0 and set(states(tmp_path)) == {"finished"}
    assert search(0.05, 0.1, 7) == 0 and sorted(states(tmp_path)) == ["finished"] * 6 + ["pruned"]
    first, *_, last = study(tmp_path).trials
    assert [*first.intermediate_values] == [1, 2] and [*last.intermediate_values] == [1]
    assert re.search(r"^best validation_loss: 0\.00", capsys.readouterr().out.splitlines()[-2])
    assert search(0.05, 0.1, 7) == 0 and len(states(tmp_path)) == 7  # it counts, and is not tried again


def test_an_interrupted_trial_goes_on_with_its_values(tmp_path: Path) -> None:
    config = sweep_file(
        tmp_path, f"SEARCH = {{'seed': choice({WAITS}), 'optimizer.learning_rate': log_uniform(1e-4, 1e-1)}}\n"
    )
    process = start_sweep(tmp_path, config, "--search=1")
    wait_for(tmp_path, ("start", WAITS), process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75 and "run the same command again" in out and states(tmp_path) == ["stopped"]
    (rate,) = results(tmp_path)
    assert run_sweep(tmp_path, config, "--search=1") == 0
    assert results(tmp_path) == [rate] and started(tmp_path) == [WAITS, WAITS] and states(tmp_path) == ["finished"]


def test_a_metric_that_no_run_has_ends_the_search_at_its_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the right one the run counts; a run that diverged has the metric."""
    searched = f"SEARCH = {{'seed': choice({DIVERGES})}}\n"
    assert run_sweep(tmp_path, sweep_file(tmp_path, searched + "METRIC = 'val_loss'\n"), "--search=2") == 2
    error = capsys.readouterr().err.strip()
    assert re.fullmatch(
        rf"error: METRIC='val_loss' is not in .*/seed={DIVERGES}-\w+; the nearest .* 'validation_loss'", error
    )
    assert run_sweep(tmp_path, sweep_file(tmp_path, searched), "--search=1") == 1 and started(tmp_path) == [DIVERGES]
    assert f"failed: seed={DIVERGES}-" in (out := capsys.readouterr().out) and "validation_loss is not a number" in out


def test_a_failed_trial_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = sweep_file(tmp_path, f"SEARCH = {{'seed': choice({FAILS})}}\n")
    for _ in range(2):
        assert run_sweep(tmp_path, config, "--search=1") == 1 and states(tmp_path) == ["failed"]
    assert started(tmp_path) == [FAILS] and f"failed: seed={FAILS}-" in capsys.readouterr().out


def test_trials_with_the_values_of_a_running_one_end_as_it_does(tmp_path: Path) -> None:
    """Two values for six trials, and a worker to spare: each runs once, and all trials get the value of its run."""
    config = sweep_file(tmp_path, "SEARCH = {'seed': choice(0, 6)}\n")
    assert run_sweep(tmp_path, config, "--search=6", "--workers=3", pause_s=1.0) == 0
    assert sorted(started(tmp_path)) == [0, 6] and states(tmp_path) == ["finished"] * 2
    trials = study(tmp_path).trials
    assert [trial.value for trial in trials] == [1.0 + trial.params["seed"] for trial in trials] and len(trials) == 6


def study(folder: Path) -> Any:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "runs" / "optuna.log")))
    return optuna.load_study(study_name="mine", storage=storage)


SEARCHED = "SEARCH = {'seed': choice(0, 6), 'log_every': choice(1, 2)}\n"
EDITED = {
    "a key that is gone": (
        "SEARCH = {'seed': choice(0, 6)}\n",
        20,
        r"with SEARCH\['log_every'\] from CategoricalDistribution\(.*\(1, 2\)\)",
    ),
    "other options": (SEARCHED.replace("6", "7"), 20, r"with SEARCH\['seed'\] from .*\(0, 6\)\)"),
    "a range for options": (SEARCHED.replace("choice(1, 2)", "uniform(1, 1)"), 20, r"with SEARCH\['log_every'\] .*"),
    "another goal": (f"GOAL = 'max'\n{SEARCHED}", 20, "with GOAL='min'"),
    "another base config": (SEARCHED, 30, r"with another base config, .*: there is no \S+"),
}


@pytest.mark.parametrize("edited", EDITED)
def test_another_search_is_refused_and_the_same_one_goes_on(
    edited: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would continue to minimise, or report runs that do not exist."""
    body, num_steps, message = EDITED[edited]
    assert run_sweep(tmp_path, sweep_file(tmp_path, SEARCHED), "--search=1") == 0
    line = refused(capsys, lambda: run_sweep(tmp_path, sweep_file(tmp_path, body, num_steps=num_steps), "--search=2"))
    assert re.fullmatch(rf".*runs holds a search {message}; choose another --workdir", line), line
    assert len(started(tmp_path)) == 1
    assert run_sweep(tmp_path, sweep_file(tmp_path, SEARCHED), "--search=2") == 0


RATE = "{'optimizer.learning_rate': uniform(-1, 1)}"
ADM = "{'seed': choice(0, 1), 'optimizer.name': choice('sgd', 'adm')}"
MISTAKES = [
    (f"SEARCH = {RATE}", ["--search=3"], "learning_rate=-1: .*=-1.0? must be above 0 and finite"),
    (f"SEARCH = {ADM}", ["--search=3"], r"seed=0,name=adm: .*name=adm is not known; .* did you mean adamw\?$"),
    ("SEARCH = {'seed': (1, 2)}", ["--search=3"], r"SEARCH\['seed'\] must be uniform\(...\), log_"),
    (seeds(0), ["--search=3"], r"--search: mine.py has no SEARCH, such as \{"),
    (RATES, ["--search=0"], "--search=0 must be at least 1"),
    (RATES + seeds(0), ["--search=1", "--sweep=seed"], "takes neither --sweep nor --slurm"),
]


@every_row(("body", "flags", "message"), MISTAKES, isolated=True)
def test_a_mistake_is_one_line(
    body: str, flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, lambda: run_sweep(tmp_path, sweep_file(tmp_path, body), *flags))
    assert re.search(message, line), line
    assert started(tmp_path) == []
