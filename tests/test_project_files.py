"""Files for people who build, cite or report, and the files that programs name in their text."""

import re
import tomllib

import yaml
from support.our_files import ROOT, our_files


def test_the_dockerfile_runs_the_two_commands_of_the_readme_as_a_user() -> None:
    lines = re.sub(r"\\\n", "", (ROOT / "Dockerfile").read_text()).splitlines()
    instructions = [tuple(line.split(maxsplit=1)) for line in lines if line and not line.startswith("#")]
    base, user = dict(instructions)["FROM"], dict(instructions)["USER"]
    assert re.fullmatch(r"python:3\.1[12]-slim-\w+", base) and user != "root"
    as_user = instructions[instructions.index(("USER", user)) :]
    section = (ROOT / "README.md").read_text().partition("## Two commands")[2].partition("\n## ")[0]
    commands = re.findall(r"(?m)^ {4}(.+)$", section)
    assert len(commands) == 2
    assert [command for instruction, command in as_user if instruction == "RUN"] == commands


def test_the_image_has_the_history_and_nothing_that_was_built() -> None:
    """Tests read git's history; an environment from outside has other paths."""
    assert (ROOT / ".dockerignore").read_text().splitlines() == [".venv*", "runs", "site"]


def test_the_citation_has_the_version_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])
    assert citation["abstract"] == project["description"]
    (paper,) = citation["references"]
    assert paper["title"].startswith("MiCS: ") and len(paper["authors"]) == 8 and paper["doi"]


def test_templates_have_the_fields_that_a_code_host_reads() -> None:
    templates = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
    assert [path.stem for path in templates] == ["bug", "question", "result"]
    for path in templates:
        _, header, body = path.read_text().split("---\n", 2)
        assert {*yaml.safe_load(header)} == {"name", "about", "title", "labels"} and body.strip(), path.name


def test_files_that_our_programs_name_exist() -> None:
    """In docstrings, comments and texts; capitals stand for any name, as in configs/X.py."""
    files = our_files()
    folders = "|".join(sorted({file.relative_to(ROOT).parts[0] for file in files if file.parent != ROOT}))
    name = re.compile(rf"(?<![\w/.])(?:{folders}|docs|tests)/[\w/]*\b(?![A-Z]+\.)\w+\.(?:py|md|toml|csv)\b")
    named = {(file, path) for file in files for path in name.findall(file.read_text())}
    assert len(named) > 100
    assert sorted(f"{file.relative_to(ROOT)}: {path}" for file, path in named if not (ROOT / path).exists()) == []


def test_an_installation_has_every_program_of_the_root() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["py-modules"] == sorted(file.stem for file in ROOT.glob("*.py"))
