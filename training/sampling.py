"""Sampling of text from a trained decoder."""

import jax
import jax.numpy as jnp
import numpy as np

import models
from configs.schema import SampleConfig
from input_pipeline.tokenizers import Tokenizer
from sharding.gathers import auto_gather, layer_gather
from sharding.mesh import inter_part
from sharding.plan import run_manual
from sharding.trees import Params
from training.experiment import Experiment


class Continuation:
    """Continues prompts by a decoder. The constructor raises ValueError for another model."""

    def __init__(self, experiment: Experiment, *, temperature: float, seed: int) -> None:
        if not isinstance(experiment.model, models.Decoder):
            raise ValueError(f"model.kind={experiment.config.model.kind} cannot be sampled: it is no decoder")
        self._experiment, self._model = experiment, experiment.model
        self._temperature, self._seed = temperature, seed
        self._run = jax.jit(self._sample, static_argnames="length", out_shardings=experiment.replicated)

    def room(self, prompt: np.ndarray, what: str) -> int:
        """Returns how many tokens may follow a prompt, ids [P]. ValueError, which begins with `what`, if none may."""
        max_len = self._model.config.max_len
        if not 0 < len(prompt) < max_len:
            raise ValueError(f"{what} has {len(prompt)} tokens; it must have 1 to {max_len - 1}")
        return max_len - len(prompt)

    def __call__(self, params: object, prompt: np.ndarray, length: int) -> np.ndarray:
        """Returns ids [P + length]: the prompt continued; the first sample of all data devices."""
        rows = self._experiment.plan.layout.shape.num_data_devices
        batch = {
            "prompt": jnp.broadcast_to(jnp.asarray(prompt, jnp.int32), (1, rows, len(prompt))),
            "row": jnp.arange(rows)[None],
        }
        return np.asarray(self._run(params, batch, length=length).addressable_data(0))[0, 0]

    def _sample(self, params: Params, batch: dict[str, jax.Array], length: int) -> jax.Array:
        plan = self._experiment.plan

        def sample(params: Params, batch: dict[str, jax.Array], gather: models.Gather) -> jax.Array:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self._seed), batch["row"][0])
            how = {"length": length, "temperature": self._temperature}
            return self._model.generate(params, batch["prompt"][0], keys, gather, **how)[None]

        if plan.layout.is_automatic:
            return sample(params, batch, auto_gather(plan))
        gather = layer_gather(plan.without_codecs)
        return run_manual(plan, lambda p, b: sample(p, b, gather), plan.batch_spec)(params, batch)


class Sampler:
    """Continues the prompt of the config. The constructor raises ValueError for a bad prompt.

    `warnings` are lines for the user whose model writes text but is not a `models.Decoder`, or lies on several nodes.
    """

    def __init__(self, experiment: Experiment, tokenizer: Tokenizer | None, config: SampleConfig) -> None:
        self.warnings: list[str] = []
        self.wanted = isinstance(experiment.model, models.Decoder) and config.length > 0
        if not self.wanted:
            kind, objective = experiment.config.model.kind, experiment.config.data.objective
            if config.length and objective == "causal":
                self.warnings.append(f"warning: no sample: model.kind={kind} cannot be sampled; set sample.length=0")
            return
        assert tokenizer
        self._tokenizer, self._prompt = tokenizer, tokenizer.prompt(config.prompt)
        seed = experiment.config.seed
        self._continue = Continuation(experiment, temperature=config.temperature, seed=seed)
        try:
            room = self._continue.room(self._prompt, "sample.prompt")
        except ValueError as error:
            raise ValueError(f"{error}, or set sample.length=0") from error
        self._length = min(config.length, room)
        if inter_part(experiment.plan.layout.parameters):
            count = len(self._prompt) + self._length - 1
            about = f"the sample gathers the parameters between nodes for each of {count} tokens"
            self.warnings.append(f"warning: {about}, at the end of the run; sample.length=0 leaves it out")

    def __call__(self, params: object) -> str:
        """Returns the prompt continued by the model with `params`."""
        return self._tokenizer.continued(self._continue(params, self._prompt, self._length))
