"""Who may import whom (README's tour), by walking the imports of every file: the arrows point one way."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERYTHING = "*"
# part: what of ours it may import, besides itself
MAY_IMPORT = {
    "palette": "",
    "configs": "",
    "sharding": "palette",
    "models": "configs sharding",
    "compression": "sharding optimizers",
    "optimizers": "sharding",
    "input_pipeline": "",
    "checkpointing": "sharding",
    "elastic": "checkpointing sharding",
    "metrics": "palette",
    "planner": "configs models sharding compression",
    "cluster": "",
    "sweeps": "configs metrics palette",
    "paper": "planner configs palette",
    "experiment": "configs models sharding compression optimizers input_pipeline",
    "evaluation": "experiment input_pipeline",
    # programs: nothing imports them, but sweep and tests may start them
    "train": EVERYTHING,
    "sweep": "cluster configs sweeps",
    "benchmarks": EVERYTHING,
    "sharding.table": EVERYTHING,
    "cluster.probe": "cluster elastic metrics palette sharding",
    "elastic.chaos": "checkpointing cluster elastic metrics",
}
PROGRAMS = {"train", "sweep", "benchmarks", "sharding.table", "cluster.probe", "elastic.chaos"}
# part: what of others' it must not import
FORBIDDEN = {
    "configs": "jax flax optax",
    "sharding": "flax optax",
    "models": "optax",
    "input_pipeline": "flax optax tensorflow",
    "metrics": "flax optax",
    "compression": "flax",
    "checkpointing": "flax optax",
    "elastic": "flax optax",
    "paper": "jax flax optax",
}


def part_of(file: Path) -> str:
    """Returns the part of a file: the program that it belongs to, or else its top folder or stem."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return program_of(module) or module.split(".")[0]


def program_of(name: str) -> str | None:
    """Returns the program that a module, or a name in it, belongs to."""
    return next((p for p in PROGRAMS if name == p or name.startswith(f"{p}.")), None)


def imports(file: Path) -> list[tuple[int, str]]:
    """Returns the line and full name of every import of a file, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import; write the whole name"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def complaint(part: str, name: str) -> str | None:
    """Returns what is wrong with an import of `name` in `part`."""
    top = name.split(".")[0]
    program = program_of(name)
    if program and program != part and part != "benchmarks":
        return f"{program} is a program: start it, do not import it"
    if top in FORBIDDEN.get(part, "").split():
        return f"{part} must not import {top}"
    allowed = MAY_IMPORT[part]
    if top in MAY_IMPORT and top != part and allowed != EVERYTHING and top not in allowed.split():
        return f"{part} may import {allowed.replace(' ', ', ') or 'nothing of ours'}, not {top}"
    return None


def our_files() -> list[Path]:
    """Returns the Python files of the parts; a folder or program that the table does not know is an error."""
    files = sorted(ROOT.glob("*.py"))
    for folder in sorted(ROOT.iterdir()):
        if folder.is_dir() and folder.name not in ("tests", "docs", "runs") and not folder.name.startswith("."):
            files += sorted(folder.rglob("*.py"))
    return files


def test_the_arrows_point_one_way() -> None:
    files = our_files()
    assert len(files) > 40
    wrong = []
    for file in files:
        part = part_of(file)
        assert part in MAY_IMPORT, f"{file.relative_to(ROOT)}: say in tests/test_imports.py what {part} may import"
        for line, name in imports(file):
            if message := complaint(part, name):
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {message}")
    assert not wrong, "\n".join(wrong)


def test_wrong_arrows_are_found() -> None:
    assert complaint("sharding", "optax.contrib") == "sharding must not import optax"
    assert complaint("models", "sharding.step") is None
    assert complaint("sharding", "models.Decoder") == "sharding may import palette, not models"
    assert complaint("configs", "sharding.mesh") == "configs may import nothing of ours, not sharding"
    assert complaint("optimizers", "compression.exchange") == "optimizers may import sharding, not compression"
    assert complaint("experiment", "train.main") == "train is a program: start it, do not import it"
    assert complaint("experiment", "sharding.table") == "sharding.table is a program: start it, do not import it"
    assert complaint("sharding.table", "experiment.make_experiment") is None
    assert (
        part_of(ROOT / "sharding" / "table.py") == "sharding.table" and part_of(ROOT / "sharding/step.py") == "sharding"
    )
    assert part_of(ROOT / "experiment.py") == "experiment"
