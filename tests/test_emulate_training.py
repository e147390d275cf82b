"""Training on emulated nodes: the losses of one process, and the bytes on the wire."""

import sys
from pathlib import Path

import numpy as np
import pytest
from emulating import EMULATED, emulate, finish, traffic
from running import IGNORED, TRAIN, XLA_FLAGS, arguments, losses, rows, run_here


@EMULATED
@IGNORED
@pytest.mark.slow
def test_training_on_emulated_nodes_matches_one_process(tmp_path: Path) -> None:
    assert run_here(*arguments(tmp_path / "one")) == 0
    command = [sys.executable, str(TRAIN), *arguments(tmp_path / "two")]
    environment = ["env", f"XLA_FLAGS={XLA_FLAGS}"]
    code, out, err = finish(emulate(tmp_path / "emulated", [*environment, *command], "--rate=1gbit"))
    assert code == 0, out + err
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)
    sent = [row["wire_tx_bytes"] for row in rows(tmp_path / "two")]
    formula = rows(tmp_path / "two")[-1]["collective_inter_bytes"]
    assert min(sent) > formula  # per device: of two, and control traffic
    assert traffic(tmp_path / "emulated")[0]["tx_bytes"] > sum(sent)
