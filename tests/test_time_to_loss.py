"""time_to_loss: what is run, which steps are timed, and the joining of losses and steps by hand."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ports import free_port
from support.running import IGNORED, finish, start

from lab.benchmarks import time_to_loss as bench
from lab.benchmarks import time_to_loss_table as joining
from lab.benchmarks.runner import ROOT
from lab.benchmarks.time_to_loss import METHODS, TASK, Method
from runtime.files import json_lines

# ------------------------------------------------------------------------------------------------------- the plan


def planned(monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[Any]:
    """Returns the keys that the program would measure."""
    found: list[Any] = []
    monkeypatch.setattr(bench, "run_missing", lambda file, keys, measure: found.extend(keys) or 0)
    assert bench.main(argv) == 0
    return found


def test_all_methods_are_run_before_any_is_run_again_and_only_losses_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = planned(monkeypatch, "--part=losses", "--seeds=2", "--learning_rates=1e-3,4e-3", "--pytorch=python")
    assert {key["method"] for key in losses} == METHODS.keys() - {"pytorch hsdp"}  # its losses are equal to ddp's
    each = [(key["seed"], key["learning_rate"]) for key in losses]
    assert list(dict.fromkeys(each)) == [(0, 1e-3), (0, 4e-3), (1, 1e-3), (1, 4e-3)] and sorted(each) == each
    of_muon = [key["learning_rate"] for key in losses if key["method"] == "Muon, int4"]
    assert of_muon == [4e-3] * 2  # the method has a separate rate
    steps = planned(monkeypatch, "--part=times", "--pytorch=python", "--repetitions=1")
    assert {key["method"] for key in steps} == {name for name in METHODS if "long" not in name}
    ours = planned(monkeypatch, "--part=times", "--rates=1gbit,10mbit", "--repetitions=2", "--only=int4;dense")
    assert [(key["repetition"], key["method"]) for key in ours] == [(i, n) for i in (0, 1) for n in ("int4", "dense")]
    assert all(key["rates"] == ["10mbit", "1gbit"] for key in ours)  # slowest first
    assert bench.main(["--only=pytorch ddp"]) == 2  # without its Python


def test_a_method_is_timed_over_whole_intervals_and_knows_its_dense_steps() -> None:
    assert next(iter(METHODS)) == "dense" and METHODS["dense"].timed == bench.TIMED
    assert all(method.timed % method.inner_steps == 0 and method.timed >= bench.TIMED for method in METHODS.values())
    assert METHODS["one_bit_adam"].dense_steps == METHODS["one_bit_adam"].keys["compression.warmup_steps"] == 80
    assert METHODS["pytorch ddp, power_sgd"].dense_steps == 40
    long = METHODS["averages, 10 steps, int4, twice as long"]
    assert (long.steps, long.inner_steps, long.timed) == (2 * TASK["num_steps"], 10, 10)
    assert TASK["eval.every"] % long.inner_steps == 0  # there all replicas have the same parameters


def test_only_steps_after_the_first_ones_are_timed_in_whole_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def run(method: Method, part: str, keys: dict[str, Any], before: list[str], launcher: list[str]) -> Any:
        found.append((keys["num_steps"], *[word for word in before if "rate" in word]))
        every = method.inner_steps
        steps = range(every, keys["num_steps"] + 1, every)
        return [{"step": i, "step_time_s": float(i), "wire_tx_bytes": 1e6 * i} for i in steps], "command"

    monkeypatch.setattr(bench, "run", run)
    for name, lengths, steps in (("dense", 8, [4, 5, 6, 7, 8]), ("averages, 10 steps", 20, [20])):
        links = bench.times_of({"method": name, "rates": ["10mbit", "1gbit"], "latency": "0ms"}, python="")["links"]
        assert found[-2:] == [(lengths, "--rate=10mbit"), (lengths, "--rate=1gbit")]
        for link in links.values():
            assert link == {"step_times_s": [*map(float, steps)], "sent_bytes": 1e6 * np.mean(steps)}


# ----------------------------------------------------------------------------------------------------- the joining

BY_HAND = {
    "dense": Method(keys={}, steps=40, losses="dense", times="dense"),
    "coded": Method(keys={}, steps=40, dense_steps=15, losses="coded", times="coded"),
    "local": Method(keys={}, steps=80, inner_steps=10, losses="local", times="local"),
    "pytorch ddp": Method(keys={}, steps=40, peer={"mode": "ddp"}, losses="dense", times="pytorch ddp"),
    "lost": Method(keys={}, steps=40, losses="lost", times="lost"),
}
LOSSES = {"dense": [4.0, 3.0, 2.5, 2.0], "coded": [4.0, 3.0, 2.42, 1.98], "lost": [4.0, 3.0, 2.6, 2.2]}
LOSSES |= {"local": [4.0, 3.5, 3.0, 2.5, 2.3, 2.1, 2.01, 1.9]}
# seconds of a step at each link, MB sent in it
STEPS = {"dense": (8.0, 2.0, 6.0), "coded": (2.0, 1.0, 1.0), "local": (1.5, 0.8, 0.5), "pytorch ddp": (7.0, 1.5, 6.0)}
STEPS |= {"lost": (0.1, 0.1, 0.0)}


def by_hand() -> Iterator[dict[str, Any]]:
    """Yields the lines of runs whose numbers are above: every run with two seeds, the second 10 % higher, and a worse
    learning rate; every method with three repetitions, the second of them 10 % faster and the third 10 % slower."""
    for name, losses in LOSSES.items():
        at = [10 * (i + 1) for i in range(len(losses))]
        about = {"part": "losses", "method": name, "steps": at[-1], "at": at}
        for seed, rate, factor in ((0, 2e-3, 1.0), (1, 2e-3, 1.1), (0, 1e-3, 1.5), (1, 1e-3, 1.5)):
            yield {**about, "seed": seed, "learning_rate": rate, "validation_losses": [factor * x for x in losses]}
    for name, (slow, fast, sent) in STEPS.items():
        about = {"part": "times", "method": name, "latency": "0ms", "commit": "a"}
        for repetition, factor in enumerate((1.0, 0.9, 1.1)):  # a meeting: the mean counts, not the median
            links = {"10mbit": slow, "1gbit": fast}
            times = {rate: [0.5 * factor * x] * 4 + [3.0 * factor * x] for rate, x in links.items()}
            found = {rate: {"step_times_s": of, "sent_bytes": 1e6 * sent} for rate, of in times.items()}
            yield {**about, "rates": list(links), "repetition": repetition, "links": found}
        far = {"1gbit": {"step_times_s": [20 * fast], "sent_bytes": 1e6 * sent}}
        yield {**about, "latency": "20ms", "rates": ["1gbit"], "repetition": 0, "links": far}


def test_time_and_bytes_to_the_loss_are_those_by_hand() -> None:
    found = joining.joined(list(by_hand()), BY_HAND)
    # target 2.01: interpolated from 2.5 to 2.0 between steps 30 and 40, and equally with all losses 10 % higher
    dense, coded = 30 + 10 * (2.5 - 2.01) / 0.5, 30 + 10 * (2.42 - 2.01) / (2.42 - 1.98)
    assert joining.reached(found, "dense") == pytest.approx({0: dense, 1: dense})
    assert joining.reached(found, "coded") == pytest.approx({0: coded, 1: coded})
    assert joining.reached(found, "local") == pytest.approx({0: 70.0, 1: 70.0})
    assert joining.reached(found, "lost") is None and joining.time_to_loss(found, "lost", "10mbit") is None
    for rate, place in (("10mbit", 0), ("1gbit", 1)):
        of_dense, of_coded, of_local = (STEPS[name][place] for name in ("dense", "coded", "local"))
        expected = {"dense": dense * of_dense, "coded": 15 * of_dense + (coded - 15) * of_coded, "local": 70 * of_local}
        for name, seconds in expected.items():
            time = joining.time_to_loss(found, name, rate)
            assert time and (time.value, time.low, time.high) == pytest.approx((seconds, 0.9 * seconds, 1.1 * seconds))
    assert joining.bytes_to_loss(found, "coded") == pytest.approx((15 * 6 + (coded - 15) * 1) * 1e6)
    assert joining.bytes_to_loss(found, "local") == pytest.approx(35e6)


def test_links_with_latency_are_links_of_their_own() -> None:
    lines = list(by_hand())
    found = joining.joined(lines, BY_HAND)
    assert joining.rates_of(found) == ["10mbit", "1gbit"]
    time = joining.time_to_loss(found, "local", "1gbit, 20ms")
    assert time and time.value == pytest.approx(70 * 20 * 0.8)
    near = joining.time_to_loss(found, "local", "1gbit")
    assert near and near.value == pytest.approx(70 * 0.8)


def test_ratios_are_of_one_seed_and_one_repetition() -> None:
    """A seed with twice the steps counts in its pairs; an hour in which all is slow cancels, in any order of lines."""
    lines = list(by_hand())
    late = next(x for x in lines if (x["part"], x["method"], x["seed"]) == ("losses", "local", 1))
    late["at"] = [2 * step for step in late["at"]]
    slow = [x for x in lines if x["part"] == "times" and x["repetition"] == 2 and x["method"] in ("local", "dense")]
    for link in (link for x in slow for link in x["links"].values()):
        link["step_times_s"] = [10 * x for x in link["step_times_s"]]
    lines.remove(slow[1])
    other = {"commit": "b", "links": {"10mbit": {"step_times_s": [99.0], "sent_bytes": 0.0}}}  # alone there
    lines += [x | other for x in lines if x["part"] == "times" and x["method"] == "local"]
    ratio = joining.times_as_long(joining.joined([slow[1], *lines], BY_HAND), "local", "dense", "10mbit")
    ratios = [steps * 1.5 / (39.8 * 8.0) for steps in (70, 140)]
    assert ratio and (ratio.low, ratio.value, ratio.high) == pytest.approx((ratios[0], sum(ratios) / 2, ratios[1]))


def test_a_seed_that_does_not_get_there_makes_the_method_one_that_does_not() -> None:
    lines = list(by_hand())
    late = next(x for x in lines if (x["part"], x["method"], x["seed"]) == ("losses", "coded", 1))
    late["validation_losses"][-1] = 2.3
    assert joining.reached(joining.joined(lines, BY_HAND), "coded") is None


def choices(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the cells of the table of choices."""
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in joining.choice(lines).splitlines()[2:]]


