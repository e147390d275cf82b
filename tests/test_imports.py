"""Who may import whom (docs/architecture.md), by walking the imports of every file: the arrows point one way."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support.our_files import ROOT, our_files

EVERYTHING = "*"
# package: what of ours it may import, besides itself; a module by its full name where only that one
MAY_IMPORT = {
    "runtime.files": "",
    "runtime": "runtime.files",
    "configs": "runtime.files",
    "sharding": "configs runtime.files",
    "models": "compression.codecs configs sharding runtime.files",
    "compression.codecs": "configs",
    "compression": "compression.codecs configs sharding",
    "mics": "compression configs sharding",
    "input_pipeline": "configs runtime runtime.files",
    "elastic.replicas": "configs compression.codecs runtime runtime.files",
    "elastic": "configs sharding runtime runtime.files",
    "training.metrics": "runtime runtime.files",
    "training": "configs models sharding compression input_pipeline elastic elastic.replicas training.metrics runtime "
    "runtime.files",
    "planner": "configs models sharding training training.metrics elastic.replicas input_pipeline runtime "
    "runtime.files",
    "launch": "configs training.metrics runtime runtime.files",
    "train": EVERYTHING,
    "examples": "configs sharding compression compression.codecs mics runtime",
    "sweep": "configs launch runtime runtime.files",
    "lab": "",
    "lab.probe": "sharding models training.metrics runtime runtime.files",
    "lab.chaos": "elastic launch training.metrics runtime runtime.files",
    "lab.records": "configs training.metrics runtime.files",
    "lab.plots": "lab.records runtime.files",
    "lab.clock": "configs sharding launch planner training.metrics runtime runtime.files",
    "lab.virtual_replicas": "models compression configs sharding training",
    "lab.paper": "planner lab.records lab.plots runtime.files",
    "lab.benchmarks": EVERYTHING,
    "lab.pages": EVERYTHING,
}
LABORATORY = "lab"  # probe, chaos, benchmarks, records: the product imports none of it
# nothing imports them, but benchmarks; sweep and tests may start them
PROGRAMS = {"train", "sweep", "lab.benchmarks", "examples"}
# package: what of others' it must not import
FORBIDDEN = {
    "configs": "jax flax optax",
    "sharding": "flax optax",
    "models": "optax",
    "input_pipeline": "flax optax tensorflow",
    "training.metrics": "jax flax optax",
    "elastic.replicas": "jax flax optax",
    "compression": "flax",
    "mics": "flax",
    "elastic": "flax optax",
    "runtime": "flax optax",
    "runtime.files": "flax optax",
    "launch": "jax flax optax",
    "sweep": "jax flax optax",
    "lab.probe": "flax optax",
    "lab.chaos": "flax optax",
    "lab.paper": "jax flax optax",
}


def part_of(file: Path) -> str:
    """Returns the part to which a file belongs: a package, one of its subpackages in the table, or a program."""
    return part_named(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def part_named(module: str) -> str:
    """Returns the part to which a module belongs; in the laboratory each subpackage and module is one."""
    package, _, rest = module.partition(".")
    name = f"{package}.{rest.partition('.')[0]}"
    return name if name in MAY_IMPORT or (rest and package == LABORATORY) else package


@functools.cache
def imports(file: Path) -> list[tuple[int, str]]:
    """Returns the line and full name of every import of a file, inside functions and by import_module too."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import; write the whole name"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            name = ast.unparse(node.args[0]).lstrip("f").strip("'\"")  # such as `configs.{name}`
            found.append((node.lineno, name))
    return found


def complaint(part: str, name: str) -> str | None:
    """Returns what is wrong with an import of `name` in `part`."""
    top = part_named(name)
    if top in PROGRAMS and top != part and part not in ("lab.benchmarks", "lab.pages"):
        return f"{top} is a program, or an example: start it, do not import it"
    if top.startswith(LABORATORY) and not part.startswith(LABORATORY):
        return f"{top} is of the laboratory: {part} may start it, not import it"
    if top in FORBIDDEN.get(part, "").split():
        return f"{part} must not import {top}"
    allowed = MAY_IMPORT[part]
    if top in MAY_IMPORT and top != part and allowed != EVERYTHING and top not in allowed.split():
        return f"{part} may import {allowed.replace(' ', ', ') or 'nothing of ours'}, not {top}"
    return None


def test_imports_follow_the_table() -> None:
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


def test_packages_form_no_cycle_and_every_permission_is_used() -> None:
    used: dict[str, set[str]] = {}
    for file in our_files():
        tops = {part_named(name) for _, name in imports(file)}
        used.setdefault(part_of(file), set()).update(tops & MAY_IMPORT.keys() - {part_of(file)})
    order = [*TopologicalSorter(used).static_order()]  # CycleError names a cycle
    assert order.index("sharding") < order.index("elastic") < order.index("train")
    granted = {(part, other) for part, others in MAY_IMPORT.items() if others != EVERYTHING for other in others.split()}
    unused = sorted(f"{part}: {other}" for part, other in granted if other not in used.get(part, set()))
    assert not unused, f"remove from MAY_IMPORT: {unused}"


@pytest.mark.document
def test_the_architecture_page_has_the_imports_of_each_package() -> None:
    """Its table has a row per package; an import of a subpackage counts for the package."""
    granted: dict[str, set[str]] = {}
    for part, others in MAY_IMPORT.items():
        packages = {other.partition(".")[0] for other in others.split()}
        granted.setdefault(part.partition(".")[0], set()).update(packages)
    rows = re.findall(r"(?m)^\| `(\w+)(?:/|\.py)` \| .* \| (.*) \|$", (ROOT / "docs" / "architecture.md").read_text())
    above: list[str] = []
    for package, cell in rows:
        imported = {*above} if cell in ("all above", "any") else {*re.findall(r"`(\w+)`", cell)}
        assert imported == granted[package] - {package, EVERYTHING} or cell == "any", package
        assert imported <= {*above}, package
        above.append(package)
    assert {*above} == granted.keys() - {"train", "sweep"}


def test_programs_that_start_others_load_nothing_slow() -> None:
    programs = (
        "launch.emulate, lab.chaos.__main__, launch.ray, sweep, training.metrics.report, training.metrics.run_log"
    )
    code = (
        f"import sys, {programs}; print({{*sys.modules}} & {{'jax', 'tensorboardX', 'google.protobuf', 'matplotlib'}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120, capture_output=True, text=True
    )
    assert done.stdout == "set()\n"


def test_forbidden_imports_are_found() -> None:
    assert complaint("sharding", "optax.contrib") == "sharding must not import optax"
    assert complaint("sharding", "models.Decoder") == "sharding may import configs, runtime.files, not models"
    assert complaint("training", "train.main") == "train is a program, or an example: start it, do not import it"
    assert complaint("train", "lab.chaos") == "lab.chaos is of the laboratory: train may start it, not import it"
    assert (message := complaint("launch", "training.world")) and message.endswith("not training")
    assert complaint("models", "sharding.step") is complaint("planner", "training.experiment.make_experiment") is None
