"""The prose of docstrings, comments and pages: phrases that a reader has to read twice are rare in every file."""

import ast
import io
import re
import tokenize
from pathlib import Path

from support.our_files import ROOT, our_files

PHRASES = {
    "a pronoun in the place of a noun": r"\b(?:those|that|one) (?:of|that|which|with|by|from)\b",
    "what, as a noun": r"\b[Ww]hat(?:ever)?\b(?! (?:is|are|does|do|happens|about|if)\b)",
    "a clause that begins with Of": r"(?:^|[.:;] )[Oo]f (?:the|an?|all|each|what|those|its|two|one|several)\b",
    "there is": r"\bthere (?:is|are|was|were)\b",
    "is no, for is not a": r"\bis no (?!longer)\w+",
    "another idiom": r"\b(?:go(?:es)? on|went on|beside|stands?|behind|in front of|of (?:its|their) own)\b",
    "a person for a process": r"\b(?:nobody|whoever)\b",
}
MOST_PER_1000_WORDS = 3  # in a file; a single place is allowed in a short one


def prose_of(file: Path) -> str:
    """Returns the docstrings and comments of a Python file, or a page without code blocks and tables."""
    text = file.read_text()
    if file.suffix == ".md":
        lines = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
        return "\n".join(line for line in lines if not line.startswith(("|", "    ")))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*docstrings, *(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)])


def found(prose: str) -> list[str]:
    """Returns the phrases of PHRASES in a text."""
    return [match[0] for phrase in PHRASES.values() for match in re.finditer(phrase, prose, re.MULTILINE)]


def test_phrases_are_found() -> None:
    prose = "Those that wait.\nWhat is kept goes on.\nOf the sums, there is no trace."
    assert found(prose) == ["Of the", "there is", "is no trace", "goes on"]
    assert found("one of those that wait; what remains") == ["one of", "those that", "what"]


def test_every_file_is_in_plain_english() -> None:
    wrong = []
    for file in [*our_files(), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        prose = prose_of(file)
        words, places = len(re.findall(r"[A-Za-z']+", prose)), found(prose)
        if len(places) > max(1, MOST_PER_1000_WORDS * words / 1000):
            wrong.append(f"{file.relative_to(ROOT)}: {len(places)} in {words} words: {', '.join(places[:8])}")
    assert not wrong, "\n".join(wrong)
