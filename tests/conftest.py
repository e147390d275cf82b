"""Every test sees 8 virtual CPU devices, or `make test-gpu`'s GPUs; warnings and silent rank promotion are errors."""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import fast_compile, suite

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {fast_compile.FLAGS}"

import jax

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(100_000, 20, 20)  # tracing makes many objects that stay; looking through them was a tenth of the time


collect_ignore = [name for name, package in suite.NEEDS.items() if not find_spec(package)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    suite.sort_and_mark(items)


@pytest.fixture
def muon_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of Muon's products are float32, as those of the oracles are."""
    monkeypatch.setattr("training.optimizers.PRODUCTS", jax.numpy.float32)


@pytest.fixture
def same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes settings of a run for its process, because jax in this process already has its threads."""
    monkeypatch.setenv("NPROC", "8")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 60 short text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"file {number}: the quick brown fox\n" * 5)
    return folder
