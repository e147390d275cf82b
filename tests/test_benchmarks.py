"""The runner of the benchmarks, and those for GPUs, for what overlaps, and for replicas, by hand."""

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.repositories import commit as new_commit
from support.repositories import without_variables  # noqa: F401 (a fixture)

from configs import command_line
from configs.schema.own import OWN
from lab.benchmarks import asynchronous, compiled, gpu, overlap_table, replica_events, runner, step_tables, steps
from lab.benchmarks.gpu import Device, interval, mfu, table
from lab.benchmarks.names import config_file
from lab.benchmarks.overlap_table import CASES, keys_of
from lab.benchmarks.replica_events import COSTS, RANDOM
from lab.benchmarks.runner import FailedRunError, Key, alternating, run_missing
from lab.records import recorded
from runtime.files import json_lines


def test_every_choice_is_run_once_before_any_is_run_again() -> None:
    keys = alternating(2, rate=["1gbit"], name=("a", "b"))
    assert keys == [{"rate": "1gbit", "name": n, "repetition": r} for r in (0, 1) for n in ("a", "b")]


def test_what_the_record_lacks_is_run_and_a_failure_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, ran = tmp_path / "x.jsonl", list[Any]()

    def measure(key: Key) -> dict[str, Any]:
        ran.append(key["name"])
        if key["name"] == "b" and ran.count("b") == 1:
            raise FailedRunError("no\nluck")
        return {"seconds": 1.5}

    keys = alternating(1, name=("a", "b", "c"))
    assert run_missing(file, keys, measure) == 1
    assert capsys.readouterr().err == "error: b, 0: no luck\n"
    assert run_missing(file, keys, measure) == 0
    assert ran == ["a", "b", "c", "b"]
    assert run_missing(file, keys[:1], measure, again=True) == 0  # in its place
    lines = recorded(file)
    assert [line["name"] for line in lines] == ["c", "b", "a"]
    assert all(line["seconds"] == 1.5 and {"commit", "machine", "jax", "repetition"} <= line.keys() for line in lines)


