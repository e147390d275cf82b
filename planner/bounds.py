"""Bounds of a candidate before compilation: memory, traffic and time of a step.

The least time is the longer of two: the time of the matrix products alone, and the time of the traffic of one network
level alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema import MoeConfig, TransformerConfig
from configs.schema.codecs import TABLE
from input_pipeline import row_arrays
from models.transformer import Transformer
from planner.clusters import Cluster
from planner.memory import activation_bytes, gathered_values, temporary_bytes
from sharding.mesh import inter_part, intra_part
from sharding.scopes import beyond
from training.experiment import Experiment
from training.memory import state_bytes

HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# lower bounds of the bytes per value: blocks also have scales, and a registered codec's size is unknown
CODEC_BYTES = {name: coding.bits / 8 for name, coding in TABLE.items() if not coding.method}
SLACK = 1.2  # the least time ignores details (embeddings are gathered once), so nothing within this factor is discarded


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bytes of a device and seconds of a step. Bounds are never too high, but an estimate may be."""

    state_bytes: int
    least_bytes: float
    estimate_bytes: float
    least_s: float
    estimate_s: float  # orders the candidates


def bounds(experiment: Experiment, cluster: Cluster, state: tuple[int, int, int] | None = None) -> Bounds:
    """Returns the bounds of an experiment on devices of a cluster. `state` is given if its bytes are known."""
    state = state or state_bytes(experiment)
    compute_s, network = _compute_s(experiment, cluster), cluster.network()
    levels = [network.transfer_s(level, sent) for level, sent in traffic(experiment).items()]
    return Bounds(
        state_bytes=sum(state),
        least_bytes=sum(state) + activation_bytes(experiment),
        estimate_bytes=sum(state) + temporary_bytes(experiment, state[1], has_scores=cluster.has_scores),
        least_s=max(compute_s, *levels),
        estimate_s=_estimate_s(experiment, cluster, compute_s),
    )


def flops_per_row(experiment: Experiment) -> float:
    """Returns the model's floating-point operations per row, without recomputation."""
    row = next(iter(row_arrays(experiment.config.data).values()))
    return experiment.model.flops_per_row(row.shape)


def forward_share(experiment: Experiment) -> float:
    """Returns the forward fraction of a step's operations: one of three passes, or of four if layers are recomputed.

    A frozen base has no gradients, so it has one pass less.
    """
    model = experiment.model
    is_frozen = model.num_trained < model.num_params
    return 1 / (3 - is_frozen + (experiment.config.model.remat == "full"))


def _compute_s(experiment: Experiment, cluster: Cluster) -> float:
    """Returns the least seconds of a step's products. A kernel computes half of the pairs of a causal mask."""
    model, shape, flops = experiment.model.config, experiment.plan.layout.shape, flops_per_row(experiment)
    if isinstance(experiment.model, Transformer):
        length = experiment.config.data.seq_len
        of_products = experiment.model.flops_per_token(0) * length
        flops = of_products + (flops - of_products) / 2
    rows = experiment.batches.accumulation * experiment.batches.config.micro_size / shape.tensor / shape.context
    recomputed = 4 / 3 if model.remat == "full" else 1
    rate = cluster.compute(shape.num_devices).matmul_rate(HLO_DTYPES[model.compute_dtype])
    return rows * flops * recomputed / rate


