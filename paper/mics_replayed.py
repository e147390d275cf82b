"""The steps of benchmarks/results/derived/full_scale.jsonl, and what the systems of the MiCS paper make of them.

Our programs overlap; theirs did not, or did so in part. What is known of them is stated here, once, and applied to the
replays of our programs. The network is fitted to the paper's all-gathers (mics_figure_2.py); nothing to a step of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paper.records import Records

P3DN, P4D = "p3dn.24xlarge", "p4d.24xlarge"
PLANNER, PAPER = "planner", "figure 2"  # networks: the planner's own figures, and the paper's measurements
DEEPSPEED = (
    "DeepSpeed's ZeRO-3 of 2021 is our flat ZeRO-3 program with two changes. Nothing overlaps, so that a step is the "
    "compute and all that the network is busy. And each micro-step all-reduces the gradients, as was DeepSpeed's "
    "default then (MiCS, section 3.4), in buckets of 5e8 values, the default of its reduce_bucket_size. ZeRO-2 is our "
    "flat ZeRO-2 program with a micro-batch of 4: a reduce-scatter in each micro-step, a gather of fp16 parameters at "
    "the end, nothing overlapped."
)
BUCKET = 5e8  # values: DeepSpeed's reduce_bucket_size
AMSP = "AMSP (arXiv 2311.00257), section 9"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A compiled step replayed on a cluster; seconds of a step, bytes of a device."""

    gpus: int
    compiled_gpus: int  # of the program, if it was rewritten for more of the same partition groups
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

    def buckets_s(self, kind: str) -> float:
        """Returns how long all gradients take in buckets of `BUCKET` values, once in each micro-step."""
        return self.accumulation * self.num_params / BUCKET * self.bucket_s[kind]

    def rate(self, step_s: float | None = None) -> float:
        """Returns sequences a second, of a step of `step_s` if given."""
        return self.global_size / (step_s or self.step_s)

    @property
    def how(self) -> str:
        """How the step was obtained."""
        rewritten = self.compiled_gpus != self.gpus
        return f"compiled for {self.compiled_gpus} GPUs, replayed" if rewritten else "compiled, replayed"

    @property
    def total_bytes(self) -> float:
        """What the program needs of a device."""
        return sum(self.memory[part] for part in ("parameters", "gradients", "optimizer", "batch", "temporaries"))

    @property
    def fits(self) -> bool:
        """Whether a device can have so much."""
        return self.total_bytes <= self.memory["capacity"]

    def _sum(self, what: str, labels: Sequence[str]) -> float:
        return sum(use[what] for key, use in self.uses.items() if not labels or key.partition(",")[0] in labels)


def find(
    records: Records, model: str, gpus: int, strategy: str, *, cluster: str = P3DN, network: str = PAPER
) -> Replay:
    """Returns the newest replay of a model's step. ValueError if there is none."""
    wanted = {"model": model, "gpus": gpus, "strategy": strategy, "cluster": cluster, "network": network}
    lines = [line for line in records.full_scale if wanted.items() <= line.items()]
    if not lines:
        raise ValueError(
            f"benchmarks/results/derived/full_scale.jsonl has no {model}, {strategy}, on {gpus} GPUs of {cluster} "
            f"(network: {network}): python -m benchmarks.full_scale"
        )
    return as_replay(lines[-1])


def as_replay(line: Mapping[str, Any]) -> Replay:
    """Returns the replay of a line of the record."""
    return Replay(**{key: line[key] for key in Replay.__dataclass_fields__})


def zero3_s(flat: Replay) -> float:
    """Returns the step of DeepSpeed's ZeRO-3, of our flat program's replay (`DEEPSPEED`)."""
    return flat.compute_s + flat.busy_s() - flat.busy_s("hop_one") + flat.buckets_s("all-reduce")


def in_buckets_s(mics: Replay) -> float:
    """Returns the step of a MiCS without two hops, of our program's replay, with DeepSpeed's buckets (`DEEPSPEED`).

    Beside the compute is room for as much of them as ours hides of its all-reduces of each tensor.
    """
    hidden_s = mics.hidden_s("hop_one")
    return mics.step_s - mics.busy_s("hop_one") + hidden_s + max(0.0, mics.buckets_s("all-reduce") - hidden_s)


def zero2_s(flat: Replay) -> float:
    """Returns the step of DeepSpeed's ZeRO-2, of our flat program's replay, whose parameters are gathered in f32."""
    return flat.compute_s + flat.busy_s() - flat.busy_s("parameter_scope") / 2


def zero2_in_buckets_s(flat: Replay) -> float:
    """Returns the same with gradients summed in buckets of `BUCKET` values."""
    return zero2_s(flat) - flat.busy_s("gradient_scope") + flat.buckets_s("reduce-scatter")


def gradients_exposed_s(mics: Replay) -> float:
    """Returns the step of a MiCS that hides gathers like ours, but no sums of gradients: DeepSpeed's (`AMSP`)."""
    return mics.step_s + mics.hidden_s("hop_one", "hop_two")


def nothing_hidden_s(mics: Replay) -> float:
    """Returns the step of the same program if nothing overlapped."""
    return mics.compute_s + mics.busy_s()
