"""What a validation says, given the sums of its batches."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs import base
from configs.schema import DataConfig
from input_pipeline import load
from training.validation import Validator


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_bits_per_byte_are_those_of_a_model_that_predicts_every_token(objective: str) -> None:
    """Bytes are the tokens here; a masked model's loss is of the masked ones alone, and says nothing of the text."""
    section = base.get_config().data.to_dict() | dict(source="synthetic", seq_len=16, objective=objective)
    data = load(config := DataConfig(**section), "validation", 0)
    sums = [{"loss": np.float32(6), "weight": np.float32(4)}, {"loss": np.float32(2), "weight": np.float32(1)}]
    same = lambda sums: sums
    read = lambda *_, **__: nullcontext(iter(sums))
    experiment: Any = SimpleNamespace(
        batches=SimpleNamespace(global_size=4, read=read, to_devices=same),
        config=SimpleNamespace(data=config),
        block=same,
        compile_eval_step=lambda: lambda params, batch: batch,
    )
    result = Validator(experiment, data, 2)({})
    assert result.loss == pytest.approx(8 / 5)
    bits = 8 / 5 / np.log(2)
    if objective == "causal":
        assert result.scalars()["validation_bits_per_byte"] == pytest.approx(bits)
        assert result.message == f"validation loss 1.6000 nats per token, {bits:.4f} bits per byte"
    else:
        assert "validation_bits_per_byte" not in result.scalars()
        assert result.message == "validation loss 1.6000 nats per masked token"
