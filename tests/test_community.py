"""Records of other machines in lab/benchmarks/results/community: each is of the format, and the command writes one."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.our_files import ROOT

from lab.benchmarks import community

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


@pytest.mark.slow
def test_the_command_measures_and_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model on 4 virtual devices; the working tree may have changes."""
    monkeypatch.setattr(community, "check_code", lambda commit: None)
    keys = "num_steps=4,eval.every=0,mesh.num_cpu_devices=4,mesh.devices_per_node=2"
    words = ["--config=configs/tiny.py", f"--keys={keys}", "--sizes=1k,64k", f"--out={tmp_path}", "--note=a test"]
    assert community.main(words) == 0
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    community.check(found)
    assert found["devices"]["count"] == 4 and found["devices"]["is_virtual"] and found["note"] == "a test"
    assert {*found["probe"]["levels"]} == {"intra", "inter"} and found["run"]["steps"] == 4
    assert found["run"]["inter_bytes"] > 0 and found["run"]["tokens_per_s"] > 0
    assert str(ROOT) not in file.read_text()