def test_the_choice_is_the_fastest_and_what_is_not_slower_in_every_pair_the_fewest_bytes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "joined", partial(joining.joined, methods=BY_HAND))
    rows = choices(lines := list(by_hand()))
    assert [row[1] for row in rows] == ["10 Mbit/s", "1 Gbit/s"]
    # local 70 * 1.5 = 105 s; coded 169 s; PyTorch's 7 * 39.8 = 279 s
    assert rows[0][2:] == ["`local`", "105 (94 to 116)", "`pytorch ddp`", "279 (251 to 306)", "2.7 (2.7 to 2.7)"]
    # coded 54.3 (48.9 to 59.8) s, local 56 (50.4 to 61.6) s, dense 79.6 s; PyTorch's 1.5 * 39.8 = 59.7 s
    assert rows[1][2:4] == ["`coded`", "54 (49 to 60)"]
    # in a dense step at 10 Mbit/s the link takes 6e6 * 8 / 1e7 = 4.8 s; at 1 Gbit/s the rest takes 2 - 0.048 s
    assert rows[0][0] == f"{4.8 / (2 - 0.048):.2g}"
    once = next(x for x in lines if (x["part"], x["method"], x.get("repetition")) == ("times", "local", 1))
    once["links"]["1gbit"]["step_times_s"] = [0.9 * x for x in once["links"]["1gbit"]["step_times_s"]]
    assert choices(lines)[1][2:4] == ["`local`, `coded`", "54 (49 to 60)"]


