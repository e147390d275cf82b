"""Records of other machines in lab/benchmarks/results/community: each is of the format, and the command writes one."""

import copy
import json
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.our_files import ROOT

from lab.benchmarks import community
from runtime.launchers import VARIABLES
from training.metrics.run_files import RunFiles

FILES = sorted(community.COMMUNITY.glob("*.json"))


def record() -> Any:
    return json.loads(FILES[0].read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_record_is_of_the_format(file: Path) -> None:
    community.check(json.loads(file.read_text()))


def test_the_folder_has_records_and_their_readme_alone() -> None:
    assert {file.name for file in community.COMMUNITY.iterdir()} == {"README.md", *(file.name for file in FILES)}
    assert FILES


def test_the_readme_explains_every_key() -> None:
    explained = set(re.findall(r"`([\w.]+)`", (community.COMMUNITY / "README.md").read_text()))
    keys = {key for key in community.FORMAT if key not in ("format", "run")}
    assert keys | {f"run.{key}" for key in community.FORMAT["run"]} <= explained


def test_the_template_asks_for_the_command() -> None:
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "result.md").read_text()
    assert "python -m lab.benchmarks.community" in template


def test_a_record_with_a_mistake_is_refused_with_its_place() -> None:
    mistakes: dict[str, tuple[list[str], Any]] = {
        "format is 2": (["format"], 2),
        "the record: date is 7, which has the wrong type": (["date"], 7),
        "commit is 'HEAD'; give the 40 digits": (["commit"], "HEAD"),
        "system.platform is 'Linux-6.1-cloud-x86_64'; give system": (["system", "platform"], "Linux-6.1-cloud-x86_64"),
        "devices must be an object with the keys platform": (["devices", "host"], "me"),
        "devices: count is True": (["devices", "count"], True),
        "run has .* steps: losses": (["run", "losses"], [1.0]),
        "run has numbers that are negative or not finite": (["run", "inter_bytes"], -1),
        "run.step_time_s is 1e-09, not the median": (["run", "step_time_s"], 1e-9),
    }
    community.check(record())
    for message, ((*path, last), value) in mistakes.items():
        changed = copy.deepcopy(record())
        target = changed
        for key in path:
            target = target[key]
        target[last] = value
        with pytest.raises(ValueError, match=f"^{message}") as caught:
            community.check(changed)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="^the record must be an object"):
        community.check([])


def test_the_record_has_the_operating_system_and_the_architecture_but_not_the_build_of_the_kernel() -> None:
    about = {**record(), **record()["system"], "platform": "Linux-6.1-cloud-x86_64", "git_commit": record()["commit"]}
    run = run_of(record(), {"intra_bytes": 1, "inter_bytes": 2})
    found = community.record_of(about, probe_of(record()), run, "python train.py", "")
    community.check(found)
    assert found["system"]["platform"] == f"{platform.system()}-{platform.machine()}"


def test_bytes_that_are_not_known_are_an_error_with_the_reason() -> None:
    unread = run_of(record(), {"problem": "the bytes are not known: odd text"})
    missing = replace(run_of(record(), {}), problems={"collectives.json": "is missing"})
    for run, why in ((unread, "the bytes are not known: odd text; train with"), (missing, "is missing; train with")):
        with pytest.raises(ValueError, match=rf"^run/collectives\.json: {why}"):
            community.record_of({}, probe_of(record()), run, "", "")


def run_of(record: Any, collectives: dict[str, Any]) -> RunFiles:
    """Returns the files of a run that could have given a record."""
    rows = tuple(
        {"step": step, "loss": loss, "step_time_s": 1.0, "tokens_per_s": 2.0}
        for step, loss in enumerate(record["run"]["losses"], 1)
    )
    about = {"num_params": 1, "mesh": record["run"]["mesh"]}
    return RunFiles(run_dir=Path("run"), environment=about, collectives=collectives, rows=rows)


def probe_of(record: Any) -> dict[str, Any]:
    """Returns the content of the probe.json of a record."""
    devices = record["devices"]
    here = {**devices, "device_kind": devices["kind"], "devices": devices["count"]}
    return {**record["probe"], "environment": here}


