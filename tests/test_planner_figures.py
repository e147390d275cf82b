"""Figures of plans have sources, plans in configs are recorded, and predictions match measured and published steps."""

import ast
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from typing import Any

import pytest
from support.running import ROOT
from support.tables import every_row

from configs import command_line
from lab.benchmarks import planner_configs, planner_errors, published_steps, published_tpu_steps
from lab.benchmarks.planner_records import RECORDS, plans_of
from lab.paper.replays import PLANNER
from lab.paper.throughput import runs
from lab.records import Line, read_records, recorded
from planner import clusters, rates
from planner.bounds import bounds
from planner.clusters import CLUSTERS
from planner.question import command_flags, question_of
from planner.rates import MissingRateError, Rates
from planner.targets import WHEELS
from training.experiment import make_experiment

ROWS = rates.rows()
FEEDS_ALL = ("GPU", "GPU nodes", "NCCL")


def test_without_a_figure_only_what_it_feeds_changes(subtests: pytest.Subtests) -> None:
    """A cluster that needs it is not offered, or has no price; all others are as before."""
    for row in ROWS:
        with subtests.test(row=row):
            left = clusters.all_clusters(Rates(other for other in ROWS if other is not row))
            changed = {name for name, cluster in clusters.CLUSTERS.items() if left.get(name) != cluster}
            having = {other.of for other in ROWS if other.figure == row.figure}
            own = {name: [of for of in clusters.GPUS[gpu][0] if of in having] for name, gpu in clusters.NODES.items()}
            fed = {name for name in own if row.of in (name, *own[name][:1], *FEEDS_ALL)}  # the first has the figure
            falls_back = any(row.of in own[name][:-1] for name in fed) and row.figure not in ("memory", "bandwidth")
            if row.of in ("CPU", "GLOO"):
                fed = {"emulated"}
            if row.of.startswith("fsdp on "):  # another system's
                fed = set()
            assert changed == fed
            is_price = row.figure in ("on demand", "spot") or row.figure.startswith("attention")
            assert (changed <= left.keys()) == (is_price or falls_back or not fed)


def test_another_system_has_its_own_attention_and_hides_otherwise() -> None:
    ours = clusters.CLUSTERS["p5.48xlarge"]
    theirs = clusters.with_system(ours, "fsdp")
    assert theirs.device.attention == {"forward": 0.181, "backward": 0.181} != ours.device.attention
    assert replace(theirs, device=ours.device, hides=ours.hides) == ours
    hides = [clusters.with_system(ours, system).hides for system in clusters.SYSTEMS]
    assert hides == ["schedule", "all", "nothing", "all inside nodes"]
    assert clusters.with_system(clusters.EMULATED, "ours") == clusters.EMULATED


def test_a_row_without_source_or_number_is_refused(subtests: pytest.Subtests) -> None:
    for line, message in [
        ("H100,products,0.5,share,,2024-01", "'products' of H100 has no source or date"),
        ("H100,products,half,share,somewhere,2024-01", "could not convert string to float: 'half'"),
    ]:
        with subtests.test(line=line, message=message), pytest.raises(ValueError, match=message):
            rates.read(f"of,figure,value,unit,source,date\n{line}")


def test_a_figure_that_is_missing_is_named() -> None:
    with pytest.raises(MissingRateError, match="rates.csv has no 'links' of B300 or GPU: add a row, with its source"):
        Rates(ROWS)("links", "B300", "GPU")


# ------------------------------------------------------------------------------- plans in the docstrings of configs


FILES = sorted(file for file in (ROOT / "configs").rglob("*.py") if "\ndef get_config(" in file.read_text())
LINE = {
    "config": "llama.py:8b",
    "cluster": "p5.48xlarge",
    "nodes": 2,
    "devices": 16,
    "memory_bytes": 41_200_000_000,
    "capacity_bytes": 76_448_000_000,
    "step_s": 3.2149,
    "num_steps": 1000,
}


@pytest.mark.document
def test_each_config_has_a_plan_of_it_as_it_is() -> None:
    recorded_names = [line["config"] for line in recorded(planner_configs.RESULTS)]
    assert sorted(recorded_names) == sorted(planner_configs.FLAGS)
    now = [line["config"] for line in planner_configs.lines()]
    assert now == [*planner_configs.FLAGS], "python -m lab.benchmarks.planner_configs plans those that changed"


@pytest.mark.document
@every_row("file", FILES)
def test_a_docstring_has_the_plans_of_its_file_or_what_came_of_a_run(file: Any) -> None:
    of = [line for line in recorded(planner_configs.RESULTS) if line["config"].partition(":")[0] == file.name]
    about = ast.get_docstring(ast.parse(file.read_text())) or ""
    said = re.findall(r"^ +(\S+: \d+ \S+ \([\d,]+ [GT]PUs\), .*)$", about, re.MULTILINE)
    assert sorted(said) == sorted(map(planner_configs.text, of))
    assert of or "Expected" in about or file.name == "base.py"


