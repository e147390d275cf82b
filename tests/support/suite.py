"""Which tests run when, and on which worker: derived from each file, so that a new one needs no line here.

Two workers compute; the slow tests of `WAITING` share a third one, because they wait for time limits and other
processes rather than use a core. All other tests of a file run on one worker, which compiles the programs they share
once. A quick test is never skipped: a test that needs an optional package is slow.
"""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

WAITING = frozenset(
    f"test_{name}.py"
    for name in (
        *("chaos", "emulate", "emulate_nodes", "handshake", "heartbeat", "heartbeat_runs", "joining", "probe"),
        *("ray_engine", "ray_members", "ray_agent", "wire_bytes"),
    )
)
NEEDS = {"test_hugging_face_library.py": "transformers", "test_ray_members.py": "ray"}  # packages of slow tests
# `workload` is the models and steps that tests of strategies share, `keeping` a run with snapshots, `running` train.py
JAX = {"jax", "optax", "flax", "workload", "keeping", "running"}
SLOW = pytest.mark.slow(every_time=True)  # a parameter's value that also runs in `make test-all`, not only for releases
PLAIN = {"ROOT", "SMALL", "finish", "wait_until"}  # of `running`, which start nothing


def depends_on_jax(file: Path) -> bool:
    """Whether a test file imports jax, directly or by a name in JAX: then it runs with every tested version of jax.

    The planner's tests are excluded, because they compile most; test_hlo.py tests how XLA's text is read.
    """
    if file.name.startswith("test_planner"):
        return False
    imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return any(name.split(".")[0] in JAX for node in imports for name in _modules(node))


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Returns the modules that a statement imports, without `support`; none for helpers that start nothing."""
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return names
    if node.module == "support":
        return names
    return [] if {*names} <= PLAIN else [(node.module or "").removeprefix("support.")]


def is_for_releases(item: Any) -> bool:
    """Whether a test is about a page or record, or a slow combination that does not run every time."""
    if item.get_closest_marker("document"):
        return True
    marks = item.callspec.marks if hasattr(item, "callspec") else ()
    return any(mark.name == "slow" and mark != SLOW.mark for mark in marks)


def is_quick(item: Any) -> bool:
    """Whether `make test` runs a test."""
    return not any(item.get_closest_marker(name) for name in ("slow", "release", "gpu", "slurm"))


def sampled(cases: Mapping[str, tuple[Any, ...]] | Iterable[Any], *kept: Any) -> list[Any]:
    """Returns a parameter's values, all but the `kept` ones only for releases; a mapping's values by their names."""
    named = cases.items() if isinstance(cases, Mapping) else [(None, case) for case in cases]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=[] if (case if name is None else name) in kept else [pytest.mark.release],
        )
        for name, case in named
    ]


def sort_and_mark(items: list[pytest.Item]) -> None:
    """Gives every test its markers and its worker; long files come first, so that the workers end together."""
    with_jax = {path: depends_on_jax(path) for path in {item.path for item in items}}
    for item in items:
        waits = item.path.name in WAITING and not is_quick(item)
        item.add_marker(pytest.mark.xdist_group("waiting" if waits else item.path.stem))
        if with_jax[item.path]:
            item.add_marker(pytest.mark.jax)
        if is_for_releases(item):
            item.add_marker(pytest.mark.release)
        if is_quick(item) and (item.get_closest_marker("skipif") or item.get_closest_marker("skip")):
            raise pytest.UsageError(f"{item.nodeid} may be skipped: mark it slow")
    items.sort(key=lambda item: (item.path.name not in WAITING, not with_jax[item.path]))
