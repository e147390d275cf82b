"""Configs for GPUs say what they need and cost: their docstrings hold the recorded plans, those of today."""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.running import ROOT
from support.tables import every_row

from configs import command_line
from lab.benchmarks import planner_configs
from lab.benchmarks.planner_records import RECORDS, plans_of
from lab.records import recorded
from planner.bounds import bounds
from planner.clusters import CLUSTERS
from training.experiment import make_experiment

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
    said = re.findall(r"^ +(\S+: \d+ \S+ \(\d+ GPUs\), .*)$", about, re.MULTILINE)
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