PLANS = {line["config"]: line for line in recorded(planner_configs.RESULTS)}


@every_row("name", ["long_context.py:8b", "gemma.py:2b", "gpu_decoder.py:124m"])
def test_no_bound_is_above_a_recorded_plan(name: str) -> None:
    """Of long rows, whose attention is half of the pairs; and of a large vocabulary, whose logits come in pieces."""
    plan = PLANS[name]
    assert plan["devices"] == 8
    words = [word for word in shlex.split(plan["command"]) if word.startswith("--config")]
    keys = ("--config.mesh.num_cpu_devices=0", "--config.mesh.devices_per_node=8")
    found = bounds(make_experiment(command_line.parse(["planner", *words, *keys])), CLUSTERS[plan["cluster"]])
    assert found.least_s <= plan["step_s"] and found.least_bytes <= plan["memory_bytes"]


MEMORY = "(16 GPUs), 41.2 GB of 76.4 GB a GPU"


@every_row(
    ("changes", "text"),
    [  # 3.2149 s x 1000 x 2 x $55.04 / h
        ({}, f"8b: 2 p5.48xlarge {MEMORY}, 3.21 s a step, $98 for its 1,000 steps on demand"),
        ({"step_s": 0.01}, f"8b: 2 p5.48xlarge {MEMORY}, 10.0 ms a step, $0.31 for its 1,000 steps on demand"),
        ({"config": "wide.py", "cluster": "h100-10gbit"}, f"wide: 2 h100-10gbit {MEMORY}, 3.21 s a step"),
    ],
)
def test_a_line_as_text(changes: dict[str, Any], text: str) -> None:
    assert planner_configs.text(LINE | changes) == text