@pytest.mark.parametrize(
    ("config", "keys", "message"),
    [
        (
            "configs/tiny.py",
            "num_steps=2,optimizer.warmup_steps=0",
            "--keys: num_steps=2 is too small, .* set 3 at least",
        ),
        ("configs/tiny.py", "num_steps=30,log_every=2", "--keys: log_every=2, but the record has every step; set 1"),
        ("/home/me/tiny.py", "", "--config=/home/me/tiny.py has an absolute path"),
        ("configs/tiny.py:~/arg", "", "--config=configs/tiny.py:~/arg has an absolute path"),
        ("configs/tiny.py", "num_steps=4,data.path=/data/me", "--keys=.* has an absolute path .*; give a path"),
        ("configs/tiny.py", "data.path=gs://bucket/me", "--keys=.* has an absolute path or an address"),
    ],
)
def test_an_option_that_gives_no_record_is_refused_before_training(
    config: str, keys: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = commands(monkeypatch)
    assert community.main([f"--config={config}", f"--keys={keys}"]) == 2
    assert re.fullmatch(f"error: {message}.*\n", capsys.readouterr().err)
    assert community.main(["--sizes=1k"]) == 2 and capsys.readouterr().err.startswith(
        "error: --sizes=1k: give two sizes"
    )
    assert not started


def test_paths_in_the_repository_are_accepted() -> None:
    keys = "data.path=data/*/x.txt,num_steps=5"
    changed = community.overrides_of("configs/gpu_decoder.py:124m", keys)
    assert changed == {"num_steps": "5", "log_every": 1, "data.path": "data/*/x.txt"}


def test_only_process_0_removes_and_reads_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = commands(monkeypatch)
    monkeypatch.setattr(community, "WORKDIR", tmp_path)
    (tmp_path / "community").mkdir()
    for name, value in zip(VARIABLES, ("127.0.0.1:1", "2", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")  # by the launcher; the config has 8
    assert community.main(["--config=configs/quickstart.py", f"--out={tmp_path / 'out'}"]) == 0
    trained, probed = started
    assert trained[1] == "train.py" and f"--workdir={tmp_path / 'community'}" in trained
    assert probed[1:3] == ["-m", "lab.probe"] and "--devices_per_node=0" in probed
    assert {*tmp_path.iterdir()} == {tmp_path / "community"}


def commands(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Returns the list of the programs that the command then starts; none runs."""
    started: list[Sequence[str]] = []
    monkeypatch.setattr(community, "environment", lambda extra: {"git_commit": 40 * "0"})
    monkeypatch.setattr(community, "check_code", lambda commit: None)
    monkeypatch.setattr(community, "train", lambda *words: started.append(["train"]))
    monkeypatch.setattr(community, "started", lambda command: started.append(command) or "")
    return started


def test_a_second_record_of_a_day_gets_a_number(tmp_path: Path) -> None:
    for name in ("a.json", "a-2.json", "a-3.json"):
        assert community.unused(tmp_path, "a") == tmp_path / name
        (tmp_path / name).touch()


@pytest.mark.release
def test_the_command_measures_and_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model on 4 virtual devices; the working tree may have changes."""
    monkeypatch.setattr(community, "check_code", lambda commit: None)
    keys = "num_steps=4,optimizer.warmup_steps=0,eval.every=0,mesh.num_cpu_devices=4,mesh.devices_per_node=2"
    words = ["--config=configs/tiny.py", f"--keys={keys}", "--sizes=1k,64k", f"--out={tmp_path}", "--note=a test"]
    assert community.main(words) == 0
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    community.check(found)
    assert found["devices"]["count"] == 4 and found["devices"]["is_virtual"] and found["note"] == "a test"
    assert {*found["probe"]["levels"]} == {"intra", "inter"} and found["run"]["steps"] == 4
    assert found["run"]["inter_bytes"] > 0 and found["run"]["tokens_per_s"] > 0
    assert str(ROOT) not in file.read_text()
