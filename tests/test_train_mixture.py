"""Runs on mixed sources and packed rows: their batches, what they say, how they resume, and what they refuse."""

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support import plain_data
from support.batch_files import RESUMABLE, check_batches, writes_batches
from support.mistakes import error_of
from support.running import arguments, finish, losses, rows, run_here, start_together, stop_after

LENGTH = 12


@pytest.fixture(scope="module", name="folders")
def written_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return plain_data.write_folders(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))


def mixture(folders: list[Path], *weights: str) -> dict[str, str]:
    text = ", ".join(f"{w} folder:{f}" for w, f in zip(weights, folders, strict=False))
    return {"data__mixture": text, "data__seq_len": str(LENGTH), "data__packing": "documents"}


@pytest.mark.parametrize("count", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_batches_equal_plain_python(count: int, folders: list[Path], tmp_path: Path) -> None:
    """In one to four real processes, and after a restart at step 1."""
    size = 30 if count % 2 else 16
    changes = mixture(folders, "2", "1", "0.5") | {"batch__global_size": str(size)}
    args = arguments(tmp_path / "run", **changes)
    if count == 1:
        assert run_here(*args, make=writes_batches(str(tmp_path))) == RESUMABLE
    else:
        first = f"from support.batch_files import writes_batches\nparts['make'] = writes_batches({str(tmp_path)!r})"
        outcomes = finish(*start_together(args, count, devices=2, first=first))
        assert [code for code, _, _ in outcomes] == [RESUMABLE] * count, outcomes
    wanted = plain_data.mixed_rows(folders, [Fraction(2), Fraction(1), Fraction(1, 2)], LENGTH, 0, 2 * size)
    check_batches(tmp_path, count, size, wanted)


@pytest.mark.slow
def test_a_run_resumes_and_says_what_it_mixes(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = mixture(folders, "3", "1") | {"eval__every": "5", "sample__length": "3", "data__packing": "whole"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run_here(*arguments(whole, **changes)) == 0
    said = capsys.readouterr().out
    found = re.search(r"mixture: folder:(\S+) 75.00%, ([\d.]+) epochs of (\d+) rows; folder:(\S+) 25.00%, ", said)
    assert found and found[1] == str(folders[0]) and found[4] == str(folders[1])
    assert float(found[2]) == pytest.approx(0.75 * 160 / int(found[3]), abs=0.01)
    last, filled = rows(whole)[-1], re.search(r"rows of whole documents: ([\d.]+)% of the positions hold tokens", said)
    assert filled and 50 < float(filled[1]) < 100
    filled_tokens = 16 * LENGTH * float(filled[1]) / 100
    assert last["tokens_per_s"] * last["step_time_s"] == pytest.approx(filled_tokens, rel=1e-3)
    by_source = [last[f"validation_loss/folder:{folder}"] for folder in folders[:2]]
    assert by_source[0] != by_source[1]
    assert last["validation_loss"] == pytest.approx(0.75 * by_source[0] + 0.25 * by_source[1])
    assert f"folder:{folders[0]} {by_source[0]:.4f}, folder:{folders[1]} {by_source[1]:.4f}" in said

    assert run_here(*arguments(stopped, **changes), hooks=[stop_after(4)]) == RESUMABLE
    other = arguments(stopped, **changes | mixture(folders, "1", "1"))
    assert "holds a run of another config: data.mixture was '3 folder:" in error_of(capsys, *other)
    file = folders[1] / "3.txt"
    text = file.read_text()
    file.write_text(text.upper())
    message = error_of(capsys, *arguments(stopped, **changes))
    assert f"on other data: data.mixture='3 folder:{folders[0]}, 1 folder:{folders[1]}' has changed since" in message
    file.write_text(text)
    assert run_here(*arguments(stopped, **changes)) == 0
    np.testing.assert_array_equal(losses(stopped), losses(whole))