def _estimate_s(experiment: Experiment, cluster: Cluster, compute_s: float) -> float:
    """Returns an estimate of a step's seconds, in which communication that can be hidden costs nothing.

    Each micro-step copies the gathered parameters out of their packs twice, and the gradients into theirs.
    """
    config, layout, network = experiment.config, experiment.plan.layout, cluster.network()
    device, steps = cluster.compute(layout.shape.num_devices), experiment.batches.accumulation
    copied = 6 * experiment.plan.compute_dtype.itemsize * sum(gathered_values(experiment).values())
    compute_s += steps * copied / device.memory_bandwidth
    seconds = {
        use: [network.transfer_s(level, sent) for level, sent in levels.items()]
        for use, levels in traffic_by_use(experiment).items()
    }
    if cluster.device.is_shared or config.sharding.overlap == "off" or not layout.gather.by_layer:
        return compute_s + sum(map(sum, seconds.values()))
    all_reduce_s = sum(seconds["replica_all_reduce"])
    in_all = config.compression.delayed or config.local_sgd.streaming
    if not (in_all and layout.optimizer_beyond_gradients):  # hidden by the last backward pass, or by all
        all_reduce_s = max(0.0, all_reduce_s - (1 - forward_share(experiment)) * compute_s / (1 if in_all else steps))
    exposed = "experts", "context", "gradient_scope", "parameter_scope"
    return max(compute_s, *seconds["layers"]) + sum(sum(seconds[use]) for use in exposed) + all_reduce_s


def traffic(experiment: Experiment) -> Mapping[str, float]:
    """Returns the bytes that a device sends per step on each level, by the formulas of docs/concepts.md."""
    by_use = traffic_by_use(experiment).values()
    return {level: sum(sent[level] for sent in by_use) for level in ("inter", "intra")}


def traffic_by_use(experiment: Experiment) -> Mapping[str, Mapping[str, float]]:
    """Returns bytes by use: gathers and reduce-scatters of layers, wider scopes, replica all-reduce, tokens, heads."""
    config, layout = experiment.config, experiment.plan.layout
    codecs, steps = config.compression, experiment.batches.accumulation
    num_trained = experiment.model.num_trained / layout.shape.tensor
    trained = gathered_values(experiment, only_trained=True)
    item = experiment.plan.compute_dtype.itemsize
    uses = ("layers", "gradient_scope", "parameter_scope", "replica_all_reduce", "experts", "context")
    sent = {use: {"inter": 0.0, "intra": 0.0} for use in uses}

    def add(use: str, axes: tuple[str, ...], values: float, times: float, inter_item: float, intra_item: float) -> None:
        """Counts a gather or a scatter of `values` over `axes`: once between nodes, then inside them."""
        inter, intra = layout.shape.size(inter_part(axes)), layout.shape.size(intra_part(axes))
        sent[use]["inter"] += times * inter_item * values / intra * (inter - 1) / inter
        sent[use]["intra"] += times * intra_item * values * (intra - 1) / intra

    gather = [min(item, CODEC_BYTES.get(codec, 0.0)) for codec in (codecs.all_gather_inter, codecs.all_gather_intra)]
    reduce_scatter = [
        min(item, CODEC_BYTES.get(codec, 0.0)) for codec in (codecs.reduce_scatter_inter, codecs.reduce_scatter_intra)
    ]
    policy = layout.gather
    for held, gathered in gathered_values(experiment).items():
        inside = layout.shape.size(intra_part(beyond(held, layout.parameters)))
        for part, times in ((policy.each_step, 1), (policy.each_micro_step, steps), (policy.each_use, 2 * steps)):
            if part:
                axes = beyond(held, part(layout.parameters))
                share, moved = layout.shape.size(intra_part(axes)) / inside, trained.get(held, 0.0)
                add("layers", axes, moved * share, times, *gather)
                add("layers", axes, (gathered - moved) * share, times, item, item)  # frozen: without a codec
                add("layers", axes, moved * share, steps, *reduce_scatter)
    if isinstance(config.model, MoeConfig) and not config.model.capacity_factor:
        for level, (tokens, routing) in _sent_to_all(experiment).items():
            codec = min(item, CODEC_BYTES.get(getattr(codecs, f"experts_{level}"), 0.0))
            sent["experts"][level] += steps * (codec * tokens + 4 * routing)
    elif isinstance(config.model, MoeConfig):
        for level, axes in (("inter", inter_part(layout.experts)), ("intra", intra_part(layout.experts))):
            codec = min(item, CODEC_BYTES.get(getattr(codecs, f"experts_{level}"), 0.0))
            size = layout.shape.size(axes)
            direct = 1 if level == "inter" or layout.hierarchical else layout.shape.size(inter_part(layout.experts))
            sent["experts"][level] += steps * codec * _sent_tokens(experiment) * (size - 1) / size / direct
    if layout.context_axes:
        add("context", layout.context_axes, _sent_heads(experiment), steps, item, item)
    shards = layout.shape.size(layout.parameters)
    add("gradient_scope", layout.gradients_beyond_parameters, num_trained / shards, steps, *reduce_scatter)
    all_reduce = CODEC_BYTES.get(codecs.all_reduce, 0.0)  # other methods' sizes depend on the tensors
    values, per_step = num_trained / layout.shape.size(layout.gradients), 1 / max(1, config.local_sgd.inner_steps)
    add("replica_all_reduce", layout.replica_axes, values, per_step, all_reduce, all_reduce)
    add("replica_all_reduce", layout.all_reduced_axes, values, per_step, all_reduce, all_reduce)
    updated = (
        CODEC_BYTES.get(codec, 0.0) for codec in (codecs.weight_differences_inter, codecs.weight_differences_intra)
    )
    add("parameter_scope", layout.optimizer_beyond_parameters, num_trained / shards, 1, *updated)
    return sent


