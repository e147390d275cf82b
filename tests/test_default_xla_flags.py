"""A step compiled with XLA's default flags: all other tests use those of fast_compile.py."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import workload
from running import ROOT

STRATEGY = dict(strategy="mics", partition_size=2)
PROGRAM = f"""
import json, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import workload
print(json.dumps(workload.losses("decoder", workload.plan("decoder", **{STRATEGY})).tolist()))
"""


@pytest.mark.slow
def test_losses_with_default_xla_flags_equal_those_with_fast_flags() -> None:
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    fast = workload.losses("decoder", workload.plan("decoder", **STRATEGY))
    np.testing.assert_allclose(json.loads(done.stdout), fast, rtol=1e-5)
    np.testing.assert_allclose(fast, workload.single_device_losses("decoder"), rtol=1e-5)
