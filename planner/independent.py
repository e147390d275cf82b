"""What a step takes as independent replicas (`sharding.replicas`), from the program of one world.

A replica's programs are those of one world without hop two. Its gradients are copied to the host, travel while the last
backward pass goes on, and their totals are copied back before the update (training/share_gradients.py). The program
with its callbacks compiles only where its devices are, so this is not a replay of it.
"""

from dataclasses import dataclass

from metrics.units import format_bytes, format_seconds
from planner.predict import Step
from replicas.payloads import PAYLOADS, PIECES, make_payload

PAGE = "docs/replicas.md"


@dataclass(frozen=True, kw_only=True)
class Independent:
    """A step of independent replicas."""

    step_s: float
    sent_bytes: float  # by a node
    sending_s: float
    hidden_s: float  # of that, beside the last backward pass


def independent(step: Step) -> Independent | None:
    """Returns the step of a program's replicas as worlds of their own; None where they cannot be."""
    config, layout = step.experiment.config, step.experiment.plan.layout
    per_node, group = layout.shape.devices_per_node, layout.shape.size(layout.parameters)
    shared = config.mesh.tensor * config.mesh.stages * config.mesh.context
    is_later = config.compression.delayed or config.local_sgd.inner_steps
    if layout.num_replicas == 1 or group % per_node or shared > 1 or is_later:
        return None
    if config.compression.hop_two not in PAYLOADS or layout.is_automatic:
        return None
    timeline, network = step.timeline(), step.machine.cluster.network()
    values = step.experiment.model.num_trained * per_node / group  # of a node
    payload = make_payload(config.compression.hop_two, config.compression.block)
    sent_bytes = 2 * (1 - 1 / layout.num_replicas) * values * payload.bytes_per_value
    sending_s = sent_bytes / network.node_bandwidth
    backward = 3 / 4 if config.model.remat == "full" else 2 / 3
    window_s = backward * timeline.compute_s / step.experiment.batches.accumulation
    exposed_s = max(sending_s - window_s, sending_s / PIECES)  # the last piece comes when the backward pass is over
    copies_s = 2 * 4 * values / per_node / step.machine.cluster.device.copy_bandwidth
    return Independent(
        step_s=timeline.step_s - timeline.use("hop_two").exposed_s + exposed_s + copies_s,
        sent_bytes=sent_bytes,
        sending_s=sending_s,
        hidden_s=sending_s - exposed_s,
    )


def independent_text(step: Step, step_s: float) -> list[str]:
    """Returns a note of the step as independent replicas beside that of one world, if they can be."""
    if (found := independent(step)) is None:
        return []
    than = "less" if found.step_s < step_s else "more"
    return [
        f"as independent replicas ({PAGE}) a step takes {format_seconds(found.step_s)}, {than} than in one world: each "
        f"node sends {format_bytes(found.sent_bytes)} in {format_seconds(found.sending_s)}, "
        f"{format_seconds(found.hidden_s)} of it beside the last backward pass"
    ]
