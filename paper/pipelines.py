"""MiCS figure 11, pipelines beside partition groups: the paper's comparison, and the bytes of ours by formula."""

from collections.abc import Sequence
from dataclasses import dataclass

from paper import published
from paper.mics_memory import HALF, Shape
from paper.records import Records
from paper.tables import NONE, Section, fixed, table

NODES, K = 8, 8  # p3dn.24xlarge: 8 V100
LINK_BYTES_PER_S = 100e9 / 8
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
    def bubble(self) -> float:
        """The share of a step in which a stage has no micro-batch: (S-1)/(A+S-1)."""
        return (self.stages - 1) / self.ticks

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
    hidden, _, layers, heads, vocab, _ = published.TABLE_1_SHAPES[model.partition(",")[0]]
    layers = DEEP_LAYERS if model == DEEP else layers
    assert hidden and layers and heads and vocab
    return Run(
        shape=Shape(hidden=hidden, layers=layers, heads=heads, vocab=vocab, rows=ROWS),
        nodes=NODES,
        stages=stages,
        group=group,
        accum=GLOBAL_BATCH // (ROWS * K * NODES // stages),
    )


def section(records: Records) -> Section:
    """Returns the section."""
    del records
    return Section(
        title="MiCS figure 11: pipelines",
        blocks=[
            f"{published.MICS}. Sequences a second on V100 of p3dn.24xlarge, global batch 4096: Megatron-LM-3D with "
            "T-way tensor and S-way pipeline parallelism, and MiCS with groups of 8. Where the layers are wide, "
            "Megatron's best is as fast; elsewhere MiCS is 30 to 33 % faster.",
            _published(),
            f"What a pipeline over nodes (`mesh.stages`) would send there, **by formula**: {NODES} nodes of {K}, "
            f"global batch {GLOBAL_BATCH}, micro-batch {ROWS}, sequences of 512; gathers, hop one and activations in "
            f"{HALF} bytes a value, hop two and the sum of the embedding's gradients in {FULL}. GB a step that a node "
            "sends, and the seconds that they take at the line rate of 100 Gbit/s; *work* is the operations of a step, "
            "over those without a pipeline; *state* is 16 bytes a parameter, *kept* the inputs for the backward pass. "
            "127 layers (BERT 10B in table 1) no number of stages divides, so 128, as in figure 11; 190 and 62 only 2.",
            _formulas(),
        ],
    )


def _published() -> str:
    rows = []
    for model, by_gpus in published.FIGURE_11.items():
        for gpus, mics in by_gpus.items():
            megatron = [published.FIGURE_11_MEGATRON[model][way][gpus] for way in published.MEGATRON_WAYS]
            cells = [fixed(2)(value) for value in (*megatron, mics)]
            rows.append([f"{model}, {gpus} GPUs", *cells, f"{100 * (mics / max(megatron) - 1):+.1f} %"])
    ways = [f"T = {tensor}, S = {stages}" for tensor, stages in published.MEGATRON_WAYS]
    return table(["", *ways, "MiCS", "MiCS over the best"], rows)


def _formulas() -> str:
    rows = [_line(model, run_of(model, *way)) for model, ways in COMPARED.items() for way in ways]
    head = ["", "gathers, hop one", "hop two", "between stages", "all", "at 100 Gbit/s", "bubble", "work", "state",
            "kept"]  # fmt: skip
    return table(head, rows)


def _line(model: str, run: Run) -> Sequence[str]:
    sent = [run.gathers, run.hop_two, run.between_stages]
    cells = [fixed(1)(count / 1e9) if count else NONE for count in sent]
    name = f"mics({run.group})" if run.stages == 1 else f"{run.stages} stages of mics({run.group})"
    return [
        f"{model}: {name}",
        *cells,
        fixed(1, " GB")(run.link_bytes / 1e9),
        fixed(1, " s")(run.link_bytes / LINK_BYTES_PER_S),
        fixed(1, " %")(100 * run.bubble) if run.stages > 1 else NONE,
        fixed(2, " x")(run.work),
        fixed(1, " GB")(run.state_bytes / 1e9),
        fixed(2, " GB")(run.kept_bytes / 1e9),
    ]
