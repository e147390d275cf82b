"""The step as XLA compiles it for H100s, 4 nodes of 2: traffic between nodes has the claimed dtypes and bytes."""

from functools import cache
from typing import Any

import pytest
from support import workload
from support.compiling import HIDDEN, LAYERS, MLP
from support.running import ROOT
from support.suite import sampled

from compression.chosen_codecs import make_codec
from configs import base
from configs.schema import CompressionConfig
from planner.compile import compile_step
from planner.targets import WHEELS
from sharding.hlo import Collective, read_collectives
from sharding.mesh import INTER_AXES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS.exists(), reason="XLA for GPUs is not installed: make .venv/h100/installed"),
]
NODES, DEVICES, ACCUM = 4, 2, 2
VECTORS = (2 * LAYERS + 1) * HIDDEN
EMBEDDING = 256 * HIDDEN  # the head is the same
IN_LAYERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * MLP + 2 * HIDDEN)
SIZE = IN_LAYERS + EMBEDDING + HIDDEN
COMPRESSION = CompressionConfig(**base.get_config().compression)
ZERO3 = {"sharding.strategy": "zero3", "sharding.partition_size": 0}


def compiled_for_h100(changes: dict[str, Any], more_flags: str = "") -> list[Collective]:
    """Returns the collectives without losses and norms; mics(2) by default.

    Without overlap, which cuts a codec's rows layer by layer; test_gpu_overlap.py compares the bytes of both.
    """
    changes = {"sharding.overlap": "off"} | changes
    file = f"--config={ROOT / 'tests' / 'support' / 'compiling.py'}:{changes.pop('model.kind', '')}"
    words = [f"--config.{key}={value}" for key, value in changes.items()]
    step = compile_step([file, *words], nodes=NODES, devices_per_node=DEVICES, xla_flags=more_flags)
    return [c for c in read_collectives(step.text, step.shape) if c.payload_bytes > 100]


def crossing(collectives: list[Collective]) -> list[Collective]:
    return [c for c in collectives if set(c.axes) & set(INTER_AXES)]


def claimed(codec: str, rows: int, size: int) -> int:
    """Returns the bytes of rows that have `size` values together, each of them filled up."""
    made = make_codec(codec, COMPRESSION)
    assert made is not None
    row = size // rows
    return rows * workload.payload_bytes(made, row + -row % made.multiple)


