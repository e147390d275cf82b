"""Memory of a step on a device, before it is compiled (training/memory.py has the memory of a compiled program)."""

import math

import jax
import jax.numpy as jnp

from configs.schema import TransformerConfig
from models.chunked_loss import piece_length
from sharding.scopes import beyond
from sharding.spec import ParamSpec, is_placement
from training.experiment import Experiment


def activation_bytes(experiment: Experiment) -> float:
    """Returns the bytes that a step certainly keeps besides the state: layer inputs, logits, gathered parameters."""
    config, layout, item = experiment.config, experiment.plan.layout, experiment.plan.compute_dtype.itemsize
    model, gathered = config.model, _kept_gathered(experiment)
    if not isinstance(model, TransformerConfig):
        return gathered
    tokens = experiment.batches.config.micro_size * config.data.seq_len / layout.shape.context
    return gathered + item * (tokens * model.num_layers * model.hidden + _logits(experiment))


def temporary_bytes(experiment: Experiment, gradients: int, *, has_scores: bool) -> float:
    """Returns an estimate of the temporaries, so that candidates that should fit are compiled first.

    Besides the layer inputs the peak has either a layer's recomputed activations (attention scores, if it `has_scores`
    in memory, once in f32 and three times in the compute dtype) or the head's logits. It also has two gathered layers
    and the embedding, with one gradient of each in f32. With one micro-step the replica all-reduce has a second copy of
    the gradients.
    """
    config, layout = experiment.config, experiment.plan.layout
    model, item, tensor = config.model, experiment.plan.compute_dtype.itemsize, layout.shape.tensor
    held = _kept_gathered(experiment)
    if experiment.batches.accumulation == 1 and layout.num_replicas > 1:
        held += gradients
    if not isinstance(model, TransformerConfig):
        return held
    micro, vocab = experiment.batches.config.micro_size, model.padded_vocab / tensor
    tokens = micro * config.data.seq_len / layout.shape.context
    embedding = vocab * model.hidden
    layer = max(0.0, sum(gathered_values(experiment).values()) - embedding) / model.num_layers
    scores = has_scores * tokens * config.data.seq_len * model.num_heads / tensor * (4 + 3 * item)
    inside = scores + 4 * item * tokens * (model.intermediate / tensor + model.hidden)
    head = _logits(experiment) * (4 + 2 * item)
    stream = {"full": 1, "attention": 3, "offload": 0}  # saved values on the device, as multiples of the layer's input
    kept = tokens * item * model.hidden * stream[model.remat] if model.remat in stream else inside
    trained = experiment.model.num_trained / experiment.model.num_params
    held += layer * (2 * item + 4 * trained) + embedding * (item + 4 * trained)
    if model.lora_base != "compute":  # the current layer is decoded
        held += item * (experiment.model.num_params / tensor - embedding) / model.num_layers
    return held + model.num_layers * kept + max(inside, head)


def gathered_values(experiment: Experiment, *, only_trained: bool = False) -> dict[tuple[str, ...], float]:
    """Returns the number of gathered parameters on a device, by the axes that still shard them (experts).

    Frozen parameters count by their bytes, in values of the compute dtype.
    """
    plan, layout = experiment.plan, experiment.plan.layout
    found = {(): 0.0}
    specs = jax.tree.leaves(experiment.model.param_specs(), is_leaf=lambda x: isinstance(x, ParamSpec))
    placements = jax.tree.leaves(plan.all_placements, is_leaf=is_placement)
    for spec, placement in zip(specs, placements, strict=True):
        if only_trained and spec.frozen:
            continue
        here = math.prod(spec.shape) / layout.shape.size(placement.held) / layout.shape.tensor
        here *= jnp.dtype(spec.dtype).itemsize / plan.compute_dtype.itemsize if spec.frozen else 1
        found[placement.held] = found.get(placement.held, 0.0) + here
    return found


def _logits(experiment: Experiment) -> float:
    """Returns the number of logits that a device holds at a time, for a chunk of positions (models/chunked_loss.py)."""
    config, shape = experiment.config, experiment.plan.layout.shape
    assert isinstance(config.model, TransformerConfig)
    micro, vocab = experiment.batches.config.micro_size, config.model.padded_vocab
    return micro * piece_length(micro, config.data.seq_len // shape.context, vocab) * vocab / shape.tensor


def _kept_gathered(experiment: Experiment) -> float:
    """Returns the bytes of the parameters that the policy keeps gathered, and of gradients of them all."""
    layout, item = experiment.plan.layout, experiment.plan.compute_dtype.itemsize
    gathered, trained = 0.0, gathered_values(experiment, only_trained=True)
    for held, values in gathered_values(experiment).items():
        gradients = 0.0 if layout.gather.by_layer else trained.get(held, 0.0)  # by layer, none is kept whole
        for part in (layout.gather.each_step, layout.gather.each_micro_step):
            if part and (axes := beyond(held, part(layout.parameters))):
                kept = layout.shape.size(beyond(held, layout.parameters)) / layout.shape.size(axes)
                gathered += item * (values + gradients) / kept
    return gathered