def _sent_heads(experiment: Experiment) -> float:
    """Returns the values, its own included, that a device passes to the all-to-alls over heads per micro-step."""
    config, model = experiment.config, experiment.model.config
    assert isinstance(model, TransformerConfig)
    heads = model.num_heads + getattr(model, "num_kv_heads", model.num_heads)
    positions = experiment.batches.config.micro_size * config.data.seq_len / config.mesh.context
    return (2 if model.remat == "none" else 3) * 2 * heads * model.head_size * positions * model.num_layers


def _sent_to_all(experiment: Experiment) -> Mapping[str, tuple[float, float]]:
    """Returns the values of tokens and of their routing that a device sends per micro-step, by level.

    Without a capacity, tokens are gathered over the experts' scope, and their sums are sent back (sharding/experts.py).
    The last layer is counted as with overlap, which does not recompute it.
    """
    model, layout = experiment.model.config, experiment.plan.layout
    assert isinstance(model, MoeConfig)
    nodes, inside = (layout.shape.size(part(layout.experts)) for part in (inter_part, intra_part))
    gather = back = {"inter": nodes - 1, "intra": nodes * (inside - 1)}
    if not layout.hierarchical:
        ring = nodes * inside - 1
        gather = {"inter": ring / inside, "intra": ring * (inside - 1) / inside}
        back = {"inter": (nodes - 1) * inside, "intra": inside - 1}
    layers = model.num_moe_layers
    gathers = 2 * layers - 1 if model.remat == "full" else layers
    tokens = experiment.batches.config.micro_size * experiment.config.data.seq_len
    return {
        level: (
            tokens * model.hidden * ((gathers + layers) * gather[level] + 2 * layers * back[level]),
            tokens * 2 * model.experts_per_token * (gathers * gather[level] + layers * back[level]),
        )
        for level in ("inter", "intra")
    }


def _sent_tokens(experiment: Experiment) -> float:
    """Returns the values, its own included, that a device passes to the exchange of tokens per micro-step.

    These are the slots of its rows at all experts, there and back, forward and backward, and once more if the backward
    pass recomputes the whole layer. The last layer is counted as with overlap, which does not recompute it. Without
    overlap its slots are exchanged twice more.
    """
    model = experiment.model.config
    assert isinstance(model, MoeConfig)
    slots = model.num_experts * model.capacity(experiment.config.data.seq_len)
    times = 6 * model.num_moe_layers - 2 if model.remat == "full" else 4 * model.num_moe_layers
    return times * experiment.batches.config.micro_size * slots * model.hidden