@pytest.mark.parametrize("codec", sampled(["bf16", "int8", "int4", "statistical"], "int8", "statistical"))
def test_all_reduce_sends_the_payload(codec: str) -> None:
    """An all-to-all and an all-gather of bytes: nothing was decoded before it was sent; vectors as they are."""
    found = crossing(compiled_for_h100({"compression.all_reduce": codec}))
    vectors = [c for c in found if c.kind == "all-reduce"]
    assert {c.dtype for c in vectors} == {"f32"}
    assert 0 <= sum(c.num_elements * c.times for c in vectors) - VECTORS / DEVICES < 10  # and whether all is finite
    found = [c for c in found if c not in vectors]
    assert [(c.kind, c.label, c.dtype, c.times) for c in found] == [
        ("all-to-all", "replica_all_reduce", "u8", 1),
        ("all-gather", "replica_all_reduce", "u8", 1),
    ]
    assert [c.payload_bytes for c in found] == 2 * [claimed(codec, NODES, (SIZE - VECTORS) // DEVICES)]


def test_power_sgd_sends_factors() -> None:
    found = crossing(compiled_for_h100({"compression.all_reduce": "power_sgd"}))
    factors = 2 * (LAYERS * (4 * 2 * HIDDEN + 3 * (HIDDEN + MLP)) + 256 + HIDDEN)
    assert {c.kind for c in found} == {"all-reduce"}
    assert 0 <= sum(c.num_elements * c.times for c in found) - factors - VECTORS / DEVICES < 10


@pytest.mark.parametrize("gather", ["layer", "node"])
def test_zero_plus_plus_sends_the_payload(gather: str) -> None:
    """Gathers in int8, reduce-scatters in int4, on both levels; layers are gathered twice a micro-step, or once.

    Vectors travel as they are.
    """
    codecs = {
        "all_gather_inter": "int8",
        "all_gather_intra": "int8",
        "reduce_scatter_inter": "int4",
        "reduce_scatter_intra": "int4",
    }
    coded = {f"compression.{key}": codec for key, codec in codecs.items()}
    found = compiled_for_h100(ZERO3 | {"sharding.gather": gather} | coded)
    assert {(c.kind, c.label, c.dtype) for c in found} == {
        ("all-gather", "gather", "u8"),  # XLA puts the vectors' into these
        ("all-to-all", "group_reduce_scatter", "u8"),
        ("reduce-scatter", "group_reduce_scatter", "f32"),
    }
    parts = [(1, SIZE, VECTORS)]
    if gather == "layer":
        parts = [(2 * LAYERS, IN_LAYERS // LAYERS, 2 * HIDDEN), (1, SIZE - IN_LAYERS, HIDDEN)]
    for label, codec, passes in (
        ("gather", "int8", 1),
        ("group_reduce_scatter", "int4", 2),
    ):  # the group reduce-scatter is backwards alone
        wanted = 0
        for times, size, vectors in parts:
            row_bytes = claimed(codec, NODES, (size - vectors) // DEVICES) + 4 * vectors // DEVICES
            wanted += -(-times // passes) * row_bytes
        assert sum(c.payload_bytes * c.times for c in crossing(found) if c.label == label) == ACCUM * wanted


# bytes that a device sends between nodes, by the formulas of docs/concepts.md; embedding and head are gathered once
PLAIN = {
    "mics(2)": ({}, 2 * 4 * SIZE / DEVICES),
    "zero3": (ZERO3, ACCUM * 4 * (3 * IN_LAYERS + 2 * (SIZE - IN_LAYERS)) / DEVICES),
    "zero3 in bf16": (
        ZERO3 | {"model.compute_dtype": "bfloat16"},
        ACCUM * 2 * (3 * IN_LAYERS + 2 * (SIZE - IN_LAYERS)) / DEVICES,
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_without_codecs_the_formula_is_sent(name: str) -> None:
    changes, payload_bytes = PLAIN[name]
    found = crossing(compiled_for_h100(changes))
    assert sum(c.inter_bytes * c.times for c in found) == payload_bytes * (NODES - 1) / NODES


def test_each_device_runs_the_kernel_of_attention_on_its_own_heads() -> None:
    """XLA cannot cut a kernel: it gathered all heads over `tensor`, and each device computed them."""
    changes = {"mesh.tensor": 2, "model.attention": "pallas", "model.compute_dtype": "bfloat16"}
    over_tensor = [c for c in compiled_for_h100(ZERO3 | changes) if c.axes == ("tensor",)]
    assert {c.kind for c in over_tensor} == {"all-reduce"}


PIPELINED = [f"--xla_gpu_enable_pipelined_{kind}=true" for kind in ("all_gather", "reduce_scatter", "all_reduce")]
SCHEDULED = "--xla_gpu_enable_latency_hiding_scheduler=true"
DOUBLE = "--xla_gpu_enable_while_loop_double_buffering=true"
TOGETHER = " ".join([SCHEDULED, *PIPELINED])
DEEPER = {"model.num_layers": 5, "batch.global_size": 24}  # odd numbers of iterations, enough of them to be peeled


@cache
def sent_by_scopes(strategy: str, flags: str) -> dict[str, float]:
    """Returns the bytes that each scope of the step sends, between nodes and inside them."""
    sent: dict[str, float] = {}
    for c in compiled_for_h100(DEEPER | (ZERO3 if strategy == "zero3" else {}), flags):
        for level, num_bytes in (("inter", c.inter_bytes), ("intra", c.intra_bytes)):
            sent[f"{c.label} {level}"] = sent.get(f"{c.label} {level}", 0.0) + num_bytes * c.times
    return sent


@pytest.mark.parametrize(
    ("strategy", "flags"),
    sampled(
        [("mics", flags) for flags in (*PIPELINED, SCHEDULED, DOUBLE, TOGETHER, f"{TOGETHER} {DOUBLE}")]
        + [("zero3", flags) for flags in (TOGETHER, f"{TOGETHER} {DOUBLE}")],
        ("mics", f"{TOGETHER} {DOUBLE}"),
    ),
)
def test_how_xla_schedules_changes_no_bytes(strategy: str, flags: str) -> None:
    """Loops that it peels, pipelines or unrolls are counted as they were."""
    plain, found = sent_by_scopes(strategy, ""), sent_by_scopes(strategy, flags)
    assert sum(plain.values()) > 10**6
    assert found == pytest.approx(plain, rel=1e-12)


RESNET = {
    "model.kind": "resnet",
    "model.width": 8,
    "model.stage_blocks": [1, 1],
    "model.norm": "batch",
    "model.norm_rows": 1,
    "data.objective": "classify",
    "data.image_size": 16,
}


def test_collectives_that_xla_combines_keep_their_label() -> None:
    """Blocks are not a loop: small tensors of neighbouring blocks become one collective."""
    found = compiled_for_h100(RESNET)
    assert {c.label for c in found} == {"gather", "group_reduce_scatter", "replica_all_reduce"}
    (whole,) = (c for c in found if c.label == "replica_all_reduce")
    assert whole.num_elements > 2000


def test_reduce_scatter_sums_in_the_dtype_that_was_chosen() -> None:
    half = ZERO3 | {"model.compute_dtype": "bfloat16"}
    sums = {}
    for dtype in ("compute", "float32"):
        found = compiled_for_h100(half | {"sharding.reduce_dtype": dtype})
        reduce_scatter = [c for c in found if c.label == "group_reduce_scatter" and c.kind == "reduce-scatter"]
        assert {c.dtype for c in reduce_scatter} == {"bf16" if dtype == "compute" else "f32"}
        sums[dtype] = sum(c.payload_bytes * c.times for c in reduce_scatter)
    assert sums["float32"] == 2 * sums["compute"]


@pytest.mark.parametrize(("codec", "dtype"), [("none", "f32"), ("int8", "u8")])
def test_tokens_reach_experts_on_other_nodes(codec: str, dtype: str) -> None:
    """Six all-to-alls a layer and micro-step on each level; the codec's payload crosses nodes."""
    changes = {"model.kind": "moe", "model.num_experts": 8, "model.capacity_factor": 1.0, "sharding.partition_size": 4}
    found = compiled_for_h100(changes | {"sharding.experts": "4", "compression.experts_inter": codec})
    found = [c for c in found if c.label == "experts"]
    tokens = 8 * (2 * 32 // 8) * HIDDEN  # the slots of a row at 8 experts
    by_level = {crosses: level_of(found, crosses) for crosses in (True, False)}
    between = 4 * tokens if codec == "none" else claimed(codec, 2, tokens)
    for crosses, payload_bytes in ((True, between), (False, 4 * tokens)):
        level = by_level[crosses]
        assert {c.kind for c in level} == {"all-to-all"}
        assert {c.dtype for c in level} == {dtype if crosses else "f32"}
        assert sum(c.payload_bytes * c.times for c in level) == 6 * LAYERS * ACCUM * payload_bytes


def test_tokens_of_experts_without_a_capacity_cross_nodes_as_the_formula() -> None:
    """Five exchanges of tokens for a layer and micro-step, and three of their routing; products are our kernels."""
    changes = {"model.kind": "moe", "model.num_experts": 8, "model.capacity_factor": 0.0, "sharding.partition_size": 4}
    found = compiled_for_h100(changes | {"sharding.experts": "4", "model.experts_per_token": 3})
    level = level_of([c for c in found if c.label == "experts"], True)
    assert {c.kind for c in level} == {"all-gather", "all-to-all"}
    assert sum(c.inter_bytes * c.times for c in level) == LAYERS * ACCUM * 4 * 32 * (5 * HIDDEN + 3 * 2 * 3)


def level_of(found: list[Collective], crosses: bool) -> list[Collective]:
    """Returns the collectives that cross nodes, or the others."""
    return [c for c in found if (c in crossing(found)) == crosses]
