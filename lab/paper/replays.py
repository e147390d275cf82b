"""The replayed steps of full_scale.jsonl, and the throughput of the MiCS paper's systems derived from them.

The systems are DeepSpeed's: `deepspeed_s` of a line is the planner's `--as=deepspeed`, without overlap. This module
corrects for the differences between our programs and the collectives of DeepSpeed's ZeRO-2 and ZeRO-3. The network is
fitted to the paper's all-gathers; nothing is fitted to a training step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lab.paper import published
from lab.records import Line, Records
from planner.clusters import CLUSTERS

P3DN, P4D = "p3dn.24xlarge", "p4d.24xlarge"
PLANNER, PAPER = "planner", "figure 2"  # networks: the planner's own figures, and the paper's measurements
BUCKET = 5e8  # values: DeepSpeed's reduce_bucket_size and allgather_bucket_size
LIVE = 1e9  # values: DeepSpeed's stage3_max_live_parameters
HALF = 2  # bytes of fp16
MATRICES = 6  # in a BERT layer: queries, keys, values, attention output, two in the MLP
USABLE_BYTES = CLUSTERS[P3DN].usable_bytes(16)  # of a V100, usable by a program
# The paper's network: the least squares of figure 2's all-gathers (a ring of n GPUs passes n - 1 chunks, one a node
# between nodes, the others with NCCL's latency), and section 3.2's B_part inside a node
LINK_LATENCY_S, LINK_BYTES_PER_S, INSIDE_BYTES_PER_S = 718e-6, 12.299e9, 128e9


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its micro-batch."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    rows: int  # per micro-batch
    seq_len: int = 512

    @property
    def num_params(self) -> float:
        """12 L h² + V h."""
        return 12 * self.layers * self.hidden**2 + self.vocab * self.hidden

    @property
    def activation_bytes(self) -> float:
        """Stored inputs of the layers, one recomputed layer (arXiv 2205.05198), and the logits in fp16 and f32."""
        tokens = self.rows * self.seq_len
        kept = HALF * self.layers * tokens * self.hidden
        layer = 34 * tokens * self.hidden + 5 * self.heads * tokens * self.seq_len
        return kept + layer + (HALF + 4) * tokens * self.vocab


def table_1(model: str) -> dict[str, int]:
    """Returns a model's sizes in the paper's table 1: hidden, intermediate, layers, heads, vocabulary, ..."""
    return {one.system: int(one.value or 0) for one in published.find("MiCS", "table 1", case=model)}


def shape_of(model: str, rows: int = 8) -> Shape:
    """Returns the shape of a model of table 1 with `rows` rows in a micro-batch."""
    sizes = table_1(model)
    shape = {key: sizes[key] for key in ("hidden", "layers", "heads")} | {"vocab": sizes["vocabulary"]}
    return Shape(rows=rows, **shape)


def zero2_bytes(shape: Shape, gpus: int) -> float:
    """Returns the bytes per GPU of DeepSpeed's ZeRO-2: state, activations, a reduce and a gather bucket."""
    return 2 * shape.num_params + 14 * shape.num_params / gpus + shape.activation_bytes + 2 * HALF * BUCKET


def zero3_bytes(shape: Shape, gpus: int) -> float:
    """Returns the bytes per GPU of DeepSpeed's ZeRO-3: state, activations, a bucket, and live parameters."""
    return 16 * shape.num_params / gpus + shape.activation_bytes + HALF * (BUCKET + LIVE)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A compiled step replayed on a cluster; seconds of a step, bytes of a device."""

    gpus: int
    accumulation: int
    global_size: int
    num_params: int
    memory: Mapping[str, float]
    bucket_s: float  # an all-reduce of `BUCKET` gradients over all GPUs
    latency_s: float  # an all-gather of a few bytes over all GPUs
    step_s: float  # our schedule
    deepspeed_s: float  # nothing hidden
    uses: Mapping[str, Mapping[str, float]]  # by "label, level"

    def network(self, what: str, *labels: str) -> float:
        """Returns the network's "busy_s" or "exposed_s" seconds for these labels, or the number of "times"."""
        return sum(use[what] for key, use in self.uses.items() if key.partition(",")[0] in labels)

    def rate(self, step_s: float | None = None) -> float:
        """Returns sequences a second, of a step of `step_s` if given."""
        return self.global_size / (step_s or self.step_s)

    @property
    def total_bytes(self) -> float:
        """The bytes of device memory that the program needs."""
        return sum(count for part, count in self.memory.items() if part != "capacity")

    @property
    def fits(self) -> bool:
        """Whether the program fits a device."""
        return self.total_bytes <= self.memory["capacity"]


def find(
    records: Records, model: str, gpus: int, strategy: str, *, cluster: str = P3DN, network: str = PAPER
) -> Replay:
    """Returns the replay of a model's step. ValueError if it is not recorded."""
    key = {"model": model, "gpus": gpus, "strategy": strategy, "cluster": cluster, "network": network}
    return of_line(records.line("full_scale", **key))


def of_line(line: Line) -> Replay:
    """Returns the replay of a line of the record."""
    return Replay(**{key: line[key] for key in Replay.__dataclass_fields__})


def one_hop_s(replay: Replay) -> float:
    """Returns the step if each micro-step all-reduced all gradients in buckets, DeepSpeed's default (MiCS, 3.4)."""
    buckets_s = replay.accumulation * replay.num_params / BUCKET * replay.bucket_s
    return replay.deepspeed_s - replay.network("busy_s", "group_reduce_scatter", "replica_all_reduce") + buckets_s


def zero3_s(flat: Replay) -> float:
    """Returns the step of DeepSpeed's ZeRO-3 of 2021, from our flat program, which gathers a layer at once.

    It fetched each submodule's parameters when the submodule began, and waited (deepspeedai/DeepSpeed#1188): one gather
    per matrix.
    """
    return one_hop_s(flat) + (MATRICES - 1) * flat.network("times", "gather") * flat.latency_s


def zero2_s(flat: Replay) -> float:
    """Returns the step of DeepSpeed's ZeRO-2, from our flat program, whose parameters are gathered in f32, not fp16."""
    return flat.deepspeed_s - flat.network("busy_s", "parameter_scope") / 2
