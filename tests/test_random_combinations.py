"""Combinations of strategy, gather policy and codec, drawn with the seed $MICS_JAX_SEED (default 0)."""

import itertools
import os
import random

import numpy as np
import pytest
import workload
from test_exchange_codecs import CODECS, LAYOUTS

from compression.exchange import exchange

pytestmark = pytest.mark.release
SEED = int(os.environ.get("MICS_JAX_SEED", "0"))
RTOL = {"bf16": 1e-3, "int8": 2e-3, "int4": 0.05, "int4 stochastic": 0.05, "two_bit": 0.1, "one_bit": 0.1}
ALL = [*itertools.product(LAYOUTS, ("layer", "micro_step", "step"), CODECS)]
CASES = random.Random(SEED).sample(ALL, 3)


@pytest.mark.parametrize(("layout", "gather", "codec"), CASES)
def test_losses_of_random_combinations_stay_close_to_one_device(layout: str, gather: str, codec: str) -> None:
    """The first loss is before any exchange, so it is equal up to rounding."""
    plan = workload.plan("decoder", gather=gather, **LAYOUTS[layout])
    step = workload.compiled_step("decoder", plan, hop_two=exchange(plan, CODECS[codec]))
    losses, *_ = workload.run_steps(*step, 3)
    dense = workload.single_device_losses("decoder")[:3]
    np.testing.assert_allclose(losses[0], dense[0], rtol=1e-5)
    np.testing.assert_allclose(losses, dense, rtol=RTOL[codec])
