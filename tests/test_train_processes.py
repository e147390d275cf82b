"""Several real processes of one run: the losses of one process, one voice, and a stop that all agree on."""

import json
import os
import re
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.running import (
    arguments,
    finish,
    losses,
    manifest,
    rows,
    run_here,
    start,
    start_together,
    steps_logged,
    stop_after,
    wait_until,
)

from runtime.preemption import PreemptionHandler

RESUMABLE = 75
SAME = {"rtol": 1e-5}
GLOO = re.compile(r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :")


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process with 8 devices: the losses do not depend on their number."""
    workdir = tmp_path_factory.mktemp("by_one")
    assert run_here(*arguments(workdir)) == 0
    return workdir


def check_all_done(workdir: Path, by_one: Path, outcomes: list[tuple[int, str, str]]) -> None:
    assert [code for code, _, _ in outcomes] == [0] * len(outcomes), outcomes
    assert "first step done after" in outcomes[0][1]
    check_silent(outcomes[1:])
    np.testing.assert_allclose(losses(workdir), losses(by_one), **SAME)
    environment = json.loads((workdir / "environment.json").read_text())
    assert environment["processes"] == len(outcomes)


def check_silent(outcomes: list[tuple[int, str, str]]) -> None:
    """Process 0 alone prints; gloo's C++ threads do too, in pieces, in the middle of each other's lines."""
    for _, out, _ in outcomes:
        assert GLOO.sub("", out).strip(" 0123456789\n") == ""


@pytest.mark.slow
def test_a_run_goes_on_with_another_strategy_and_then_on_fewer_devices(tmp_path: Path, by_one: Path) -> None:
    zero3 = arguments(tmp_path, sharding__strategy="zero3", sharding__partition_size=0)
    assert run_here(*arguments(tmp_path), hooks=[stop_after(4)]) == RESUMABLE
    assert run_here(*zero3, hooks=[stop_after(7)]) == RESUMABLE
    code, _, err = finish(start([*zero3, "--config.mesh.num_cpu_devices=2"]))[0]
    assert code == 0, err
    np.testing.assert_allclose(losses(tmp_path), losses(by_one), **SAME)


@pytest.mark.slow
def test_two_processes_stop_together_and_resume(tmp_path: Path, by_one: Path) -> None:
    """By a signal to either process while a step is saved (every step is), then to both as a terminal sends Ctrl-C.

    The second time they count from a later step, and one process resumes the run of two.
    """
    args, done = arguments(tmp_path, checkpoint__every=1, eval__every=4), 0
    for number in (signal.SIGUSR1, signal.SIGINT):
        two = start_together(args, 2, devices=2, pause_s=1.5)
        wait_until(lambda before=done: steps_logged(tmp_path) > before + 1, two[0])
        for process in two[number == signal.SIGUSR1 :]:
            process.send_signal(number)
        outcomes = finish(*two)
        assert [code for code, _, _ in outcomes] == [RESUMABLE] * 2, outcomes
        before, done = done, len(losses(tmp_path))
        assert before < done < 10
        assert f"stopped at step {done}; run the same command again" in outcomes[0][1]
        check_silent(outcomes[1:])
        assert manifest(tmp_path, done)["step"] == done
    code, out, err = finish(start([*args, "--config.mesh.num_cpu_devices=4"]))[0]
    assert code == 0, err
    assert f"resumed at step {done} of 10" in out
    np.testing.assert_allclose(losses(tmp_path), losses(by_one), **SAME)


@pytest.mark.release
@pytest.mark.parametrize(("count", "devices", "p"), [(3, 1, 1), (4, 1, 2)])
def test_processes_match_one_process(tmp_path: Path, by_one: Path, count: int, devices: int, p: int) -> None:
    args = arguments(tmp_path, mesh__devices_per_node=devices, sharding__partition_size=p)
    check_all_done(tmp_path, by_one, finish(*start_together(args, count, devices=devices)))
    assert "wire_tx_bytes" in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.release)])
def test_processes_count_broken_documents_together_and_stop_early_alike(tmp_path: Path, most: int) -> None:
    """Each has a cache. Beyond the limit both end with one line; within it a named set ends both at the same step."""
    (tmp_path / "files").mkdir()
    (tmp_path / "own").mkdir()
    for number in range(4):
        lines = json.dumps({"text": f"text number {number} " * 40}) + "\nnonsense\n" * (number < 3)
        (tmp_path / "files" / f"{number}.jsonl").write_text(lines)
    (tmp_path / "own" / "a.txt").write_bytes(b"\x01\x02\x03\x04" * 400)
    changes: dict[str, Any] = {"data__source": "shards", "data__path": tmp_path / "files", "eval__patience": 2}
    changes |= {"eval__data": f"own folder:{tmp_path / 'own'}", "eval__every": 1, "mesh__devices_per_node": 1}
    changes |= {"checkpoint__every": 1, "checkpoint__keep_best": 1, "checkpoint__keep_last": 1}
    own_cache = f"import os, sys; os.environ['MICS_JAX_CACHE'] = {str(tmp_path)!r} + '/cache' + sys.argv[-1][-1]"
    args = arguments(tmp_path / "run", sharding__partition_size=1, data__skip_bad=most, **changes)
    outcomes = finish(*start_together(args, 2, devices=1, first=own_cache))
    if most < 3:
        assert [code for code, _, _ in outcomes] == [2, 2] and "Traceback" not in str(outcomes), outcomes
        error = "error: document 3 that is broken, more than data.skip_bad=2: "
        assert [err.count(error) for _, _, err in outcomes] == [1, 1]
        return
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    check_silent(outcomes[1:])
    assert len((tmp_path / "run" / "skipped_documents.txt").read_text().splitlines()) == 3
    measured = {row["step"]: row["validation_loss/own"] for row in rows(tmp_path / "run") if "validation_loss" in row}
    best = min(measured, key=measured.__getitem__)
    assert f"lower loss than {measured[best]:.4f} of step {best} (eval.patience)" in outcomes[0][1]
    saved = (tmp_path / "run" / "checkpoints").iterdir()
    assert {path.name for path in saved if path.name.isdigit()} == {str(best), str(best + 2)}


@pytest.mark.slow
@pytest.mark.parametrize("joined", [True, False])
def test_signals_are_handled_until_the_end(tmp_path: Path, joined: bool) -> None:
    """An engine that repeats its signal does not turn an orderly stop into a failure.

    Two joined processes stop by the signal to one process. Flags give the addresses, so Kubernetes is not contacted.
    """
    job = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "JOB_COMPLETION_INDEX": "0"}
    args = arguments(tmp_path, num_steps=100000, mesh__num_cpu_devices=1, mesh__devices_per_node=1)
    args.append("--config.sharding.partition_size=1")
    processes = start_together(args, 2, devices=1, **job) if joined else [start(args)]
    first = processes[0]
    wait_until(lambda: steps_logged(tmp_path) >= 1, first)
    first.terminate()
    assert first.stdout
    said = next((line for line in first.stdout if "stopped at step" in line), "")
    while first.poll() is None:
        first.terminate()
        time.sleep(0.01)
    outcomes = finish(*processes)
    assert [code for code, *_ in outcomes] == [RESUMABLE] * len(processes), outcomes
    done = len(losses(tmp_path))
    assert f"stopped at step {done}; run the same command again" in said
    assert manifest(tmp_path, done)["step"] == done


@pytest.mark.parametrize("joined", [True, False])
def test_signals_are_forwarded_to_jax_as_sigterm(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM comes to Python only before jax takes it over; later signals would be ignored."""
    sent: list[int] = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: joined)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    with PreemptionHandler(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert sent == []
    if joined:
        with PreemptionHandler():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
        with PreemptionHandler():
            signal.raise_signal(signal.SIGINT)
            assert sent == [signal.SIGTERM] * 3
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_a_process_alone_is_asked_to_stop(subtests: pytest.Subtests) -> None:
    """At once if it has not begun to train, or by a second Ctrl-C; else it saves first."""
    for number in [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]:
        with subtests.test(number=number):
            with PreemptionHandler(), pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            with PreemptionHandler() as preemption:
                assert not preemption.requested()
                signal.raise_signal(number)
                assert preemption.requested()
                with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext():
                    signal.raise_signal(number)
