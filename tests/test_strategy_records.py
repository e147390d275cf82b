"""What lab/benchmarks/results/measured/strategies.jsonl says was measured: formulas, losses, commands."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.benchmarks import strategies
from lab.benchmarks.names import Cluster, link_bytes, scopes_of, sharding_of
from lab.benchmarks.strategies import RESULTS
from lab.records import recorded

pytestmark = pytest.mark.document

ROOT = Path(__file__).resolve().parent.parent
CONTROL_BYTES = 500_000  # a step of 10 to 60 s: heartbeats, jax's coordination, acknowledgements
OURS = [line for line in recorded(RESULTS) if line["wire_tx_bytes"] and not line["strategy"].startswith("pytorch")]
CLUSTER = Cluster(nodes=4, devices_per_node=2)


def name(line: dict[str, Any]) -> str:
    return "-".join(str(line[key]) for key in ("mode", "strategy", "rate", "repetition"))


@pytest.mark.parametrize("line", [line for line in OURS if "auto" not in line["strategy"]], ids=name)
def test_wire_and_program_carry_the_formula(line: dict[str, Any]) -> None:
    formula = link_bytes(line["strategy"], CLUSTER, model_bytes=line["model_bytes"], accum=line["accum"])
    assert abs(line["compiled_inter_bytes"] - formula) < 0.02 * formula
    for key in ("wire_tx_bytes", "wire_rx_bytes"):
        assert abs(line[key] - formula) < 0.02 * formula + CONTROL_BYTES, line[key] / formula


def test_the_losses_are_the_same() -> None:
    losses = [line["losses"] for line in recorded(RESULTS) if not line["strategy"].startswith("pytorch")]
    assert len(losses) > 10
    longest = max(losses, key=len)
    for other in losses:
        np.testing.assert_allclose(other, longest[: len(other)], rtol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "scopes", "megabytes"),
    [
        ("ddp", (1, 1, 1), 2 * 7 / 8 * 100),
        ("zero1", (1, 1, 8), 2 * 6 / 8 * 100),
        ("zero2", (1, 8, 8), (4 + 1) * 6 / 8 * 100),
        ("zero3", (8, 8, 8), 12 * 6 / 8 * 100),
        ("zero3 flat", (8, 8, 8), 12 * 7 / 8 * 100),
        ("mics(4)", (4, 4, 4), 12 * 2 / 4 * 100 + 2 * 2 * 100 / 4 * 1 / 2),
        ("mics(2)", (2, 2, 2), 2 * 2 * 100 / 2 * 3 / 4),
        ("mics(2) two-hop off", (2, 2, 2), 4 * 2 * 7 / 8 * 100),
        ("node/node/all", (2, 2, 8), 2 * 6 / 8 * 100),
    ],
)
def test_formulas(strategy: str, scopes: tuple[int, int, int], megabytes: float) -> None:
    """Written out for 4 nodes of 2 and 4 micro-steps, for a model of 100 MB."""
    assert scopes_of(strategy, CLUSTER) == scopes
    assert link_bytes(strategy, CLUSTER, model_bytes=100e6, accum=4) == pytest.approx(megabytes * 1e6)


def test_names() -> None:
    assert sharding_of("mics(4) flat") == sharding_of("mics(4)") | {"hierarchical": False}
    assert sharding_of("mics(4)")["partition_size"] == 4 and sharding_of("ddp")["partition_size"] == 0
    assert not sharding_of("mics(2) two-hop off")["two_hop"]
    custom = {"strategy": "custom", "parameters": "node", "gradients": "none", "optimizer": "all"}
    assert custom.items() <= sharding_of("node/none/all").items()
    assert sharding_of("zero3 auto")["partitioner"] == "auto" and sharding_of("ddp overlap=on")["overlap"] == "on"


# ------------------------------------------------------------------------------------------------------- the pages


def test_the_commands_on_the_page_plan_exactly_the_recorded_runs() -> None:
    text = (ROOT / "docs" / "strategies.md").read_text()
    planned: list[dict[str, Any]] = []
    for command in re.findall(r"(?m)^    python -m lab.benchmarks.strategies (.*)$", text):
        planned += map(dict, strategies.planned(strategies.parsed(shlex.split(command))))
    lines = [{key: line[key] for key in planned[0]} for line in recorded(RESULTS)]
    assert sorted(planned, key=str) == sorted(lines, key=str)
