"""The progress and the summary of a run, in a terminal and in a file."""

import io
import json
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from training.metrics import progress as progress_module
from training.metrics.progress import RunProgress, print_summary
from training.metrics.run_files import read_run

SCALARS = {
    "loss": 2.34567,
    "tokens_per_s": 81234.0,
    "step_time_s": 0.118,
    "collective_intra_bytes": 4_400_000,
    "collective_inter_bytes": 1_650_000,
    "data_wait_s": 0.002,
    "all_reduce_payload_bytes": 52_800,
    "all_reduce_ratio": 31.03,
}
SHOWN = (
    "between nodes 1.65 MB  replica all-reduce 31 times smaller",
    "2.3457",
    "81,234",
    "118 ms",
    "inside nodes 4.40 MB",
)


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


def test_a_file_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    # a file gets plain lines every ten seconds and at both ends
    clock, file = Clock(monkeypatch), io.StringIO()
    shown = RunProgress(100, 0, Console(file=file, width=40))
    for step in range(1, 101):
        clock.now += 0.5
        shown.update(step, SCALARS)
        if step == 50:
            shown.print("checkpoint of step 50 [bold]saved[/bold]")
    shown.close()
    text = file.getvalue()
    lines = text.splitlines()
    assert "checkpoint of step 50 [bold]saved[/bold]" in lines
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [
        f"{step}/100" for step in (1, 21, 41, 61, 81, 100)
    ]
    assert not [character for character in text if ord(character) < 32 and character != "\n"]
    assert all(part in lines[1] for part in SHOWN) and lines[1].endswith("ETA 40 s")  # 79 steps of half a second

    # close shows a run that stopped between two lines
    clock, file = Clock(monkeypatch), io.StringIO()
    shown = RunProgress(100, 40, Console(file=file))
    for step in (41, 42, 43):
        clock.now += 1
        shown.update(step, {"loss": step})
    shown.close()
    shown.close()
    assert [line.split()[:2] for line in file.getvalue().splitlines()] == [["step", "41/100"], ["step", "43/100"]]


def test_a_terminal_gets_a_live_bar_redrawn_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = Clock(monkeypatch), io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None, _environ={"TERM": "xterm"})
    with closing(RunProgress(1000, 0, console)) as shown:
        draws = 0
        for step in range(1, 101):
            clock.now += 0.1
            before = len(file.getvalue())
            shown.update(step, SCALARS)
            draws += len(file.getvalue()) > before
        assert 19 <= draws <= 21  # 10 seconds
        shown.print("hello")
    text = file.getvalue()
    assert all(part in text for part in SHOWN)
    assert "step 100/1000" in text and "10%" in text and "ETA 1m 30s" in text and "hello" in text
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_what_is_printed_into_a_pipe_is_plain_and_says_what_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as some build machines set it: rich takes the pipe for a terminal
    with closing(RunProgress(2)) as shown:
        shown.update(1, SCALARS)
        shown.update(2, SCALARS)
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 2 and "\x1b" not in text
    monkeypatch.delenv("FORCE_COLOR")
    times = ((1, 9), (2, 0.5), (3, 0.2))
    rows = [json.dumps({"step": step, "step_time_s": time}) for step, time in times]
    summary = {"final_loss": 1.5, "exit_reason": "finished", "wall_time_s": 3905}
    for name, content in (
        ("config.json", json.dumps({"name": "[red]small"})),
        ("metrics.jsonl", "\n".join(rows)),
        ("summary.json", json.dumps(summary)),
    ):
        (tmp_path / name).write_text(content)
    print_summary(read_run(tmp_path))
    out = capsys.readouterr().out
    assert [" ".join(line.split()) for line in out.splitlines() if line.strip(" ─")] == [
        "[red]small",
        "outcome finished",
        "training loss 1.5000 at the last step",
        "steps 3",
        "step time 3.23 s average",
        "wall time 1h 05m of the last attempt",
    ]
