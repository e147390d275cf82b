"""Packages that `make train` does not install: only the runs that need one ask for it, in one line with the remedy."""

import ast
import gzip
import importlib.util
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.our_files import ROOT, our_files

from input_pipeline import shard_formats, tfds_data
from input_pipeline.images import Digits
from input_pipeline.store import RemoteStore

# packages, by the file in requirements/ that lists them
OPTIONAL = {
    "shards": ["pyarrow", "obstore"],
    "tfds": ["tensorflow_datasets"],
    "vision": ["sklearn"],
    "kubernetes": ["kubernetes"],
}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that hides an installed package."""
    found = importlib.util.find_spec

    def hide(package: str) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else found(name))

    return hide


def documents(path: Path) -> list[str]:
    return [document.read() for document in shard_formats.documents(path, path.name, "text")]


def test_a_missing_package_is_one_line_with_the_remedy(without: Callable[[str], None], tmp_path: Path) -> None:
    table: list[tuple[str, str, str, Callable[[], Any]]] = [
        ("a.parquet", "pyarrow", "shards", lambda: documents(tmp_path / "a.parquet")),
        ("a.txt.zst", "pyarrow", "shards", lambda: documents(tmp_path / "a.txt.zst")),
        ("data.path=s3://bucket/a", "obstore", "shards", lambda: RemoteStore("s3://bucket/a")),
        ("data.source=tfds:lm1b", "tensorflow_datasets", "tfds", lambda: tfds_data.source("lm1b", "", "train")),
        (
            "data.source=tfds:cifar10",
            "tensorflow_datasets",
            "tfds",
            lambda: tfds_data.TfdsImages("cifar10", "", "train"),
        ),
        ("data.source=digits", "sklearn", "vision", lambda: Digits("train")),
    ]
    for asked, package, extra, use in table:
        without(package)
        with pytest.raises(ValueError) as error:
            use()
        remedy = f"{asked} needs {package}, which is not installed: make .venv/{extra}-installed"
        assert str(error.value) == remedy
        assert package in OPTIONAL[extra]


def test_plain_and_gzipped_files_need_no_package(without: Callable[[str], None], tmp_path: Path) -> None:
    without("pyarrow")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    assert documents(tmp_path / "a.jsonl") == ["one", "two"] and documents(tmp_path / "b.txt.gz") == ["three"]


def test_nothing_imports_an_optional_package_before_it_is_needed() -> None:
    """Each import is inside a function, because a module's own imports run for every user."""
    optional = {package for packages in OPTIONAL.values() for package in packages}
    for file in our_files():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                first = {name.partition(".")[0] for name in names if not getattr(node, "level", 0)}
                assert not first & optional, f"{file.relative_to(ROOT)}, line {node.lineno}"


def extras() -> dict[str, list[str]]:
    """Returns the files of each extra of the package."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
    return {name: extra["file"] for name, extra in settings["optional-dependencies"].items()}


def test_the_extras_are_those_that_the_page_lists_and_their_files_exist() -> None:
    listed = re.search(r"\(extras: ([^)]+)\)", (ROOT / "CONTRIBUTING.md").read_text())
    assert listed and sorted(re.findall(r"\w+", listed[1])) == sorted(extras())
    assert all((ROOT / file).exists() for files in extras().values() for file in files)


def test_the_tpu_extra_is_the_tested_jax_with_its_runtime() -> None:
    listed = (ROOT / "requirements" / "tpu.txt").read_text()
    for constraints, python in (("constraints-py311", '< "3.12"'), ("constraints", '>= "3.12"')):
        tested = (ROOT / "requirements" / f"{constraints}.txt").read_text()
        (version,) = re.findall(r"(?m)^jax==(.+)$", tested)
        assert f"\njax[tpu]=={version}; python_version {python}\n" in listed


def test_every_optional_package_has_an_extra_and_is_no_requirement() -> None:
    """pip's extras and make's targets read the same files."""
    required = (ROOT / "requirements.txt").read_text().lower()
    files = {path for extra in extras().values() for path in extra}
    for name, packages in OPTIONAL.items():
        listed = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert f"requirements/{name}.txt" in files
        for package in packages:
            spelled = {"sklearn": "scikit-learn"}.get(package, package.replace("_", "-"))
            assert f"\n{spelled}>=" in listed and f"\n{spelled}>=" not in required
