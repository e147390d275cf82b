"""The documentation site (`make docs`) has every page and loads nothing from other hosts; a mistake fails the build."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns(".*", "runs", "site", "tests", "__pycache__")
    return shutil.copytree(ROOT, tmp_path / "mics-jax", ignore=ignored)


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "docs", f"VENV={sys.prefix}"]
    return subprocess.run(command, cwd=folder, timeout=900, capture_output=True, text=True)


def test_the_site_has_every_page_and_loads_nothing_from_other_hosts(copy: Path) -> None:
    done = build(copy)
    assert done.returncode == 0, done.stderr
    site = copy / "site"
    built = {page: "index" if page.stem == "README" else page.stem for page in copy.glob("docs/**/*.md")}
    pages = [site / page.relative_to(copy).with_name(f"{name}.html") for page, name in built.items()]
    modules = re.findall(r"(?m)^    - ([\w.]+)$", (copy / "mkdocs.yml").read_text())
    assert len(modules) == 10
    references = [site / "api" / f"{module}.html" for module in modules]
    assert all('class="doc doc-heading"' in page.read_text() for page in references)
    for page in (site / "index.html", *pages, *references):
        text = page.read_text()
        assert not re.findall(r'(?:src|srcset)="(?:https?:)?//|<link [^>]*href="(?:https?:)?//', text), page
    assert (site / "configs" / "fine_tune.py.txt").read_text() == (copy / "configs" / "fine_tune.py").read_text()


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("docs/emulation.md", "[gone](gone.md)\n", "gone.md"),
        ("docs/emulation.md", "[gone](concepts.md#gone)\n", "#gone"),
        ("docs/unlinked.md", "# Not in the index\n", "unlinked.md"),
        ("docs/README.md", "- [Gone](../configs/gone.py)\n", "configs/gone.py"),
    ],
)
def test_a_mistake_on_a_page_fails_the_build(copy: Path, file: str, text: str, complaint: str) -> None:
    with (copy / file).open("a") as page:
        page.write(text)
    done = build(copy)
    assert done.returncode and complaint in done.stderr


def test_a_module_that_is_missing_fails_the_build(copy: Path) -> None:
    (copy / "sharding" / "mesh.py").unlink()
    done = build(copy)
    assert done.returncode and "sharding.mesh" in done.stderr
