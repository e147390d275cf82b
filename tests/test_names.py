"""Names of classes and types: one name stands for one thing in all packages that users run."""

import ast
from collections import defaultdict

from support.our_files import ROOT, our_files

NOT_PRODUCT = ("lab", "examples")


def type_names(tree: ast.Module) -> set[str]:
    """Returns the names of the classes of a module, and its aliases of types except type variables."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, ast.unparse(node.value)
            if name.lstrip("_")[:1].isupper() and not name.isupper() and not value.startswith("TypeVar("):
                names.add(name)
    return names


def test_aliases_are_names_of_types() -> None:
    program = "Rows = list[int]\nMOST = 3\nValue = TypeVar('Value')\nclass Row:\n    class Inner: ...\nrow = Row()"
    assert type_names(ast.parse(program)) == {"Rows", "Row", "Inner"}


def test_each_type_has_a_name_of_its_own() -> None:
    modules = defaultdict(list)
    for file in our_files():
        path = file.relative_to(ROOT)
        if path.parts[0] not in NOT_PRODUCT:
            for name in type_names(ast.parse(file.read_text())):
                modules[name].append(str(path))
    repeated = {name: found for name, found in modules.items() if len(found) > 1}
    assert repeated == {}
