"""What a run measures besides training: the validation loss, and a sample of text at the end."""

import math
import time
from dataclasses import dataclass

import jax
import numpy as np

from experiment import Experiment
from input_pipeline import Batches, Dataset


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The `eval` section of a config (meanings: configs/base.py)."""

    every: int
    num_batches: int

    def __post_init__(self) -> None:
        for key, least in (("every", 0), ("num_batches", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"eval.{key}={getattr(self, key)} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The `sample` section of a config (meanings: configs/base.py)."""

    prompt: str
    length: int
    temperature: float

    def __post_init__(self) -> None:
        for key in ("length", "temperature"):
            if getattr(self, key) < 0:
                raise ValueError(f"sample.{key}={getattr(self, key)} must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The result of one validation."""

    loss: float  # nats a token, the mean over the same rows every time
    bits_per_byte: float
    time_s: float


class Validator:
    """Measures the loss on the first rows of the validation data; compiles and loads them when first used."""

    def __init__(self, experiment: Experiment, data: Dataset, num_batches: int) -> None:
        self._experiment, self._data = experiment, data
        self._count = min(num_batches, max(len(data) // experiment.batch.global_size, 1))
        self._evaluate: jax.stages.Compiled | None = None
        self._batches: list[dict[str, jax.Array]] = []

    def __call__(self, params: object) -> Validation:
        """Returns the loss of `params`, placed as the training state's."""
        before, ex = time.perf_counter(), self._experiment
        if self._evaluate is None:
            self._evaluate = ex.compile_eval_step()
            self._batches = self._load()
        sums = jax.device_get([ex.settled(self._evaluate(params, batch)) for batch in self._batches])
        total, weight = np.sum(np.array(sums, np.float64), axis=0)
        loss = float(total / weight)
        bits = loss / math.log(2) / self._data.bytes_per_token
        return Validation(loss=loss, bits_per_byte=bits, time_s=time.perf_counter() - before)

    def _load(self) -> list[dict[str, jax.Array]]:
        ex = self._experiment
        size = ex.batch.global_size
        size = min(size, len(self._data))  # rows beyond a small split are padding, not rows seen again
        with Batches(self._data, global_size=size, rows=ex.local_rows, start_step=0, prefetch=1) as batches:
            return [ex.to_devices(next(batches)) for _ in range(self._count)]


class Sampler:
    """Continues the prompt of the config. ValueError at once for a prompt that cannot be continued."""

    def __init__(self, experiment: Experiment, data: Dataset, config: SampleConfig) -> None:
        self._experiment, self._tokenizer, self._config = experiment, data.tokenizer, config
        self._prompt = self._tokenizer.encode(config.prompt)
        room = experiment.model.config.max_len - len(self._prompt)
        self.wanted = experiment.can_sample and config.length > 0
        if self.wanted and (len(self._prompt) == 0 or room < 1):
            raise ValueError(
                f"sample.prompt has {len(self._prompt)} tokens; it must have from 1 to "
                f"{experiment.model.config.max_len - 1} (or set sample.length=0)"
            )
        self._length = min(config.length, room)

    def __call__(self, params: object) -> str:
        """Returns the prompt continued by the model with `params`."""
        ids = self._experiment.generate(params, self._prompt, length=self._length, temperature=self._config.temperature)
        return self._tokenizer.decode(ids)
