"""The models of images under every strategy: the losses of a single device that knows no sharding."""

from typing import Any

import numpy as np
import pytest
import workload
from test_strategies import STRATEGIES
from workload import BATCH_NORM

ROWS = {"resnet": 16, BATCH_NORM: 32, "vit": 16}  # ghost batches have two rows, a device one in two micro-steps of 16
ALL = [(kind, strategy, {}) for kind in ROWS for strategy in STRATEGIES]
ALL += [
    (kind, "mics4", {"gather": gather}) for kind in (BATCH_NORM, "vit") for gather in ("node", "micro_step", "step")
]
ALL += [(kind, "hsdp", {"partitioner": "auto"}) for kind in (BATCH_NORM, "vit")]
ALL += [(BATCH_NORM, "mics2", {"two_hop": False}), ("vit", "mics2", {"tensor": 2})]
QUICK = ((BATCH_NORM, "zero3"), ("vit", "mics4"))
CASES = [
    pytest.param(*case, marks=() if case[:2] in QUICK and not case[2] else pytest.mark.slow, id=f"{case[0]}-{case[1]}")
    for case in ALL
]


@pytest.mark.parametrize(("kind", "strategy", "how"), CASES)
def test_losses_equal_a_single_device(kind: str, strategy: str, how: dict[str, Any]) -> None:
    plan = workload.plan(kind, **STRATEGIES[strategy], **how)
    expected = workload.single_device_losses(kind, ROWS[kind])
    got = workload.losses(kind, plan, rows=ROWS[kind])
    np.testing.assert_allclose(got, expected, rtol=2e-5)
    assert expected[-1] < expected[0] - 0.1
