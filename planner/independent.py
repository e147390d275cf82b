"""Time of a step with independent replicas (`sharding.replicas`), from the program of one world.

A replica's programs are the programs of one world without the replica all-reduce. Its gradients are copied to host
memory that is not pinned, and sent during the last backward pass. Their totals are copied back before the update
(training/gradient_units.py). The program with callbacks compiles only on its own devices, so it is not replayed.
"""

from dataclasses import dataclass, replace

from configs.schema.codecs import TABLE
from configs.schema.combinations import complaint
from elastic.replicas.payloads import PIECES
from planner.bounds import forward_share
from planner.predict import Prediction, ReplayableStep, StepTraffic
from training.metrics.units import format_bytes, format_seconds
from training.round_units import of_workers, state_payload

PAGE = "docs/replicas.md"
AS_REPLICAS = {"sharding.replicas": "independent", "compression.error_feedback": False}


@dataclass(frozen=True, kw_only=True)
class IndependentStep:
    """A step of independent replicas."""

    step_s: float
    sent_bytes: float  # per node
    sending_s: float
    hidden_s: float  # part of `sending_s` that overlaps with the last backward pass


def independent(step: ReplayableStep, shares: int = 1) -> IndependentStep | None:
    """Returns the step of a program's replicas as separate worlds, or None if they cannot be separate.

    Each replica has `shares` work units, a power of two: other numbers are not a subtree and are sent in several parts.
    With local SGD the result is the mean over the steps from one sync to the next.
    """
    config, layout, batches = step.experiment.config, step.experiment.plan.layout, step.experiment.batches
    per_node, group = layout.shape.devices_per_node, layout.shape.size(layout.parameters)
    if layout.num_replicas == 1 or group % per_node or complaint(config.values | AS_REPLICAS):
        return None
    if not layout.parameters == layout.gradients == layout.optimizer:
        return None
    rows = shares * layout.shape.num_data_devices * batches.config.micro_size
    if batches.global_size % rows:  # `training.batches.shares_of` refuses
        return None
    timeline, network, local = step.timeline(), step.machine.cluster.network(), config.local_sgd.inner_steps
    values = float(step.experiment.model.num_trained)
    travel = [(values, TABLE[config.compression.all_reduce].bytes_per_value(config.compression.block))]
    if local:  # the mean of the optimizer states is sent, too
        kept = of_workers(step.experiment.state_shapes.opt_state) / layout.num_replicas
        travel.append((kept, state_payload(config).bytes_per_value))
        values += kept
    # one work unit is sent encoded, several as their sum in f32 (elastic/replicas/sums.py); totals return encoded
    out = lambda each: each if shares == 1 else min(shares * each, 4)
    there_and_back = sum(count * (out(each) + each) for count, each in travel)
    sent_bytes = (1 - 1 / layout.num_replicas) * there_and_back * per_node / group  # per node
    sending_s = sent_bytes / network.node_bandwidth
    compute_s = timeline.compute_s / batches.accumulation
    # hidden by the backward pass of the last micro-step, except the last piece; if delayed, by the whole next step
    hides_s = min((1 - forward_share(step.experiment)) * compute_s, sending_s * (1 - 1 / PIECES))
    hidden_s = min(timeline.compute_s, sending_s) if config.compression.delayed else 0.0 if local else hides_s
    device, together = step.machine.cluster.device, step.machine.num_devices
    copies = shares + 1  # all work units to the host, and the totals to the devices
    copies_s = copies * 4 * values / group / device.unpinned_bandwidth * (together if device.is_shared else 1)
    alone_s = timeline.step_s - timeline.use("replica_all_reduce").exposed_s
    return IndependentStep(
        step_s=alone_s + (sending_s - hidden_s + copies_s) / max(local, 1),
        sent_bytes=sent_bytes,
        sending_s=sending_s,
        hidden_s=hidden_s,
    )


def independent_prediction(step: ReplayableStep, one_world: Prediction) -> Prediction | None:
    """Returns the prediction of the same step with independent replicas, or None if they cannot be separate."""
    if (found := independent(step)) is None:
        return None
    others = tuple(part for part in one_world.traffic if part.name != "replica_all_reduce")
    exposed_s = found.step_s - one_world.compute_s - sum(part.exposed_s for part in others)
    local = max(1, step.experiment.config.local_sgd.inner_steps)
    sending = StepTraffic(
        name="replica_all_reduce", level="inter", busy_s=max(exposed_s, found.sending_s / local), exposed_s=exposed_s
    )
    gathered = sum(c.inter_bytes * c.times for c in step.collectives if c.label != "replica_all_reduce")
    more = found.step_s / one_world.step_s
    return replace(
        one_world,
        candidate=one_world.candidate.with_extras({"replicas": "independent"}),
        inter_bytes=gathered + found.sent_bytes / step.machine.cluster.devices_per_node,
        traffic=(*others, sending),
        step_s=found.step_s,
        rows_per_s=one_world.rows_per_s / more,
        tokens_per_s=one_world.tokens_per_s and one_world.tokens_per_s / more,
        flops_per_device=one_world.flops_per_device / more,
        mfu=one_world.mfu / more,
        usd_on_demand=one_world.usd_on_demand and one_world.usd_on_demand * more,
        usd_spot=one_world.usd_spot and one_world.usd_spot * more,
    )


def independent_text(step: ReplayableStep, step_s: float, micro_size: int) -> list[str]:
    """Returns a note that compares independent replicas with one world, if the step can have them.

    `micro_size` is the config's value, before it was fitted to the devices.
    """
    if (found := independent(step)) is None:
        return []
    than = "less" if found.step_s < step_s else "more"
    config = step.experiment.config
    meets = f" every {config.local_sgd.inner_steps} steps" if config.local_sgd.inner_steps else ""
    beside = "the next step" if config.compression.delayed else "the last backward pass"
    hidden = "" if meets else f", {format_seconds(found.hidden_s)} of it beside {beside}"
    needs = f" with {', '.join(found_needs)}" if (found_needs := _needs(step, micro_size)) else ""
    return [
        f"as independent replicas ({PAGE}){needs} a step takes {format_seconds(found.step_s)}, {than} than in one "
        f"world: each node sends {format_bytes(found.sent_bytes)} in {format_seconds(found.sending_s)}{meets}{hidden}"
    ]


def _needs(step: ReplayableStep, micro_size: int) -> list[str]:
    """Returns further keys that such a run needs, for one work unit per replica."""
    ex, needs = step.experiment, []
    if ex.config.compression.all_reduce != "none" and ex.config.compression.error_feedback:
        needs.append("compression.error_feedback=False")
    if micro_size != ex.batches.config.micro_size:
        needs.append(f"batch.micro_size={ex.batches.config.micro_size}")
    if ex.batches.accumulation > 1:
        needs.append(f"sharding.shares={ex.plan.layout.num_replicas}")
    return needs