def test_what_is_missing_is_planned_and_lines_of_another_config_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def started(command: list[str]) -> str:
        commands.append(command[1:])
        return RECORDS["example"].read_text()

    monkeypatch.setattr(planner_configs, "RESULTS", tmp_path / "x.jsonl")
    monkeypatch.setattr(planner_configs, "started", started)
    kept = {**planner_configs.key_of("qwen.py:8b"), "step_s": 1.0}
    stale = {**planner_configs.key_of("qwen.py:7b"), "keys": {}}
    (tmp_path / "x.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (stale, kept)))
    assert planner_configs.main(["--only=qwen"]) == 0
    words = ["--config=configs/qwen.py:7b", "--cluster=p5.48xlarge", "--nodes=1", "--json"]
    assert commands == [["-m", "planner", *words]]
    first, line = recorded(tmp_path / "x.jsonl")
    assert first == kept and line["config"] == "qwen.py:7b" and line["commit"]
    assert (line["nodes"], line["devices"], line["num_steps"]) == (16, 128, 1000)  # the example's, the config's
    assert line["step_s"] == plans_of("example")[0].best.step_s
    capsys.readouterr()
    assert planner_configs.main(["--only=bert_9b"]) == 2
    assert capsys.readouterr().err.startswith("error: --only=bert_9b is in none of llama.py:8b, ")


# ------------------------------------------------------------------------------------- predictions and measurements


@pytest.mark.document
def test_every_timed_run_was_predicted() -> None:
    """Steps of the emulated cluster, of independent replicas, and of one GPU."""
    for name, timed in planner_errors.TIMED.items():
        runs = [*timed()]
        lines = [{key: line[key] for key in runs[0]} for line in recorded(planner_errors.RECORDS[name])]
        assert sorted(lines, key=str) == sorted(runs, key=str)


@pytest.mark.release
@pytest.mark.parametrize("name", ["zero3", "mics(2), int8, 1 micro-step"])
def test_a_recorded_prediction_is_todays(name: str) -> None:
    line = next(line for line in recorded(planner_errors.RECORDS["steps"]) if line["name"] == name)
    assert planner_errors.predicted_step(line)["predicted_s"] == pytest.approx(line["predicted_s"], rel=1e-6)


@pytest.mark.release
@pytest.mark.skipif(not WHEELS.exists(), reason="XLA for GPUs is not installed: make .venv/h100/installed")
def test_a_recorded_replay_of_a_published_step_is_todays() -> None:
    line = next(line for line in held_back() if (line["model"], line["gpus"]) == ("mpt-125m", 8))
    found = published_steps.replayed(line)
    assert {name: line[name] for name in found} == pytest.approx(found, rel=1e-6)


def test_what_of_the_sending_is_exposed_is_what_a_step_takes_beyond_the_planned_compute() -> None:
    """8 s of a step of 10 are compute that hides 3 of 5 s of sending; it took 1 s longer."""
    line = {
        "mode": "four micro-steps",
        "rate": "1gbit",
        "run": "independent none",
        "runs": 1,
        "measured_bytes": 1e6,
        "predicted_bytes": 2e6,
    }
    line |= {"measured_s": 11.0, "predicted_s": 10.0, "sending_s": 5.0, "exposed_s": 2.0}
    row = planner_errors.replicas_table([line]).splitlines()[-1]
    assert row == "| 4 | 1gbit | `independent none` | 1 | 2 | 1 | 10.0 | 11.0 | -9% | 40% | 60% |"


@pytest.mark.document
def test_the_figures_of_the_cpu_are_those_that_were_measured() -> None:
    newest = recorded(planner_errors.CPU_RATES)[-1]
    device = clusters.CPU
    ours = device.peak_flops["f32"], device.memory_bandwidth, device.functions_per_s
    for figure, kind in zip(ours, ("products", "moves", "functions"), strict=True):
        rate = harmonic_mean(map(median, newest[kind]))  # as much of each case
        assert figure == pytest.approx(1e9 * rate, rel=0.01)


def test_error_bars_are_those_of_the_comparisons() -> None:
    """Of the emulated cluster, of the MiCS paper's steps by the planner's own figures, and of steps held back."""
    session = planner_errors.BESIDE_THE_RATES
    beside = [line for line in recorded(planner_errors.RECORDS["steps"]) if line["timed"] == session]
    cells = [run.cell() for run in runs(read_records(), "figure 7", PLANNER) if run.bar.system == "MiCS"]
    errors = {
        "CPU": [planner_errors.error(line) for line in beside],
        "V100": [cell.published / cell.ours - 1 for cell in cells if cell.published and cell.ours],  # of seconds
        "others": [planner_errors.error(line, "published_s") for line in held_back()],
        "TPU": [planner_errors.error(line, "published_s") for line in on_tpus()],
    }
    for kind, bar in clusters.ERROR_BARS.items():
        assert ("the planner was built with" in str(bar)) == bar.built_with == (kind not in ("others", "TPU"))
        assert bar.of.startswith(f"{len(errors[kind])} steps")
        assert bar.half_within == round(planner_errors.quantile(errors[kind], 0.5), 2)
        assert bar.nine_of_ten_within == round(planner_errors.quantile(errors[kind], 0.9), 2)


def on_tpus(rows: str = published_tpu_steps.FSDP) -> list[Line]:
    return published_tpu_steps.groups(recorded(published_tpu_steps.RESULTS))[rows]


def test_a_plan_with_tensor_parallelism_on_tpus_has_the_errors_of_published_steps() -> None:
    errors = [planner_errors.error(line, "published_s") for line in on_tpus("tensor parallelism inside a slice")]
    low, high = -100 * min(errors), 100 * max(errors)
    said = f"{len(errors)} published steps on TPUs were planned {low:.0f} % too short to {high:.0f} % too long"
    argv = ["planner", f"--config={ROOT / 'configs' / 'tpu_decoder.py'}:16b", "--cluster=v5e-16"]
    for tensor, is_there in ((1, False), (2, True)):
        words = [*argv, f"--config.mesh.tensor={tensor}"]
        assert any(said in note for note in question_of(words, command_flags(words)).notes) == is_there


def held_back() -> list[Line]:
    return published_steps.groups(recorded(published_steps.RESULTS))["held back, all"]


@pytest.mark.document
def test_every_published_step_was_predicted_and_a_third_chose_rates() -> None:
    cells, lines = published_steps.cells(), recorded(published_steps.RESULTS)
    assert len(cells) == len(lines) == 93
    assert all(any(cell.items() <= line.items() for line in lines) for cell in cells)
    assert sum(cell["chose_rates"] for cell in cells) == 30


def test_steps_that_ran_are_not_refused_and_those_held_back_are_predicted() -> None:
    """The aims: a mean error of 10 %, nine of ten within 20 %, no bias beyond 4 %; all steps that ran fit."""
    assert all(line["memory_bytes"] <= line["capacity_bytes"] for line in recorded(published_steps.RESULTS))
    errors = [planner_errors.error(line, "published_s") for line in held_back()]
    assert fmean(map(abs, errors)) <= 0.10
    assert planner_errors.quantile(errors, 0.9) <= 0.20
    assert abs(fmean(errors)) <= 0.04


@pytest.mark.document
def test_most_steps_below_half_of_the_memory_lack_all_logits() -> None:
    """Of 50,368 words in bf16, in f32, and their gradient in f32: the page says how many are below half with them."""
    lines = [line for line in recorded(published_steps.RESULTS) if line["model"].startswith("mpt")]
    logits = [line["micro_batch"] * line["seq"] * 50368 * (2 + 4 + 4) for line in lines]
    below = [
        sum(line["memory_bytes"] + more < line["capacity_bytes"] / 2 for line, more in zip(lines, added, strict=True))
        for added in ([0] * len(lines), logits)
    ]
    assert below == [34, 3]
