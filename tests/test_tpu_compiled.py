"""Train steps as XLA compiles them for TPU slices of 4 chips: each sends the bytes of its formula between slices."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from support.compiling import LAYERS
from support.tpu_programs import Compile, compiler

from configs.schema.codecs import TABLE
from planner.targets import LIBTPU, TPUS
from sharding.hlo import Collective, read_collectives

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LIBTPU.exists(), reason=TPUS["v5e"].missing)]
CHIPS, ACCUM, HIDDEN, MLP = 4, 2, 1024, 2048
BLOCK = 96  # values of a codec: payloads end within a tile
VECTORS = (2 * LAYERS + 1) * HIDDEN
IN_LAYERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * MLP)
MATRICES = IN_LAYERS + 256 * HIDDEN  # the head is the embedding
WIDE = {"model.hidden": HIDDEN, "model.intermediate": MLP}
SLICES = {
    "compression.block": BLOCK,
    "mesh.num_cpu_devices": 0,
    "mesh.devices_per_node": 0,
    "sharding.partition_size": 0,
}
MICS = {"sharding.strategy": "mics", "sharding.partition_size": 2}
ZERO3 = {"sharding.strategy": "zero3", "sharding.overlap": "off"}  # overlap keeps the last layer's parameters
HSDP, CODEC = {"sharding.strategy": "hsdp"}, "compression.all_reduce"
CUSTOM = {"sharding.parameters": "node", "sharding.gradients": "node", "sharding.optimizer": "all"}


def of_replicas(codec: str) -> float:
    """Returns the bytes of the replica all-reduce, if each slice sent the model's values once each way."""
    return 2 * (MATRICES * TABLE[codec].bytes_per_value(BLOCK) + 4 * VECTORS)


EXACT = of_replicas("none")
# target, slices, keys, and the bytes that all chips of a slice send, without the factor of (n-1)/n of n slices
ROWS: dict[str, tuple[str, int, Mapping[str, Any], float]] = {
    "hsdp": ("v5e", 2, HSDP, EXACT),
    "mics, bf16": ("v6e", 4, MICS | {CODEC: "bf16"}, of_replicas("bf16")),
    "hsdp, int8": ("v5e", 2, HSDP | {CODEC: "int8"}, of_replicas("int8")),
    "mics, int4": ("v5e", 8, MICS | {CODEC: "int4"}, of_replicas("int4")),
    "hsdp, statistical": ("v6e", 2, HSDP | {CODEC: "statistical"}, of_replicas("statistical")),
    "ddp": ("v5e", 2, {"sharding.strategy": "ddp"}, EXACT),
    "zero1": ("v5p", 1, {"sharding.strategy": "zero1"}, 0),
    "zero2": ("v6e", 2, {"sharding.strategy": "zero2"}, (ACCUM + 1) / 2 * EXACT),
    "zero2, differences in int4": (
        "v6e",
        2,
        {"sharding.strategy": "zero2", "compression.weight_differences_inter": "int4"},
        (ACCUM * EXACT + of_replicas("int4")) / 2,
    ),
    "zero3": ("v6e", 4, ZERO3, ACCUM * (1.5 * EXACT - 4 * 256 * HIDDEN)),
    "custom": ("v6e", 1, {"sharding.strategy": "custom"} | CUSTOM, 0),
    "mics": ("v5e", 1, MICS, 0),
    "local SGD": ("v6e", 2, HSDP | {"local_sgd.inner_steps": 4}, EXACT),
    "delayed, int8": ("v5e", 2, HSDP | {CODEC: "int8", "compression.delayed": True}, of_replicas("int8")),
    "independent": ("v5e", 1, HSDP | {"sharding.replicas": "independent"}, 0),
}


@pytest.fixture(scope="module", name="compiled")
def a_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    with compiler(tmp_path_factory.mktemp("programs")) as compiled:
        yield compiled


def between(compiled: Compile, target: str, slices: int, changes: Mapping[str, Any]) -> list[Collective]:
    """Returns the collectives between the slices of a step of two micro-steps."""
    rows = {"batch.global_size": ACCUM * CHIPS * slices}
    step = compiled(target, slices, CHIPS, SLICES | rows | changes)
    return [c for c in read_collectives(step.text, step.shape) if c.inter_bytes]


@pytest.mark.parametrize("name", ROWS)
def test_a_step_sends_the_formula(name: str, compiled: Compile) -> None:
    target, slices, changes, of_slice = ROWS[name]
    found = between(compiled, target, slices, WIDE | changes)
    wanted = (slices - 1) / slices * of_slice / CHIPS
    listed = [(c.kind, c.axes, c.dtype, c.inter_bytes, c.times) for c in found]
    sent = sum(c.inter_bytes * c.times for c in found)
    assert sent == pytest.approx(wanted, rel=0.02), listed


def test_tokens_of_experts_on_other_slices_are_the_formula(compiled: Compile) -> None:
    """All-to-alls carry two of the five exchanges of tokens, and one of the three of their routing.

    All-gathers carry the others, and the parameters of attention, the router and norms: twice, the embedding once.
    """
    hidden, tokens, choices, experts = 256, 256, 3, 8
    keys = {"num_experts": experts, "capacity_factor": 0.0, "experts_per_token": choices, "hidden": hidden}
    changes: dict[str, Any] = {f"model.{key}": value for key, value in keys.items()}
    changes |= {"model.kind": "moe", "data.seq_len": tokens, "model.max_len": tokens, "sharding.overlap": "off"}
    changes |= {"sharding.strategy": "mics", "sharding.partition_size": 2 * CHIPS, "sharding.experts": str(experts)}
    found = between(compiled, "v5e", 2, changes)
    of_tokens, of_routing = 4 * tokens * hidden, 4 * tokens * 2 * choices
    dense = 4 * (2 * LAYERS * (4 * hidden**2 + (experts + 2) * hidden) + 257 * hidden) / (2 * CHIPS)
    wanted = {"all-to-all": LAYERS * (2 * of_tokens + of_routing)}
    wanted["all-gather"] = LAYERS * (3 * of_tokens + 2 * of_routing) + dense
    listed = [(c.kind, c.axes, c.dtype, c.inter_bytes, c.times) for c in found]
    for kind, num_bytes in wanted.items():
        sent = sum(c.inter_bytes * c.times for c in found if c.kind == kind)
        assert sent == pytest.approx(ACCUM * num_bytes, rel=0.02), listed