# ---------------------------------------------------------------------------------------------------- PyTorch's peer


@IGNORED
@pytest.mark.slow
@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
def test_pytorchs_run_is_ours_up_to_rounding(tmp_path: Path) -> None:
    """Same parameters, batches, learning rates and AdamW: the losses of 6 steps, and of the validation."""
    small = {"num_steps": 6, "model.num_layers": 2, "model.hidden": 32, "model.intermediate": 128, "data.seq_len": 32}
    small |= {"model.num_heads": 2, "model.num_kv_heads": 2, "model.max_len": 32, "optimizer.warmup_steps": 2}
    keys = TASK | small | {"data.source": "synthetic", "eval.every": 3, "eval.num_batches": 2}
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    ran = finish(start([f"--config={ROOT}/configs/base.py", f"--workdir={tmp_path / 'ours'}", *flags]))
    assert [code for code, _, _ in ran] == [0], ran
    (tmp_path / "peer").mkdir()
    (script, options) = bench.peer_words(METHODS["pytorch ddp"], tmp_path / "peer", keys)
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, script, options], cwd=ROOT, env=os.environ | world, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-500:]
    ours, theirs = (json_lines.read(tmp_path / name / "metrics.jsonl") for name in ("ours", "peer"))
    for key in ("loss", "validation_loss"):
        values = [np.array([row[key] for row in rows if key in row]) for rows in (ours, theirs)]
        assert len(values[0]) == (6 if key == "loss" else 2)
        np.testing.assert_allclose(*values, rtol=2e-5)
    assert json.loads(options)["mode"] == "ddp"


