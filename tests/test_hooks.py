"""After which steps a hook is called."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from running import ROOT, arguments, arrays

from training.hooks import every

STATE: Any = None


def called(wanted: dict[str, Any], *, steps: int, begin: int = 0, last: int = 10, moments: int = 4) -> list[int]:
    """Returns the steps after which a hook is called, in a run that ends after so many `steps` of its `last`."""
    seen: list[int] = []
    hook = every(moments, lambda step, state, metrics: seen.append(step), **wanted)
    for step in range(begin + 1, steps + 1):
        hook(step, STATE, {}, is_last=step == last)
    hook.close(steps, STATE, {}, finished=steps == last)
    return seen


@pytest.mark.parametrize(
    ("wanted", "run", "steps"),
    [
        ({}, {"steps": 10}, [4, 8]),
        ({}, {"steps": 10, "moments": 0}, []),
        ({"at_end": True}, {"steps": 10}, [4, 8, 10]),
        ({"at_end": True}, {"steps": 8, "last": 8}, [4, 8]),
        ({"at_end": True}, {"steps": 6}, [4]),
        ({"at_stop": True}, {"steps": 10}, [4, 8]),
        ({"at_stop": True}, {"steps": 6}, [4, 6]),
        ({"at_stop": True}, {"steps": 4}, [4]),
        ({"at_stop": True, "done": 5}, {"begin": 5, "steps": 5}, []),
        ({"at_stop": True, "done": 4}, {"begin": 5, "steps": 5}, [5]),  # its step was restored from elsewhere
        ({"at_end": True, "done": 8}, {"begin": 10, "steps": 10}, [10]),
    ],
)
def test_a_hook_is_called_when_it_is_due(wanted: dict[str, Any], run: dict[str, int], steps: list[int]) -> None:
    assert called(wanted, **run) == steps


def test_the_hook_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """After the last step of 10, since none is a hundredth."""
    monkeypatch.setattr(sys, "argv", ["mine.py", *arguments(tmp_path)])
    (listing,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    with pytest.raises(SystemExit, match="0"):
        exec(listing, {})
    params = [x for name, x in arrays(tmp_path, 10).items() if name.startswith("params")]
    assert f"\n10 {max(abs(x).max() for x in params)}\n" in capsys.readouterr().out
