"""Helpers that tests/test_imports.py shares with other test files."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def our_files() -> list[Path]:
    """Returns the Python files of the parts; a folder or program that the table does not know is an error."""
    files = sorted(ROOT.glob("*.py"))
    for folder in sorted(ROOT.iterdir()):
        if folder.is_dir() and folder.name not in ("tests", "docs", "runs", "site") and not folder.name.startswith("."):
            files += sorted(folder.rglob("*.py"))
    return files
