"""Arranges the documentation site (mkdocs.yml): paths, navigation and the pages of the API reference.

Files have the same paths as in the repository, so that a relative link of a page works on the site and on a code host.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
HOME, INDEX, CHANGES = "README.md", "docs/README.md", "CHANGELOG.md"
RECORDS = "lab/benchmarks/results/community/README.md"
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
PAGE, PICTURE = ".md", ".png"


def on_files(files: Files, config: Any) -> Files:
    """Returns the theme's files, all pages and pictures, other files that pages link to, and the API reference."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = [HOME, "CONTRIBUTING.md", CHANGES, RECORDS, *files_of_docs(PAGE)]
    paths = [*pages, *files_of_docs(PICTURE), *files_of_docs(".css"), *files_of_docs(".js")]
    ours = [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in paths]
    sources = [linked_source(path, config) for path in linked_sources(pages)]
    modules = {module: f"api/{module}.md" for module in config.extra["api"]}
    api = [File.generated(config, path, content=f"# `{name}`\n\n::: {name}\n") for name, path in modules.items()]
    reference = {"API reference": [{name: path} for name, path in modules.items()]}
    config.nav = [{"mics-jax": HOME}, {"All pages": INDEX}, *index_sections(), reference, {"Changelog": CHANGES}]
    return Files([*theme, *ours, *sources, *api])


def index_sections() -> list[dict[str, list[dict[str, str]]]]:
    """Returns the sections of docs/README.md, each with its links in the order of the page."""
    _, *sections = re.split(r"(?m)^## ", (ROOT / INDEX).read_text())
    return [{text.partition("\n")[0]: [{name: path} for name, path in links(INDEX, text)]} for text in sections]


def linked_sources(pages: list[str]) -> list[str]:
    """Returns the paths of the files that pages link to and that are neither pages nor pictures."""
    targets = {target for page in pages for _, target in links(page, (ROOT / page).read_text())}
    return sorted(path for path in targets if (ROOT / path).is_file() and not path.endswith((PAGE, PICTURE)))


def linked_source(path: str, config: Any) -> File:
    """Returns a file of the repository under a name with the suffix .txt, which browsers display."""
    file = File.generated(config, path, abs_src_path=str(ROOT / path))
    file.dest_uri = f"{path}.txt"
    return file


def links(page: str, text: str) -> list[tuple[str, str]]:
    """Returns the texts of the links in `text`, and their targets relative to the repository's root."""
    folder = os.path.dirname(page)
    return [(name, os.path.normpath(os.path.join(folder, target))) for name, target in LINK.findall(text)]


def files_of_docs(suffix: str) -> list[str]:
    """Returns the paths of the files in docs/ with a suffix, relative to the repository's root."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob(f"*{suffix}"))
