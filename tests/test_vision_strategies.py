"""The models of images under every strategy: the losses of a single device that knows no sharding."""

from typing import Any

import numpy as np
import pytest
from support import workload
from support.suite import SLOW
from support.workload import BATCH_NORM, STRATEGIES

from compression.codecs import Blockwise
from compression.exchange import exchange
from sharding.coded import LevelCodecs

ROWS = {"resnet": 16, BATCH_NORM: 32, "vit": 16}  # ghost batches have two rows, a device one in two micro-steps of 16
ALL = [(kind, strategy, {}) for kind in ROWS for strategy in STRATEGIES]
ALL += [
    (kind, "mics4", {"gather": gather}) for kind in (BATCH_NORM, "vit") for gather in ("node", "micro_step", "step")
]
ALL += [(kind, "hsdp", {"partitioner": "auto"}) for kind in (BATCH_NORM, "vit")]
ALL += [(BATCH_NORM, "hsdp", {"two_hop": False}), ("vit", "hsdp", {"tensor": 2})]
ALL += [("vit", "hsdp", {"overlap": True}), ("vit", "mics4", {"gather": "node", "overlap": True})]
ALL += [("resnet", "zero2", {"two_hop": False}), ("resnet", "node-node-all", {"gather": "step"})]
ALL += [("resnet", "hsdp", {"partitioner": "auto"})]
MORE = [(BATCH_NORM, "zero3", {}), ("vit", "mics4", {})]  # in test-all
QUICK = [("resnet", "mics4", {"rows": 13, "gather": "node"})]
CASES = [*QUICK, *(pytest.param(*case, marks=SLOW) for case in MORE)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK + MORE]


@pytest.mark.parametrize(("kind", "strategy", "how"), CASES)
def test_losses_equal_a_single_device(kind: str, strategy: str, how: dict[str, Any]) -> None:
    rows = how.get("rows", ROWS[kind])
    plan = workload.plan(kind, **STRATEGIES[strategy], **{key: how[key] for key in how.keys() - {"rows"}})
    expected = workload.single_device_losses(kind, rows)
    np.testing.assert_allclose(workload.losses(kind, plan, rows=rows), expected, rtol=2e-5)
    assert expected[-1] < expected[0] - 0.1


@pytest.mark.release
@pytest.mark.parametrize(
    ("kind", "hop"), [("resnet", "gather"), (BATCH_NORM, "group reduce-scatter"), ("vit", "replica all-reduce")]
)
def test_losses_with_a_codec_stay_near(kind: str, hop: str) -> None:
    """In 8 bits; batches of other sizes and shapes than text, and running averages, which no codec touches."""
    codec = Blockwise(bits=8, block=64)
    strategy, codecs = STRATEGIES["mics4"], LevelCodecs(inter=codec)
    how = {
        "gather": {"gather_codecs": codecs},
        "group reduce-scatter": {"reduce_scatter_codecs": codecs},
        "replica all-reduce": {},
    }[hop]
    plan = workload.plan(kind, **strategy, **how)
    all_reduce = exchange(plan, codec) if hop == "replica all-reduce" else None
    got = workload.losses(kind, plan, rows=ROWS[kind], all_reduce=all_reduce)
    expected = workload.single_device_losses(kind, ROWS[kind])
    np.testing.assert_allclose(got, expected, rtol=3e-2)
    assert not np.allclose(got, expected, rtol=1e-6)
