"""The replayed steps of full_scale.jsonl, and what the systems of the MiCS paper make of them.

Our programs overlap traffic with compute; DeepSpeed's did not, or did so in part. What is known of them is applied here
to replays of our programs. The network is fitted to the paper's all-gathers (network.py), nothing to a training step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.paper import published
from lab.paper.records import Line, Records
from planner.clusters import CLUSTERS, H100

P3DN, P4D = "p3dn.24xlarge", "p4d.24xlarge"
PLANNER, PAPER = "planner", "figure 2"  # networks: the planner's own figures, and the paper's measurements
BUCKET = 5e8  # values: DeepSpeed's reduce_bucket_size and allgather_bucket_size
LIVE = 1e9  # values: DeepSpeed's stage3_max_live_parameters
HALF = 2  # bytes of fp16
V100 = CLUSTERS[P3DN].device
USABLE_BYTES = CLUSTERS[P3DN].usable_bytes(16)  # of a V100, by a program
PRODUCTS = V100.matmul_fraction * V100.peak_flops["bf16"] / 1e12  # TFLOP/s that its matrix products are taken to reach
FAST_PRODUCTS = round(H100.matmul_fraction * V100.peak_flops["bf16"] / 1e12)  # the same at the share of an H100


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its micro-batch."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    rows: int  # of a micro-batch
    seq_len: int = 512

    @property
    def num_params(self) -> float:
        """12 L h² + V h."""
        return 12 * self.layers * self.hidden**2 + self.vocab * self.hidden

    @property
    def activation_bytes(self) -> float:
        """What is kept of the layers, one layer computed again (arXiv 2205.05198), and the logits in fp16 and f32."""
        tokens = self.rows * self.seq_len
        kept = HALF * self.layers * tokens * self.hidden
        layer = 34 * tokens * self.hidden + 5 * self.heads * tokens * self.seq_len
        return kept + layer + (HALF + 4) * tokens * self.vocab

    def tflops(self, sequences_per_s: float, gpus: int) -> float:
        """Returns TFLOP/s of a GPU by the paper's formula (section 5.1.1), recomputation counted."""
        rest = 1 + self.seq_len / (6 * self.hidden) + self.vocab / (16 * self.layers * self.hidden)
        return 96 * sequences_per_s * self.seq_len * self.layers * self.hidden**2 * rest / gpus / 1e12


BERT_LARGE = Shape(hidden=1024, layers=24, heads=16, vocab=30528, rows=16)


def table_1(model: str) -> dict[str, int]:
    """Returns what the paper's table 1 says of a model: hidden, intermediate, layers, heads, vocabulary, ..."""
    return {one.system: int(one.value or 0) for one in published.find("MiCS", "table 1", case=model)}


def shape_of(model: str, rows: int = 8, **changes: int) -> Shape:
    """Returns the shape of a model of table 1 with so many rows in a micro-batch, and with changed sizes."""
    sizes = table_1(model)
    shape = {key: sizes[key] for key in ("hidden", "layers", "heads")} | {"vocab": sizes["vocabulary"]}
    return Shape(rows=rows, **(shape | changes))


def zero2_bytes(shape: Shape, gpus: int) -> float:
    """Returns what DeepSpeed's ZeRO-2 needs of a GPU: state, activations, a bucket to reduce and one to gather."""
    return 2 * shape.num_params + 14 * shape.num_params / gpus + shape.activation_bytes + 2 * HALF * BUCKET