ALL_PEERS = """
import json, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.init_process_group = dist.destroy_process_group = lambda *_: None  # one group for all runs
sys.path.insert(0, "lab/benchmarks")
from pytorch_on_text import main
for options in json.load(open(sys.argv[1])):
    main(options)
"""


@IGNORED
@pytest.mark.release
@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
def test_the_loss_of_each_pytorch_method_falls(tmp_path: Path) -> None:
    """On two processes, for two intervals of local SGD. Post-local SGD begins with the steps of dense SGD."""
    small = {"num_steps": 160, "model.num_layers": 1, "model.hidden": 32, "model.intermediate": 128, "data.seq_len": 16}
    small |= {"model.num_heads": 2, "model.num_kv_heads": 2, "model.max_len": 16, "optimizer.warmup_steps": 2}
    small |= {"batch.global_size": 8, "batch.micro_size": 1, "eval.num_batches": 2}
    peers = {name: method for name, method in METHODS.items() if method.peer and "long" not in name}
    words = bench.peer_words(next(iter(peers.values())), tmp_path, TASK | small | {"data.source": "synthetic"})
    with np.load(tmp_path / "data.npz") as file:
        data = dict(file)
    runs = []
    for name, method in peers.items():
        folder = tmp_path / name
        folder.mkdir()
        steps = max(20, 2 * method.inner_steps)
        np.savez(folder / "data.npz", **data | {key: data[key][:steps] for key in ("tokens", "rates")})
        own = {"data": str(folder / "data.npz"), "out": str(folder), "validate_every": steps // 2}
        own["dense_steps"] = min(4, method.dense_steps)  # of 20
        runs.append(json.loads(words[1]) | (method.peer or {}) | own)
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    (tmp_path / "peers.py").write_text(ALL_PEERS)
    two = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command = [sys.executable, *two, str(tmp_path / "peers.py"), str(tmp_path / "runs.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = {name: [row["loss"] for row in json_lines.read(tmp_path / name / "metrics.jsonl")] for name in peers}
    for name, values in losses.items():
        assert np.isfinite(values).all() and np.mean(values[-5:]) < values[0] - 0.05, (name, values)
    dense = losses["pytorch ddp"]
    for hook in ("ddp, bf16", "ddp, fp16", "ddp, fp8", "hsdp, bf16"):
        assert losses[f"pytorch {hook}"] != dense
        np.testing.assert_allclose(losses[f"pytorch {hook}"], dense, rtol=0.02)
    post_local = losses["pytorch local SGD, 10 steps, after dense steps, fp16"]
    np.testing.assert_allclose(post_local[:5], dense[:5], rtol=1e-5)
    assert post_local[6:] != dense[6:]
