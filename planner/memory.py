"""What a step needs of a device's memory: as its program says, and what is known before there is one."""

import math
from dataclasses import dataclass

import jax

from configs.schema import TransformerConfig
from sharding.scopes import beyond
from sharding.spec import ParamSpec, is_placement
from training.experiment import Experiment
from training.memory import state_bytes


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device; `batch` and `temporaries` are what the compiler adds to the state."""

    parameters: float
    gradients: float
    optimizer: float
    temporaries: float
    batch: float
    capacity: float  # that a program can have

    @property
    def parts(self) -> dict[str, float]:
        """What is held, by name."""
        return {name: size for name, size in vars(self).items() if name != "capacity"}

    @property
    def total(self) -> float:
        """The peak, as the compiler says."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether a device can have so much."""
        return self.total <= self.capacity


def memory_of(experiment: Experiment, argument_bytes: int, temporary_bytes: int, capacity: float) -> Memory:
    """Returns what a device holds, by part: the gradients lie among the compiler's temporaries."""
    parameters, gradients, optimizer = state_bytes(experiment)
    gradients = min(gradients, temporary_bytes)
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        temporaries=temporary_bytes - gradients,
        batch=argument_bytes - parameters - optimizer,
        capacity=capacity,
    )


def activation_bytes(experiment: Experiment) -> float:
    """Returns what a step surely keeps besides the state: the layers' inputs, the logits, what the policy gathers."""
    config, layout, item = experiment.config, experiment.plan.layout, experiment.plan.compute_dtype.itemsize
    model, gathered = config.model, _kept_gathered(experiment)
    if not isinstance(model, TransformerConfig):
        return gathered
    tokens = config.batch.micro_size * config.data.seq_len
    return gathered + tokens * item * (model.num_layers * model.hidden + model.padded_vocab / layout.shape.tensor)


def temporary_bytes(experiment: Experiment, gradients: int) -> float:
    """Returns an estimate of the temporaries, by which what should fit is compiled first.

    Besides the layers' inputs there are, at the peak, either a layer's recomputed activations (attention scores once in
    f32, three times in the compute dtype) or the head's logits; and two gathered layers and the embedding, with one
    gradient of each in f32. With one micro-step hop two has a second copy of the gradients.
    """
    config, layout = experiment.config, experiment.plan.layout
    model, item, tensor = config.model, experiment.plan.compute_dtype.itemsize, layout.shape.tensor
    held = _kept_gathered(experiment)
    if experiment.batches.accumulation == 1 and layout.num_replicas > 1:
        held += gradients
    if not isinstance(model, TransformerConfig):
        return held
    tokens, vocab = config.batch.micro_size * config.data.seq_len, model.padded_vocab / tensor
    embedding = vocab * model.hidden
    layer = max(0.0, sum(gathered_values(experiment).values()) - embedding) / model.num_layers
    scores = tokens * config.data.seq_len * model.num_heads / tensor * (4 + 3 * item)
    inside = scores + 4 * item * tokens * (model.intermediate / tensor + model.hidden)
    head = tokens * vocab * (4 + 2 * item)
    kept = tokens * item * model.hidden if model.remat == "full" else inside
    held += layer * (2 * item + 4) + embedding * (item + 4)
    return held + model.num_layers * kept + max(inside, head)


def gathered_values(experiment: Experiment) -> dict[tuple[str, ...], float]:
    """Returns the parameters that a device has of the gathered model, by the axes that hold them apart: experts."""
    layout = experiment.plan.layout
    found = {(): 0.0}
    specs = jax.tree.leaves(experiment.model.param_specs(), is_leaf=lambda x: isinstance(x, ParamSpec))
    placements = jax.tree.leaves(experiment.plan.placements, is_leaf=is_placement)
    for spec, placement in zip(specs, placements, strict=True):
        here = math.prod(spec.shape) / layout.shape.size(placement.held) / layout.shape.tensor
        found[placement.held] = found.get(placement.held, 0.0) + here
    return found


def _kept_gathered(experiment: Experiment) -> float:
    """Returns the bytes of the parameters that the policy keeps gathered, and of gradients of them all."""
    layout, item = experiment.plan.layout, experiment.plan.compute_dtype.itemsize
    gathered, copies = 0.0, 1 if layout.gather.by_layer else 2  # gradients that come out by layer are not kept whole
    for held, values in gathered_values(experiment).items():
        for part in (layout.gather.each_step, layout.gather.each_micro_step):
            if part and (axes := beyond(held, part(layout.parameters))):
                kept = layout.shape.size(beyond(held, layout.parameters)) / layout.shape.size(axes)
                gathered += copies * item * values / kept
    return gathered