def zero3_bytes(shape: Shape, gpus: int) -> float:
    """Returns what DeepSpeed's ZeRO-3 needs of a GPU: state, activations, a bucket, and live parameters."""
    return 16 * shape.num_params / gpus + shape.activation_bytes + HALF * (BUCKET + LIVE)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A compiled step replayed on a cluster; seconds of a step, bytes of a device."""

    gpus: int
    accumulation: int
    global_size: int
    num_params: int
    memory: Mapping[str, float]
    bucket_s: Mapping[str, float]  # of all GPUs' all-reduce, reduce-scatter of `BUCKET` gradients
    compute_s: float
    step_s: float
    uses: Mapping[str, Mapping[str, float]]  # by "label, level"

    def busy_s(self, *labels: str) -> float:
        """Returns how long the network is busy with collectives of these labels, all if none is given."""
        return self._sum("busy_s", labels)

    def hidden_s(self, *labels: str) -> float:
        """Returns what of that the compute hides."""
        return self._sum("busy_s", labels) - self._sum("exposed_s", labels)

    def _sum(self, what: str, labels: Sequence[str]) -> float:
        return sum(use[what] for key, use in self.uses.items() if not labels or key.partition(",")[0] in labels)

    def buckets_s(self, kind: str) -> float:
        """Returns how long all gradients take in buckets of `BUCKET` values, once in each micro-step."""
        return self.accumulation * self.num_params / BUCKET * self.bucket_s[kind]

    def rate(self, step_s: float | None = None) -> float:
        """Returns sequences a second, of a step of `step_s` if given."""
        return self.global_size / (step_s or self.step_s)

    @property
    def total_bytes(self) -> float:
        """What the program needs of a device."""
        return needs(self.memory)

    @property
    def fits(self) -> bool:
        """Whether a device can have so much."""
        return fits(self.memory)


def needs(memory: Mapping[str, float]) -> float:
    """Returns the bytes that a program needs of a device."""
    return sum(count for part, count in memory.items() if part != "capacity")


def fits(memory: Mapping[str, float]) -> bool:
    """Returns whether a device can have so much."""
    return needs(memory) <= memory["capacity"]


def find(
    records: Records, model: str, gpus: int, strategy: str, *, cluster: str = P3DN, network: str = PAPER
) -> Replay:
    """Returns the newest replay of a model's step. ValueError if there is none."""
    key: dict[str, Any] = {"model": model, "gpus": gpus, "strategy": strategy, "cluster": cluster, "network": network}
    lines = records.lines("full_scale", **key)
    if not lines:
        raise ValueError(
            f"lab/benchmarks/results/derived/full_scale.jsonl has no {model}, {strategy}, on {gpus} GPUs of {cluster} "
            f"(network: {network}): python -m lab.benchmarks.full_scale"
        )
    return of_line(lines[-1])


def of_line(line: Line) -> Replay:
    """Returns the replay of a line of the record."""
    return Replay(**{key: line[key] for key in Replay.__dataclass_fields__})


def zero3_s(flat: Replay) -> float:
    """Returns the step of DeepSpeed's ZeRO-3 of 2021, from our flat program: nothing overlaps, gradients in buckets.

    Each micro-step all-reduced all gradients, DeepSpeed's default then (MiCS, section 3.4).
    """
    return flat.compute_s + flat.busy_s() - flat.busy_s("hop_one") + flat.buckets_s("all-reduce")


def zero2_s(flat: Replay) -> float:
    """Returns the step of DeepSpeed's ZeRO-2, from our flat program, whose parameters are gathered in f32, not fp16."""
    return flat.compute_s + flat.busy_s() - flat.busy_s("parameter_scope") / 2


def nothing_hidden_s(mics: Replay) -> float:
    """Returns the step of a program if nothing overlapped."""
    return mics.compute_s + mics.busy_s()


def gradients_exposed_s(mics: Replay) -> float:
    """Returns the step of a MiCS that hides gathers like ours, but no sum of gradients (AMSP, section 9)."""
    return mics.step_s + mics.hidden_s("hop_one", "hop_two")


def slowdown(records: Records, program: str) -> float:
    """Returns our replay's TFLOP/s on one V100 over a published program's, at most: gains are given as "up to"."""
    return one_gpu(records) / published_on_one_gpu()[program]


def one_gpu(records: Records) -> float:
    """Returns TFLOP/s of BERT-large replayed on one V100, by the paper's formula."""
    return BERT_LARGE.tflops(find(records, "BERT large", 1, "mics(1)").rate(), gpus=1)


def published_on_one_gpu() -> dict[str, float]:
    """Returns TFLOP/s of BERT-large on one V100 by program: DeepSpeed's, and what it gives a gain over."""
    cells = published.find("DeepSpeed", "BERT-large on a V100")
    ours = next(one.value or 0.0 for one in cells if one.unit == "TFLOP/s")
    return {one.system: ours / (one.value or 1.0) if one.unit == "x" else ours for one in cells}
