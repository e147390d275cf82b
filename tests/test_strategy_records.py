"""The steps of lab/benchmarks/steps.csv and their records: formulas, bytes on the wire, losses, keys."""

import numpy as np
import pytest

from lab.benchmarks import steps
from lab.benchmarks.names import link_bytes, scopes_of, strategy_keys
from lab.benchmarks.steps import CLUSTER, PEER
from lab.records import MEASURED, recorded

pytestmark = pytest.mark.document

CONTROL_BYTES = 500_000  # a step of 10 to 60 s: heartbeats, jax's coordination, acknowledgements
OURS = [line for line in recorded(MEASURED / "strategies.jsonl") if not line["strategy"].startswith(PEER)]


def test_wire_and_program_carry_the_formula(subtests: pytest.Subtests) -> None:
    lines = [line for line in OURS if line["wire_tx_bytes"] and "auto" not in line["strategy"]]
    assert len(lines) > 50
    for line in lines:
        with subtests.test(strategy=line["strategy"], rate=line["rate"], commit=line["commit"]):
            formula = link_bytes(line["strategy"], CLUSTER, model_bytes=line["model_bytes"], accum=line["accum"])
            assert abs(line["compiled_inter_bytes"] - formula) < 0.02 * formula
            for key in ("wire_tx_bytes", "wire_rx_bytes"):
                assert abs(line[key] - formula) < 0.02 * formula + CONTROL_BYTES, line[key] / formula


def test_the_losses_are_the_same() -> None:
    losses = [line["losses"] for line in OURS]
    longest = max(losses, key=len)
    assert len(losses) > 10
    for other in losses:
        np.testing.assert_allclose(other, longest[: len(other)], rtol=1e-5)


def test_formulas(subtests: pytest.Subtests) -> None:
    """Written out for 4 nodes of 2 and 4 micro-steps, for a model of 100 MB."""
    for strategy, scopes, megabytes in [
        ("ddp", (1, 1, 1), 2 * 7 / 8 * 100),
        ("zero1", (1, 1, 8), 2 * 6 / 8 * 100),
        ("zero2", (1, 8, 8), (4 + 1) * 6 / 8 * 100),
        ("zero3", (8, 8, 8), 12 * 6 / 8 * 100),
        ("zero3 flat", (8, 8, 8), 12 * 7 / 8 * 100),
        ("mics(4)", (4, 4, 4), 12 * 2 / 4 * 100 + 2 * 2 * 100 / 4 * 1 / 2),
        ("mics(2)", (2, 2, 2), 2 * 2 * 100 / 2 * 3 / 4),
        ("mics(2) two-hop off", (2, 2, 2), 4 * 2 * 7 / 8 * 100),
        ("node/node/all", (2, 2, 8), 2 * 6 / 8 * 100),
    ]:
        with subtests.test(strategy=strategy):
            assert scopes_of(strategy, CLUSTER) == scopes
            assert link_bytes(strategy, CLUSTER, model_bytes=100e6, accum=4) == pytest.approx(megabytes * 1e6)


def test_names() -> None:
    assert strategy_keys("mics(4) flat") == strategy_keys("mics(4)") | {"ablation.hierarchical": False}
    assert strategy_keys("mics(4)")["sharding.partition_size"] == 4
    assert strategy_keys("ddp")["sharding.partition_size"] == 0
    assert not strategy_keys("mics(2) two-hop off")["ablation.two_hop"]
    custom = {"sharding.strategy": "custom", "sharding.parameters": "node", "sharding.gradients": "none"}
    assert (custom | {"sharding.optimizer": "all"}).items() <= strategy_keys("node/none/all").items()
    assert strategy_keys("zero3 auto")["ablation.partitioner"] == "auto"
    assert strategy_keys("ddp overlap=on")["sharding.overlap"] == "on"


def test_the_plan_has_exactly_the_recorded_runs_and_alternates() -> None:
    for record, missing in (("strategies", 0), ("compression", 0), ("replicas", 1)):  # DDP at 20 Mbit/s ran twice
        planned = [{**key} for key in steps.keys_of(record)]
        lines = [{name: line[name] for name in planned[0]} for line in recorded(MEASURED / f"{record}.jsonl")]
        assert all(line in planned for line in lines)
        assert len(planned) == len({*map(str, lines)}) + missing
    turns = [(key["rate"], key["repetition"]) for key in steps.keys_of("compression")]
    assert turns == [("100mbit", i) for i in range(3) for _ in range(len(turns) // 3)]
