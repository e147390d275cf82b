"""What a validation says, given the sums of its batches."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.tables import every_row

from configs import base
from configs.schema import DataConfig
from input_pipeline import load
from training.validation import Validator


def experiment_of(config: DataConfig, evaluate: Callable[[dict[str, np.ndarray]], Any]) -> Any:
    """Returns one with batches of 4 rows."""
    same = lambda x: x
    return SimpleNamespace(
        batches=SimpleNamespace(global_size=4, local_rows=range(4), to_devices=same),
        config=SimpleNamespace(data=config),
        block=same,
        compile_eval_step=lambda: lambda params, batch: evaluate(batch),
    )


def data_config(**changes: Any) -> DataConfig:
    return DataConfig(**base.get_config().data.to_dict() | dict(source="synthetic", seq_len=16) | changes)


@every_row("objective", ["causal", "masked"])
def test_bits_per_byte_are_those_of_a_model_that_predicts_every_token(objective: str) -> None:
    """Bytes are the tokens here; a masked model's loss is of the masked ones alone, and says nothing of the text."""
    data = load(config := data_config(objective=objective), "validation", 0)
    sums = iter([{"loss": np.float32(6), "weight": np.float32(4)}, {"loss": np.float32(2), "weight": np.float32(1)}])
    result = Validator(experiment_of(config, lambda batch: next(sums)), data, 2)({})
    assert result.loss == pytest.approx(8 / 5)
    bits = 8 / 5 / np.log(2)
    if objective == "causal":
        assert result.scalars()["validation_bits_per_byte"] == pytest.approx(bits)
        assert result.message == f"validation loss 1.6000 nats per token, {bits:.4f} bits per byte"
    else:
        assert "validation_bits_per_byte" not in result.scalars()
        assert result.message == "validation loss 1.6000 nats per masked token"


def test_a_batch_is_gone_before_the_next_one_is_measured() -> None:
    """They are read anew each time: a split of images takes more than a device has."""
    held: list[weakref.ref[np.ndarray]] = []

    def sums(batch: dict[str, np.ndarray]) -> dict[str, np.float32]:
        assert not any(one() is not None for one in held)
        held.append(weakref.ref(tokens := batch["tokens"]))
        return {"loss": np.float32(tokens.sum()), "weight": np.float32(tokens.size)}

    data = load(config := data_config(), "validation", 0)
    validator = Validator(experiment_of(config, sums), data, 3)
    wanted = np.mean([data[i]["tokens"] for i in range(12)])
    assert [validator({}).loss for _ in range(2)] == [pytest.approx(wanted)] * 2 and len(held) == 6
