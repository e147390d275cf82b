"""A state that cannot fit its devices: one line before anything is made, with what would fit."""

import re
import shlex
from pathlib import Path

import jax
import pytest
from running import arguments, changed, run_here

from configs import command_line
from planner import table
from training import memory
from training.experiment import make_experiment

HIDDEN, LAYERS, INTERMEDIATE, VOCAB = 8192, 40, 64, 256
HUGE = {"model__hidden": HIDDEN, "model__num_layers": LAYERS, "model__num_heads": 64, "model__num_kv_heads": 64}


MAKES_NOTHING = changed(
    **{name: lambda: pytest.fail("something is made") for name in ("init_state", "compile_train_step")}
)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert run_here(*args, make=MAKES_NOTHING) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err.strip()


def in_gb(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"kB": 1e-6, "MB": 1e-3, "GB": 1, "TB": 1e3}[unit]


def test_a_state_that_cannot_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than any machine has: 16 bytes a parameter, of parameters in two; the planner's command says the same."""
    said = refused(capsys, *arguments(tmp_path / "run", **HUGE))
    matrices = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE) + 2 * VOCAB * HIDDEN
    found = re.search(r"the state takes (\S+ \SB) on each device \(parameters (\S+ \SB), gradients \2,", said)
    assert found, said
    assert in_gb(found[1]) == pytest.approx(16 * matrices / 2 / 1e9, rel=0.01)
    assert in_gb(found[2]) == pytest.approx(4 * matrices / 2 / 1e9, rel=0.01)
    command = re.search("`python -m (planner.table .*)` shows", said)
    assert command, said
    assert table.main(shlex.split(command[1])) == 0
    assert f"{found[1]} in all" in capsys.readouterr().out
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_would_fit_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory between the state's quarter and its half: a group of four is named, and is accepted."""
    args = arguments(tmp_path / "run", model__hidden=128)
    argv = ["train.py", *command_line.words_of_config(["train.py", *args])]
    config = command_line.parse(argv)
    whole = sum(memory.state_bytes(make_experiment(config)))
    monkeypatch.setattr(memory, "_free_bytes", lambda: 8 * 0.6 * whole)  # of 8 devices, by groups of two
    found = re.search(r"; (sharding\S+) and (sharding\S+) take (\S+ \SB), which fit; `", refused(capsys, *args))
    assert found and found[2] == "sharding.partition_size=4"
    assert in_gb(found[3]) == pytest.approx(whole / 2 / 1e9, rel=0.01)
    with pytest.raises(pytest.fail.Exception, match="something is made"):
        run_here(*args, *(f"--config.{word}" for word in found.groups()[:2]), make=MAKES_NOTHING)
    monkeypatch.setattr(memory, "_free_bytes", lambda: 8 * 0.2 * whole)
    said = refused(capsys, *args)
    sizes = re.search(r"no strategy on these devices holds its (\S+) parameters, but about (\S+) would fit", said)
    assert sizes, said
    all_of_it, held = (float(size.replace(",", "")) for size in sizes.groups())
    assert held == pytest.approx(0.8 * all_of_it, rel=0.02)  # of a quarter


def test_processes_share_the_memory_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes of two devices, two of them on one host; where one does not know, nobody does."""
    given = [["a", 2, 800], ["a", 2, 790], ["b", 2, 410]]
    monkeypatch.setattr(memory, "all_gather", lambda key, own: given)
    assert memory.memory_per_device() == 790 / 4
    given[1][2] = 0
    assert memory.memory_per_device() is None
    monkeypatch.setattr(memory, "all_gather", lambda key, own: [own])
    monkeypatch.setattr(memory, "_free_bytes", lambda: 4000)
    assert memory.memory_per_device() == 4000 / jax.local_device_count()


def test_hosts_without_a_boot_id_do_not_share_their_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sandbox may hide it: two hosts are then told apart by their names."""
    sent: list[object] = []
    monkeypatch.setattr(memory, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(memory, "_free_bytes", lambda: 4000)
    monkeypatch.setattr(memory, "all_gather", lambda key, own: sent.append(own) or sent)
    monkeypatch.setattr("socket.gethostname", lambda: f"host{len(sent)}")
    for _ in range(2):  # processes, in turn; the second one has what both sent
        assert memory.memory_per_device() == 4000 / jax.local_device_count()


def test_what_is_free_is_not_known_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert memory.memory_per_device() is None
    (tmp_path / "meminfo").write_text("MemTotal:       16 kB\nMemFree:        12 kB\nHugePages_Total:       0\n")
    assert memory.memory_per_device() is None
    (tmp_path / "meminfo").write_text("MemTotal:       16 kB\nMemAvailable:   13 kB\nHugePages_Total:       0\n")
    assert memory.memory_per_device() == 13 * 1024 / jax.local_device_count()


def test_the_words_of_a_config_are_those_that_other_programs_take() -> None:
    argv = [
        "train.py",
        "--config",
        "configs/x.py:a",
        "--workdir=runs/x",
        "-config.a=1",
        "--config.b.c",
        "2",
        "--configure=3",
    ]
    assert command_line.words_of_config(argv) == ["--config=configs/x.py:a", "--config.a=1", "--config.b.c=2"]
