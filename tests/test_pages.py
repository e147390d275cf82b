"""The pages of the docs: each leads back, the index has each, links lead somewhere, tables are complete."""

import ast
import re
from pathlib import Path

import pytest

from input_pipeline.shard_tiers import Counters

pytestmark = pytest.mark.document

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted({*DOCS.glob("*.md"), *DOCS.glob("results/*.md")} - {DOCS / "README.md"})
MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def test_every_page_leads_back() -> None:
    for page in PAGES:
        up = "" if page.parent == DOCS else "../"
        back = f"[mics-jax](../{up}README.md), [all pages]({up}README.md)"
        title, _, rest = page.read_text().partition("\n")
        assert title.startswith("# ") and rest.startswith(f"\n{back}\n\n") and rest.count(back) == 1, page.name


def test_the_index_has_every_page_and_the_readme_leads_to_it() -> None:
    linked = set(re.findall(r"\]\(([\w/]+\.md)\)", (DOCS / "README.md").read_text()))
    assert linked >= {str(page.relative_to(DOCS)) for page in PAGES}
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    words = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", word.lower()).replace(" ", "-") for word in words}


def test_links_lead_somewhere() -> None:
    for page in MARKDOWN:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_the_architecture_page_names_every_package_and_files_that_exist() -> None:
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", (DOCS / "architecture.md").read_text()))
    programs = {path.name for path in ROOT.glob("*.py")}
    packages = {f"{path.parent.name}/" for path in ROOT.glob("*/__init__.py")}
    assert named >= programs | packages
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_architecture_page_names_functions_that_exist() -> None:
    """Each name in brackets after a file is defined in it."""
    named = re.findall(r"`([\w/]+\.py)`\s\((`[^)]+`)\)", (DOCS / "architecture.md").read_text())
    assert len(named) > 30
    for file, names in named:
        tree = ast.parse((ROOT / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert {*re.findall(r"\w+", names)} <= defined, file


def test_the_page_of_configs_names_every_config() -> None:
    files = {path.name for path in (ROOT / "configs").glob("*.py") if "\ndef get_config(" in path.read_text()}
    assert len(files) > 15 and {*re.findall(r"`(\w+\.py)", (DOCS / "configs.md").read_text())} == files


# Keys that only programs of another kind than the step write, such as summary.json's, are not in the table.
WRITERS = {
    "training/partial_rounds.py": {"in_steps"},
    "training/metrics/throughput.py": {"step_time_s", "mfu"},
    "training/metrics/run_log.py": {"data_wait_s", "wire_tx_bytes", "wire_rx_bytes"},
    "compression/statistics.py": {
        "all_reduce_payload_bytes",
        "all_reduce_ratio",
        "all_reduce_fraction_sent",
        "residual_norm",
    },
    "training/optimizer_chain.py": {"skipped_steps"},
    "training/loss_scale.py": {"loss_scale"},
    "models/experts.py": {"cross_entropy", "balance_loss", "z_loss", "dropped_share"},
    "training/independent.py": {"replicas"},
    "training/hooks.py": {"learning_rate", "data_wait_s", "checkpoint_s", "snapshot_s", "profile_s", "validation_s"},
    "sharding/hlo.py": {"collective_inter_bytes", "collective_intra_bytes"},
}


def test_the_table_of_metrics_has_the_keys_that_the_code_writes() -> None:
    """And no others: each key of the table is a string of the code, or made of one."""
    section = (DOCS / "training.md").read_text().partition("\n## Metrics\n")[2]
    table = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| (`.*?) \|", section))))
    for file, keys in WRITERS.items():
        strings = {n.value for n in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(n, ast.Constant)}
        assert keys <= strings, f"{file}: {keys - strings}"
        assert keys <= table
    made = {"step", "loss", "grad_norm", "update_norm", "tokens_per_s", "examples_per_s"}
    made |= {f"validation_{name}" for name in ("loss", "bits_per_byte", "accuracy", "dropped_share")} | {
        *Counters().scalars()
    }
    assert table == made.union(*WRITERS.values())
