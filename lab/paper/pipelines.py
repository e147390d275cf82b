"""MiCS figure 11, pipelines and partition groups: the paper's comparison, and the bytes of ours by formula."""

from collections.abc import Sequence
from dataclasses import dataclass

from files.pages import markdown
from lab.paper.replays import HALF, Shape, shape_of
from lab.paper.scores import NONE

NODES, K = 8, 8  # p3dn.24xlarge: 8 V100
GLOBAL_BATCH, ROWS = 8192, 8
FULL = 4  # bytes of a value in hop two and in the optimizer's state
STATE = 16  # bytes a parameter: parameter, gradient and two moments, all f32
DEEP, DEEP_LAYERS = "BERT 10B, 128 layers", 128  # of figure 11: stages divide them; table 1 has 127
# model: stages and the partition group inside each, both with the same devices to a copy of the model, or fewer groups
COMPARED = {
    DEEP: ((1, 8), (2, 8), (4, 8), (8, 8)),
    "BERT 15B": ((1, 16), (2, 8)),
    "BERT 20B": ((1, 16), (2, 8), (4, 8)),
    "BERT 50B": ((1, 64), (2, 32)),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model on nodes: `stages` of a pipeline (1: none), inside each mics(`group`), and `accum` micro-steps."""

    shape: Shape
    nodes: int
    stages: int
    group: int
    accum: int
    per_node: int = K

    @property
    def ticks(self) -> int:
        """The times that a stage runs forward, and backward, in a step."""
        return self.accum + self.stages - 1

    @property
    def work(self) -> float:
        """The operations of a step, copies in the bubble included, over those of a step without a pipeline.

        A layer runs forward, backward (twice as much) and forward again to recompute; in a pipeline forward once more.
        """
        return 1.0 if self.stages == 1 else self.ticks / self.accum * 5 / 4

    @property
    def layers(self) -> float:
        """The parameters of a stage's layers."""
        return 12 * self.shape.layers * self.shape.hidden**2 / self.stages

    @property
    def ends(self) -> float:
        """The parameters that are on every stage: the embedding, which is the head's weight too."""
        return self.shape.vocab * self.shape.hidden

    @property
    def replicas(self) -> int:
        """Partition groups of a stage."""
        return self.nodes * self.per_node // (self.stages * self.group)

    @property
    def gathers(self) -> float:
        """Bytes that a node sends to others a step in gathers and hop one: (p-k)M/p in each pass over the model."""
        of_layers, of_ends = (3, 2) if self.stages == 1 else (4, 3)
        beyond = max(0, self.group - self.per_node) / self.group
        return HALF * self.ticks * beyond * (of_layers * self.layers + of_ends * self.ends)

    @property
    def hop_two(self) -> float:
        """Bytes that a node sends a step in hop two: 2 (M/p) (R-1)/R of each device."""
        shard = FULL * (self.layers + self.ends) / self.group
        return 2 * self.per_node * shard * (self.replicas - 1) / self.replicas

    @property
    def between_stages(self) -> float:
        """Bytes that a node sends a step to other stages, the mean of all: activations, and the sum of the ends."""
        hand_on = self.shape.rows * self.shape.seq_len * self.shape.hidden * HALF
        total = 2 * self.ticks * hand_on + 2 * FULL * self.ends / self.group
        return self.per_node * total * (self.stages - 1) / self.stages

    @property
    def link_bytes(self) -> float:
        """All bytes that a node sends to others a step."""
        return self.gathers + self.hop_two + self.between_stages

    @property
    def state_bytes(self) -> float:
        """The model state of a device."""
        return STATE * (self.layers + self.ends) / self.group

    @property
    def kept_bytes(self) -> float:
        """What a device keeps for the backward pass: layers' inputs, and those of 2 S - 3 micro-batches."""
        kept = self.shape.layers / self.stages + (2 * self.stages - 3 if self.stages > 1 else 0)
        return kept * self.shape.rows * self.shape.seq_len * self.shape.hidden * HALF


def run_of(model: str, stages: int, group: int) -> Run:
    """Returns a run of a model of the paper with its global batch and micro-batch."""
    layers = {"layers": DEEP_LAYERS} if model == DEEP else {}
    return Run(
        shape=shape_of(model.partition(",")[0], rows=ROWS, **layers),
        nodes=NODES,
        stages=stages,
        group=group,
        accum=GLOBAL_BATCH // (ROWS * K * NODES // stages),
    )


def formulas() -> str:
    """Returns what a node sends per step with and without a pipeline, and what that costs and keeps."""
    rows = [_line(model, run_of(model, *way)) for model, ways in COMPARED.items() for way in ways]
    head = ["GB", "gathers, hop one", "hop two", "between stages", "all", "work"]
    return markdown([*head, "GB of state", "GB kept"], rows)


def _line(model: str, run: Run) -> Sequence[str]:
    sent = [run.gathers, run.hop_two, run.between_stages]
    name = f"mics({run.group})" if run.stages == 1 else f"{run.stages} stages of mics({run.group})"
    return [
        f"{model}: {name}",
        *(f"{count / 1e9:,.1f}" if count else NONE for count in sent),
        f"{run.link_bytes / 1e9:,.1f}",
        f"{run.work:.2f}",
        f"{run.state_bytes / 1e9:.1f}",
        f"{run.kept_bytes / 1e9:.2f}",
    ]