@pytest.mark.usefixtures("no_repository_around")
def test_lines_name_the_code_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, records and tests may differ; where the code does, before a run or after one, nothing more is run."""
    results = tmp_path / "results"
    code, record, page = tmp_path / "train.py", results / "x.jsonl", tmp_path / "docs" / "x.txt"
    for file in (code, record, page):
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    commit = new_commit(tmp_path)
    for name, value in {"ROOT": tmp_path, "RESULTS": results, "machine": lambda: {"commit": commit}}.items():
        monkeypatch.setattr(runner, name, value)

    def measure(key: Key) -> dict[str, Any]:
        if key["repetition"]:
            code.write_text("pass")
        return {}

    keys = alternating(3)
    page.write_text("edited")
    with pytest.raises(ValueError, match=f"^train.py is not as in commit {commit[:7]}"):
        run_missing(record, keys, measure)
    assert [line["repetition"] for line in recorded(record)] == [0, 1]
    assert run_missing(tmp_path / "trial.jsonl", keys, measure) == 0  # no record


def test_a_run_begins_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an earlier run would count as those of this one."""
    workdir = tmp_path / "run"

    def start(command: list[str]) -> str:
        assert command[0] == "before" and f"--workdir={workdir}" in command and not workdir.exists()
        workdir.mkdir()
        (workdir / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        return ""

    monkeypatch.setattr(runner, "started", start)
    for _ in range(2):
        run, command = runner.train(workdir, "configs/quickstart.py", {"num_steps": 1}, ["before"])
        assert [row["loss"] for row in run.rows] == [2.0] and command.endswith("--config.num_steps=1")


# --------------------------------------------------------------------------------------------------------- on a GPU


OF_BOTH = ["--cpu", "--sizes=tiny", "--repetitions=2", "--steps=4"]


@pytest.mark.release
def test_a_tiny_model_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICS_JAX_CACHE", "")
    record = tmp_path / "gpu.jsonl"
    peer = [f"--pytorch={sys.executable}"] if find_spec("torch") else []
    assert gpu.main([*OF_BOTH, *peer, f"--results={record}"]) == 0
    lines = json_lines.read(record)
    assert [line["repetition"] for line in lines if line["side"] == gpu.OURS] == [0, 1]
    assert [len(line["losses"]) for line in lines if line["side"] == gpu.LOOP] == [4]
    assert all(line["tokens_per_s"] > 0 and line["mfu"] is None for line in lines)
    assert capsys.readouterr().out.splitlines()[-1].startswith("| tiny | ")
    assert next((gpu.CACHE / "compiled").iterdir())


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "find_gpus", lambda: None)
    assert gpu.main([]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["error: this needs a GPU and jax with CUDA (make gpu); --cpu tries the program without"]


def test_the_sizes_are_what_they_are_called() -> None:
    """By the FLOPs of a token: 6 for each parameter that is multiplied with, and those of the scores."""
    device = Device(count=2, kind="NVIDIA H100", peak_flops=1e12)
    per_token = {size: mfu(size, 2e12, device) for size in ("124m", "350m", "1.3b")}
    assert per_token["124m"] == pytest.approx(6 * 124e6 + 12 * 12 * 768 * 1024, rel=0.01)
    assert per_token["350m"] == pytest.approx(6 * 354e6 + 12 * 24 * 1024 * 1024, rel=0.01)
    assert per_token["1.3b"] == pytest.approx(6 * 1.31e9 + 12 * 24 * 2048 * 1024, rel=0.01)


def test_the_table() -> None:
    line = {"size": "124m", "mfu": 0.5, "device": "H100", "devices": 1, "repetition": 0, "commit": "a"}
    ours = [
        line | {"side": gpu.OURS, "tokens_per_s": speed, "losses": [4, 2], "start_s": start, "repetition": number}
        for number, (speed, start) in enumerate(((1000, 60), (1200, 20), (1100, 20)))
    ]
    loop = line | {"side": gpu.LOOP, "tokens_per_s": 900, "losses": [4, 2.002], "mfu": 0.4, "start_s": 12}
    theirs = [line | {"side": gpu.PEER, "tokens_per_s": 1000, "mfu": None, "repetition": number} for number in range(3)]
    assert table([loop, *ours, *theirs]).splitlines()[2:] == [
        "| 124m | 1 x H100 | in a loop | 900 (900 to 900) | 40.0% | 0.90 | 12 s | 1e-03 |",
        "| 124m | 1 x H100 | mics-jax | 1,100 (1,000 to 1,200) | 50.0% | 1.10 ± 0.25 | 60 s | 0e+00 |",
        "| 124m | 1 x H100 | pytorch | 1,000 (1,000 to 1,000) | - | - | - | - |",
    ]
    assert "| 1.20 |" in table([ours[1], *theirs]).splitlines()[2]  # of the same repetition
    assert "| 50.0% | - |" in table([ours[1] | {"commit": "b"}, *theirs]).splitlines()[2]  # ... at the same commit
    other = [each | {"devices": 8} for each in theirs]
    assert table([*ours, *other]).splitlines()[2].endswith("| - | 60 s | 0e+00 |")
    assert interval([1.5]) == "1.50" and interval([]) == "-"


# ---------------------------------------------------------------------------------------------------- what overlaps


def run_elsewhere(file: Path, _: Path, keys: Any, measure: Any, *, again: bool) -> int:
    return run_missing(file, keys, measure, again=again)


def test_without_xla_for_gpus_it_is_an_error_of_one_line_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("planner.targets.WHEELS", tmp_path / "none")
    monkeypatch.setattr(compiled, "start_devices", lambda count: None)  # this process has its own
    monkeypatch.setattr(compiled, "run_missing", partial(run_elsewhere, tmp_path / "overlap.jsonl"))
    assert overlap_table.main(["--only=1.3 B, zero3"]) == 1 and overlap_table.main(["--only=zero4"]) == 2
    *said, unknown = capsys.readouterr().err.splitlines()
    assert said[0] == "error: 1.3 B, zero3, False, 100gbit: XLA for GPUs is not installed: make .venv/h100/installed"
    assert len(said) == 6 and unknown == "error: --only=zero4 is in no name, such as mics(8)"


def test_the_configs_of_the_cases_are_accepted(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case=case):
            for overlap in (False, True):
                keys = keys_of(case, overlap=overlap)
                words = [
                    f"--config={config_file(CASES[case]['config'])}",
                    *(f"--config.{key}={keys[key]}" for key in keys),
                ]
                config = command_line.parse(["x", *words])
                assert config.sharding.overlap == ("auto" if overlap else "off")


# --------------------------------------------------------------------------------------------------------- replicas


def cells(table: str) -> list[list[str]]:
    """The cells of each row, without the heads."""
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


# --------------------------------------------------------------------------------------------------------- steps


def line(run: str, repetition: int, *times: float, commit: str = "a", cores: int = 2) -> dict[str, Any]:
    """A line of replicas.jsonl with the steps that it timed; 90 MB are sent."""
    about = {"mode": "four micro-steps", "rate": "200mbit", "run": run, "repetition": repetition, "commit": commit}
    found = {"step_time_s": -1.0, "step_times_s": list(times), "sent_bytes": 9e7}
    return {**about, **found, "machine": f"{cores} CPU cores"}


def test_steps_are_the_last_five_and_compared_within_a_repetition_at_one_commit() -> None:
    """PyTorch's first one, which is longer, counts nowhere; neither does one world's step of another day."""
    lines = [line("one_world none", i, *5 * [seconds]) for i, seconds in enumerate((10.0, 20.0, 40.0))]
    lines += [line("pytorch ddp", i, 99.0, 1.0, 1.0, s, 99.0, 99.0) for i, s in enumerate((8.0, 10.0, 16.0))]
    lines += [line("independent int8", 0, *5 * [5.0], commit="b"), line("independent int8", 1, *5 * [5.0])]
    lines += [line("independent int4", 0, *5 * [4.0], commit="b"), line("independent int8", 0, *5 * [0.96], cores=16)]
    assert cells(step_tables.replicas(lines)) == [
        ["2", "4", "200mbit", "`one_world none`", "3", "20.0 (10.0 to 40.0)", "1.00 (1.00 to 1.00)", "90 MB"],
        ["2", "4", "200mbit", "`pytorch ddp`", "3", "10.0 (8.0 to 16.0)", "0.50 (0.40 to 0.80)", "90 MB"],
        ["2", "4", "200mbit", "`independent int8`", "2", "5.0 (5.0 to 5.0)", "0.25 (0.25 to 0.25)", "90 MB"],
        ["2", "4", "200mbit", "`independent int4`", "1", "4.0", "-", "90 MB"],
        ["16", "4", "200mbit", "`independent int8`", "1", "0.96", "-", "90 MB"],
    ]


def row(seconds: float, count: int, sent: float) -> dict[str, Any]:
    return {"step_time_s": seconds, "replicas": count, "wire_tx_bytes": sent}


def test_time_and_bytes_are_those_of_steps_that_all_replicas_took_part_in() -> None:
    rows = [row(9.0, 2, 1.0), row(9.0, 4, 1.0), *(row(i, 4, 10.0 * i) for i in (3.0, 1.0, 2.0, 5.0, 4.0))]
    wire = {"wire_tx_bytes": 30.0, "wire_rx_bytes": None}
    assert steps.timed(rows) == {"step_time_s": 3.0, "step_times_s": [3.0, 1.0, 2.0, 5.0, 4.0], **wire}
    rows[2]["replicas"] = 3
    with pytest.raises(FailedRunError, match="had 3 of 4 replicas"):
        steps.timed(rows)
    alone = [{name: value for name, value in one.items() if name != "replicas"} for one in rows]  # of one world
    assert steps.timed(alone)["step_time_s"] == 3.0


def test_pytorch_skips_as_many_steps_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(command: list[str]) -> dict[str, Any]:
        asked.extend(command)
        return {"wire_tx_bytes": 7}

    monkeypatch.setattr(steps, "result_of", answer)
    key = {"mode": "one micro-step", "rate": "200mbit", "run": "pytorch ddp fp16"}
    assert steps.measured("replicas", key, python="torch/python")["sent_bytes"] == 7
    assert asked[-5:] == ["ddp", "fp16", "accum=1", "steps=7", "skipped=2"] and "torch/python" in asked


def test_keys_of_the_examples_need_no_registered_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config file of the runs registers them: else other programs and tests would know them after an import."""
    monkeypatch.setitem(OWN, "all_reduce", {})
    keys = {"compression.all_reduce": "demo", "batch.global_size": 8, "optimizer.name": "sgd"}
    assert steps.codec_keys("demo") == keys
    assert "optimizer.name" not in steps.codec_keys("power_sgd")


# -------------------------------------------------------------------------------------------------------- events


def test_an_event_costs_its_longest_step_beyond_a_calm_one_of_its_run() -> None:
    runs = [{"none": [1.0, 1.0, 3.0], "kill": [1.0, 2.0, 4.0]}, {"none": [2.0, 2.0, 2.0], "kill": [2.0, 3.0, 9.0]}]
    lines = [{"mode": COSTS, "step_times_s": times} for times in runs] + [{"mode": RANDOM}]
    assert cells(replica_events.table(lines)) == [
        ["none", "2", "1.5 (1.0 to 2.0)", "2.5 (2.0 to 3.0)", "1.0 (0.0 to 2.0)"],
        ["kill", "2", "2.5 (2.0 to 3.0)", "6.5 (4.0 to 9.0)", "5.0 (3.0 to 7.0)"],
    ]


def test_asynchronous_rounds_count_once_the_slow_node_is_slow() -> None:
    rounds = [(0, [0, 1], [200, 200, 200]), (1, [0, 1, 2], [200, 200, 150])]  # the second: not slow yet
    rounds += [(2, [0, 1, 2], [200, 200, 50]), (3, [0, 1, 2], [200, 200, 60])]
    rows = [[{"step": 200 * (i + 1), "in_steps": share} for i, share in enumerate((0.0, 0.0, 0.8, 0.9))]] * 3
    found = asynchronous.summary([dict(zip(("round", "replicas", "steps"), x, strict=True)) for x in rounds], rows)
    assert (found["rounds"], found["rounds_of_all"], found["steps"]) == (4, 2, [200, 200, 55])
    assert found["in_steps"] == pytest.approx([0.85] * 3)
    losses = {"run": 2.02, "replay": 2.02, "lockstep": 2.0}
    line = {"latency": "80ms", "validation_losses": losses, **found}
    assert asynchronous.table([line]).splitlines()[-1] == "| 80ms | 1 | 200.0 | 55.0 | 85.0 | +1.00% | 1 of 1 |"
