"""The combinations and names of the runs of a sweep, and the mistakes that are refused before the first one starts."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused
from support.running import ROOT
from support.sweeping import run_sweep, seeds, sweep_file
from support.tables import every_row

from configs.overrides import chain, choice, log_uniform, over, product, sample, uniform, zip_
from configs.schema import defaults, flat
from launch.sweeps.check import check_runs
from launch.sweeps.plan import EMULATE_OPTIONS, Run, load_file, plan, points, varied

RATES = "def sweep_lr(): return over('optimizer.learning_rate', (1e-3, 2e-3))\n"
SHIPPED = {"codecs_by_rate": 15, "learning_rate_by_batch": 15, "partition_size_by_rate": 9, "strategies_by_model": 15}
OVER = "def sweep_x(): return over"
EMULATED = "--emulate=--nodes=4 --devices_per_node=2"
MISTAKES: list[tuple[str, list[str], str]] = [
    (RATES, ["--config=none.py"], "^--config=none.py: no such file$"),
    (RATES, ["--workdir="], "argument --workdir: it names nothing; give a path, or leave it out$"),
    ("raise SystemExit(3)", [], r"mine.py, line \d+, `raise SystemExit\(3\)`: 3 \(SystemExit\)$"),
    ("def sweep_lr(): exit(3)", [], r"sweep_lr\(\) of mine.py: 3 \(SystemExit\)$"),
    ("def sweep_lr(: pass", [], r"mine.py, line \d+, `def sweep_lr\(: pass`: .* \(SyntaxError\)$"),
    (RATES, ["--sweep=lr,sede"], r"--sweep=sede is not in mine.py, which has lr$"),
    ("def sweep_lr(): return []", [], r"sweep_lr\(\) of mine.py returns no runs"),
    ("", [], "mine.py is not a sweep file: it needs .* sweep_NAME"),
    (f"{RATES}def sweep_x(): return chain(over('seed', (1,)), over('sed', (1,)))", [], "sed is not a key"),
    (f"{OVER}('optimizer.name', ('adamw', 'adm'))", [], r"name=adm: .* one of adamw, .*; did you mean adamw\?$"),
    (f"{OVER}('sharding.partition_size', (2,))", [], "partition_size=2: .*=2 belongs to mics, not to ddp"),
    (
        f"{OVER}('emulate.rate', ('1gbit', '-5mbit'))",
        [EMULATED],
        "rate=-5mbit: --rate=-5mbit: give a number and its unit",
    ),
    (f"{OVER}('emulate.rat', ('1gbit',))", [], "emulate.rat is not an option; the nearest is emulate.rate"),
    (RATES, ["--emulate=--speed=3"], "emulate.speed is not an option"),
    (RATES, ["--emulate=--nodes 4"], "'--nodes' of .* must have the form --name=value"),
    (f"{OVER}(3, (1, 2))", [], "3 is not a key; keys are strings"),
    (f"import numpy\n{OVER}('repetition', numpy.arange(2))", [], "repetition=0: .* must be an int, float or str"),
    ("def sweep_x(): return [3]", [], r"sweep_x\(\) of mine.py: .*TypeError"),
    (f"{seeds(1)}def sweep_again(): return over('seed', (2,))", [], "two of the combined sweeps set seed"),
    (RATES, ["--workers=0"], "--workers=0 must be at least 1"),
    (RATES, ["--config.num_steps=5"], r"takes no --config.KEY; put it into the sweep file's get_config\(\)$"),
    (RATES, ["--worker=2"], "--worker=2"),
    (RATES, ["--ray=local", "--emulate=--nodes=2"], "--ray excludes --slurm and the emulated"),
    (RATES, ["--slurm=", "--emulate=--nodes=2"], "exclude each other"),
    (f"{RATES}GOAL = 'least'", [], "GOAL='least' must be one of min, max"),
    (
        "def sweep_x(): return [{'sharding.strategy': 'mics', 'sharding.partition_size': p} for p in (4, 3)]",
        [EMULATED],
        "strategy=mics,partition_size=3: sharding.partition_size=3: a partition group of 3 devices does not fit",
    ),
    (
        "def sweep_x(): return [{'local_sgd.inner_steps': h, 'mesh.num_cpu_devices': 2} for h in (5, 30)]",
        [],
        "inner_steps=30,num_cpu_devices=2: num_steps=20 must be a multiple of local_sgd.inner_steps=30",
    ),
    (
        f"{OVER}('sharding.replicas', ('one_world', 'independent'))",
        [],
        "replicas=independent: sharding.replicas=independent is many train.py, and a run of a sweep is one; ",
    ),
]


@every_row(("body", "flags", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    body: str, flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, lambda: run_sweep(tmp_path, sweep_file(tmp_path, body), *flags), is_silent=True)
    assert re.search(message, line), line
    assert not (tmp_path / "runs").exists()


def names(folder: Path, *overrides: dict[str, object], num_steps: int = 20, emulate: str = "") -> list[str]:
    """Returns the names of the runs of a fresh base config."""
    config = sweep_file(folder, RATES, num_steps=num_steps)
    return [run.name for run in plan(config, overrides, workdir=folder / "runs", emulate=emulate)]


def test_the_content_of_a_config_names_its_run(tmp_path: Path) -> None:
    (name,) = names(tmp_path, {"optimizer.learning_rate": 0.001, "seed": 3})
    assert re.fullmatch(r"learning_rate=0.001,seed=3-[0-9a-f]{8}", name)
    digest = name[-8:]
    same = [{"seed": 3}, {"seed": 3, "optimizer.b1": 0.9}, {"seed": "3"}]  # 1e-3 and 0.9 are the defaults
    assert [n[-8:] for point in same for n in names(tmp_path, point)] == [digest] * 3
    other = [
        *names(tmp_path, {"seed": 4}),
        *names(tmp_path, {"seed": 3}, num_steps=21),
        *names(tmp_path, {"seed": 3}, emulate="--nodes=2"),
        *names(tmp_path, {"seed": 3}, emulate="--nodes=2 --rate=1gbit"),
        *names(tmp_path, {"seed": 3, "emulate.rate": "2gbit"}, emulate="--nodes=2 --rate=1gbit"),
        *names(tmp_path, {"seed": 3, "repetition": 0}, {"seed": 3, "repetition": 1}),
    ]
    assert len({digest, *(n[-8:] for n in other)}) == 8
    assert names(tmp_path, {"seed": 3}, emulate="--rate=1gbit --nodes=2") == [other[3]]
    (tmp_path / "runs" / name).mkdir(parents=True)  # a directory of the same run is used again
    assert names(tmp_path, {"optimizer.learning_rate": 0.001, "seed": 3}) == [name]


def test_a_new_key_with_its_default_renames_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_new_key(value: int) -> str:
        monkeypatch.setattr("launch.sweeps.plan.defaults", lambda kind: defaults(kind) | {"new": 5})
        monkeypatch.setattr("launch.sweeps.plan.flat", lambda nested: {"new": value} | flat(nested))
        return names(tmp_path, {"seed": 3})[0]

    (before,) = names(tmp_path, {"seed": 3})
    assert with_new_key(5) == before
    assert with_new_key(6)[-8:] != before[-8:]


def test_a_long_value_is_cut_to_a_valid_file_name(tmp_path: Path) -> None:
    """File names have at most 255 bytes, and values that differ only after the cut still get different names."""
    long = ["a" * 400, "ü" * 400, "漢" * 400, "漢" * 399, "x" + "😀" * 400]
    found = names(tmp_path, *({"sample.prompt": prompt} for prompt in long))
    assert len({*found}) == len(long)
    for name in found:
        (tmp_path / "runs" / name / "emulate").mkdir(parents=True)
    assert found[0].startswith("prompt=" + "a" * 93 + "-") and found[2].startswith("prompt=" + "漢" * 31 + "-")


@every_row(
    ("flags", "first", "count"),
    [
        ([], "learning_rate=0.001,seed=7", 4),
        (["--sweep=seed,lr"], "seed=7,learning", 4),
        (["--sweep=seed"], "seed=7", 2),
    ],
)
def test_named_sweeps_combine_in_the_order_given_and_the_same_config_runs_once(
    flags: Any, first: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = RATES + "def sweep_seed(): return chain(over('seed', (7, 8)), over('seed', (8,)))"
    assert run_sweep(tmp_path, sweep_file(tmp_path, body), "--dry_run", *flags) == 0
    left_out, shown, *rest = capsys.readouterr().out.splitlines()
    assert left_out == f"{count // 2} of {3 * count // 2} runs have the config of another one and are left out"
    assert shown.removeprefix("to do     ").startswith(first) and f"{count} runs, {count} to do" in rest[-1]
    assert not (tmp_path / "runs").exists()


def one(folder: Path, overrides: dict[str, object], **options: str) -> Run:
    (run,) = plan(sweep_file(folder, RATES), [overrides], workdir=folder / "runs", **options)
    return run


def test_the_command_starts_exactly_this_run(tmp_path: Path) -> None:
    run = one(tmp_path, {"seed": 3, "config": "big", "repetition": 2})
    assert run.command[1:] == (
        "train.py",
        f"--config={tmp_path}/mine.py:big",
        f"--workdir={tmp_path}/runs/{run.name}",
        "--config.seed=3",
    )
    emulated = one(tmp_path, {"seed": 3, "emulate.rate": "5mbit"}, emulate="--nodes=2 --rate=1gbit")
    middle = emulated.command.index("--")
    assert emulated.command[1:middle] == (
        "-m",
        "launch.emulate",
        "--nodes=2",
        "--rate=5mbit",
        f"--workdir={tmp_path}/runs/{emulated.name}/emulate",
    )
    assert emulated.command[middle + 1 :] == emulated.train_command
    assert emulated.values["emulate.rate"] == "5mbit"


def test_every_key_that_varies_is_shown(tmp_path: Path) -> None:
    points = [
        {"seed": 0, "batch.global_size": 8, "num_steps": 400, "log_every": 2},
        {"seed": 0, "batch.global_size": 16, "num_steps": 200, "log_every": 2},
        {"seed": 1, "batch.global_size": 16, "num_steps": 200, "log_every": 2},
    ]
    runs = plan(sweep_file(tmp_path, RATES), points, workdir=tmp_path)
    assert varied(runs) == ["seed", "batch.global_size", "num_steps"]


def test_shipped_sweeps_are_as_documented(tmp_path: Path) -> None:
    runs = []
    for name, count in SHIPPED.items():
        path = ROOT / "configs" / "sweeps" / f"{name}.py"
        file = load_file(str(path))
        runs += (found := plan(str(path), points(file, []), workdir=tmp_path, emulate=file.emulate))
        assert len(found) == count and f"--config=configs/sweeps/{name}.py" in file.about
    check_runs(runs)


def test_the_emulator_knows_the_options() -> None:
    words = [sys.executable, "-m", "launch.emulate", "--help"]
    known = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [option for option in EMULATE_OPTIONS if f"--{option} " not in known] == []


def test_combinations_written_out() -> None:
    a, b = over("a", (1, 2)), over("b.c", "xy")
    assert product(a, b) == [{"a": 1, "b.c": "x"}, {"a": 1, "b.c": "y"}, {"a": 2, "b.c": "x"}, {"a": 2, "b.c": "y"}]
    assert zip_(a, b) == [{"a": 1, "b.c": "x"}, {"a": 2, "b.c": "y"}]
    assert chain(a, b) == [{"a": 1}, {"a": 2}, {"b.c": "x"}, {"b.c": "y"}]
    assert len(product(a, b, over("d", range(3)))) == 12
    assert product(point for point in a) == a  # a generator serves too
    with pytest.raises(ValueError, match="2, 3 runs"):
        zip_(over("a", (1, 2)), over("b", (1, 2, 3)))


def test_samples_lie_where_they_should() -> None:
    how = {"lr": log_uniform(1e-4, 1e-1), "b2": uniform(0.9, 1.0), "layers": choice(2, 4)}
    drawn = sample(400, how, seed=3)
    assert drawn == sample(400, how, seed=3) != sample(400, how, seed=4)
    rates = sorted(point["lr"] for point in drawn)
    assert 1e-4 <= rates[0] < 2e-4 and 5e-2 < rates[-1] <= 1e-1
    assert 2e-3 < rates[200] < 5e-3  # the geometric middle of the range is 3.2e-3, the arithmetic one 5e-2
    assert 0.94 < sorted(point["b2"] for point in drawn)[200] < 0.96
    assert {point["layers"] for point in drawn} == {2, 4}
    assert all(len(f"{rate:.10g}".replace(".", "").lstrip("0").split("e")[0]) <= 3 for rate in rates)
