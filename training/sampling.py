"""Sampling of text from a trained decoder."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from configs.schema import SampleConfig
from input_pipeline import Dataset, ImageDataset
from sharding.gathers import auto_gather, layer_gather
from sharding.plan import run_manual
from training.experiment import Experiment


class Sampler:
    """Continues the prompt of the config. The constructor raises ValueError for a bad prompt.

    `warnings` are lines for the user whose model writes text, but is no decoder of ours.
    """

    def __init__(self, experiment: Experiment, data: Dataset, config: SampleConfig) -> None:
        self._experiment, self._config = experiment, config
        self.warnings: list[str] = []
        self.wanted = isinstance(experiment.model, models.Decoder) and config.length > 0
        if not self.wanted:
            kind, objective = experiment.config.model.kind, experiment.config.data.objective
            if config.length and objective == "causal":
                self.warnings.append(f"warning: no sample: model.kind={kind} cannot be sampled; set sample.length=0")
            return
        assert isinstance(experiment.model, models.Decoder) and not isinstance(data, ImageDataset)
        self._tokenizer = data.tokenizer
        self._prompt = self._tokenizer.encode(config.prompt)
        max_len = experiment.model.config.max_len
        room = max_len - len(self._prompt)
        if len(self._prompt) == 0 or room < 1:
            raise ValueError(
                f"sample.prompt has {len(self._prompt)} tokens; it must have 1 to {max_len - 1}, or set sample.length=0"
            )
        self._length = min(config.length, room)

    def __call__(self, params: object) -> str:
        """Returns the prompt continued by the model with `params`; of the samples of all data devices, the first."""
        ex, config = self._experiment, self._config
        assert isinstance(ex.model, models.Decoder)
        model, layout = ex.model, ex.plan.layout
        rows = layout.shape.num_data_devices
        batch = {
            "prompt": jnp.broadcast_to(jnp.asarray(self._prompt, jnp.int32), (1, rows, len(self._prompt))),
            "row": jnp.arange(rows)[None],
        }

        def sample(params: Any, batch: dict[str, jax.Array], gather: models.Gather) -> jax.Array:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(ex.config.seed), batch["row"][0])
            how = {"length": self._length, "temperature": config.temperature}
            return model.generate(params, batch["prompt"][0], keys, gather, **how)[None]

        def run(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
            if layout.is_automatic:
                return sample(params, batch, auto_gather(ex.plan))
            gather = layer_gather(ex.plan.without_codecs)
            return run_manual(ex.plan, lambda p, b: sample(p, b, gather), ex.plan.batch_spec)(params, batch)

        ids = jax.jit(run, out_shardings=ex.replicated)(params, batch).addressable_data(0)
        return self._tokenizer.decode(np.asarray(ids)[0, 0])
