"""Steps whose loops over layers are pipelined, and their bytes between nodes."""

import numpy as np

from sharding.hlo import Collective
from sharding.mesh import INTER_AXES
from support import workload

STRATEGIES = {
    "ddp": dict(strategy="ddp"),
    "hsdp": dict(strategy="hsdp"),
    # the replica all-reduce reduce-scatters over all devices, over the nodes, or inside the node and all-reduces
    # between nodes
    "zero1": dict(strategy="zero1"),
    "node/node/all": dict(strategy="custom", parameters="node", gradients="node", optimizer="all"),
    "none/none/node": dict(strategy="custom", parameters="none", gradients="none", optimizer="node"),
    # the gradients of each micro-step are cut further than the parameters before the replica all-reduce
    "none/node/node": dict(strategy="custom", parameters="none", gradients="node", optimizer="node"),
    "none/node/all": dict(strategy="custom", parameters="none", gradients="node", optimizer="all"),
    "2/4/8": dict(strategy="custom", parameters="2", gradients="4", optimizer="8"),
    **{f"mics({p})": dict(strategy="mics", partition_size=p) for p in (1, 2, 4)},
}


def losses(kind: str, strategy: str, accumulation: int) -> np.ndarray:
    """The losses of five steps with the replica all-reduce in the last backward pass."""
    plan = workload.plan(kind, overlap=True, **STRATEGIES[strategy])
    return workload.losses(kind, plan, accumulation=accumulation, timing=workload.in_micro_steps(plan, "none"))


def crossing(collectives: list[Collective]) -> list[Collective]:
    return [c for c in collectives if c.label == "replica_all_reduce" and set(c.axes) & set(INTER_AXES)]
