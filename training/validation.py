"""Measures a model on validation data."""

import math
import time
from dataclasses import dataclass

import jax

from input_pipeline import Batches, Dataset, TextDataset
from training.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The result of one validation."""

    loss: float  # mean nats per predicted token or per image, over the same rows every time
    time_s: float
    bits_per_byte: float | None = None  # of causal models of text
    accuracy: float | None = None  # of classifiers: share of the images whose class is the most likely one

    def scalars(self) -> dict[str, float]:
        """Returns the metrics by their keys in `metrics.jsonl`."""
        keys = ("loss", "bits_per_byte", "accuracy")
        return {f"validation_{key}": value for key in keys if (value := getattr(self, key)) is not None}

    @property
    def message(self) -> str:
        """The message for the user."""
        if self.accuracy is not None:
            return f"validation loss {self.loss:.4f} nats per image, accuracy {self.accuracy:.2%}"
        if self.bits_per_byte is None:
            return f"validation loss {self.loss:.4f} nats per masked token"
        return f"validation loss {self.loss:.4f} nats per token, {self.bits_per_byte:.4f} bits per byte"


class Validator:
    """Measures a model on the first rows of the validation data; compiles and loads at the first call."""

    def __init__(self, experiment: Experiment, data: Dataset, num_batches: int) -> None:
        self._experiment, self._data = experiment, data
        self._count = min(num_batches, -(-len(data) // experiment.batches.global_size))
        self._evaluate: jax.stages.Compiled | None = None
        self._batches: list[dict[str, jax.Array]] = []

    def __call__(self, params: object) -> Validation:
        """Returns the result for `params`, sharded like the training state's."""
        before, ex = time.perf_counter(), self._experiment
        if self._evaluate is None:
            self._evaluate = ex.compile_eval_step()
            self._batches = self._load()
        sums = jax.device_get([ex.block(self._evaluate(params, batch)) for batch in self._batches])
        weight = sum(float(batch["weight"]) for batch in sums)
        means = {name: sum(float(batch[name]) for batch in sums) / weight for name in sums[0]}
        loss, data = means["loss"], self._data
        bits_per_byte = None
        if isinstance(data, TextDataset) and ex.config.data.objective == "causal":
            bits_per_byte = loss / math.log(2) / data.bytes_per_token
        return Validation(
            loss=loss,
            bits_per_byte=bits_per_byte,
            accuracy=means.get("correct"),
            time_s=time.perf_counter() - before,
        )

    def _load(self) -> list[dict[str, jax.Array]]:
        ex, data = self._experiment, self._data
        size, end = ex.batches.global_size, len(data)  # rows beyond the split are padding, not the next epoch's
        with Batches(data, global_size=size, rows=ex.batches.local_rows, start_step=0, prefetch=1, end=end) as batches:
            return [ex.batches.to_devices(next(batches)) for _ in range(self._count)]
