"""examples/quickstart.ipynb: every cell runs, without a network, and prints the committed bytes."""

import re

import nbformat
import pytest
from nbclient import NotebookClient
from support.our_files import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def printed(notebook: nbformat.NotebookNode) -> str:
    """Returns the text that the cells printed."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return "".join(output.get("text", "") for output in outputs)


def byte_rows(notebook: nbformat.NotebookNode) -> list[str]:
    return re.findall(r"(?m)^.+ kB, .+$", printed(notebook))


@pytest.mark.slow
def test_the_notebook_runs_and_sends_the_bytes_that_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On virtual devices, which are the only ones of the kernel. The losses of the three steps agree, and fall."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PATH", "")  # it finds no git and no pip
    shown = nbformat.read(NOTEBOOK, as_version=4)
    run = NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4), resources={"metadata": {"path": str(ROOT / "examples")}}
    )
    notebook = run.execute()
    assert byte_rows(notebook) == byte_rows(shown) and len(byte_rows(shown)) == 3
    ratios = [float(x) for x in re.findall(r"([\d.]+) times", printed(notebook))]
    assert ratios[0] == 1 and ratios[1] > 4 and ratios[2] > 3.8 * ratios[1]
    losses = [(float(a), float(b)) for a, b in re.findall(r"([\d.]+) to ([\d.]+) nats", printed(notebook))]
    (first, last), *others = losses
    assert len(others) == 2 and last < first - 2
    assert all(pair == pytest.approx((first, last), rel=0.02) for pair in others)
    charts = [output for output in notebook.cells[-2].outputs if "image/png" in output.get("data", {})]
    assert len(charts) == 1
