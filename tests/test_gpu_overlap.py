"""The schedule of the step as XLA compiles it for H100s: what is between the start and the end of a collective."""

from functools import cache

import pytest
from compiling import SMALL
from running import ROOT

from planner.compile import WHEELS, CompiledStep, compile_step
from sharding.hlo import LABELS
from sharding.hlo_program import Computation, Instruction, parse_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS.exists(), reason="XLA for GPUs is not installed: make .venv/h100/installed"),
]
CONFIG = [f"--config={ROOT / 'configs' / 'quickstart.py'}"]
CONFIG += [f"--config.{key}={value}" for key, value in (SMALL | {"model.num_layers": 5}).items()]


@cache
def compiled(*changes: str) -> CompiledStep:
    """The step for 4 nodes of 2; mics(2), unless that is changed."""
    return compile_step([*CONFIG, *(f"--config.{change}" for change in changes)], nodes=4, devices_per_node=2)


def label(instruction: Instruction) -> str:
    scopes = instruction.op_name.replace("(", "/").replace(")", "/").split("/")
    return next((scope for scope in reversed(scopes) if scope in LABELS), "")


def products_beside(computation: Computation) -> dict[str, int]:
    """Returns, by label, the matrix products between start and done of the collective that has the most beside it."""
    found: dict[str, int] = {}
    started: dict[str, int] = {}
    products = 0
    for instruction in computation.instructions:
        if "dot" in instruction.name or "gemm" in instruction.name:
            products += 1
        elif instruction.opcode.endswith("-start"):
            started[instruction.name] = products
        elif instruction.opcode.endswith("-done"):
            name = label(instruction)
            found[name] = max(found.get(name, 0), products - started[instruction.operands[0]])
    return found


def loops(step: CompiledStep) -> list[dict[str, int]]:
    """Returns the products beside collectives, of each computation of the program that has collectives of the step."""
    computations = parse_program(step.text).computations.values()
    return [found for computation in computations if (found := products_beside(computation))]


def most(step: CompiledStep) -> dict[str, int]:
    return {name: max(found.get(name, 0) for found in loops(step)) for name in ("gather", "hop_one", "hop_two")}


def test_gathers_hop_one_and_hop_two_run_beside_matrix_products() -> None:
    assert all(count >= 2 for count in most(compiled()).values())


def test_without_overlap_nothing_runs_beside_a_matrix_product() -> None:
    assert set(most(compiled("sharding.overlap=off")).values()) == {0}


def test_a_codec_runs_beside_matrix_products_too() -> None:
    assert most(compiled("compression.hop_two=int8"))["hop_two"] >= 2


def test_gathers_between_nodes_run_beside_matrix_products() -> None:
    found = most(compiled("sharding.strategy=zero3", "sharding.partition_size=0"))
    assert found["gather"] >= 2 and found["hop_one"] >= 2


def test_bert_10b_fits_16_gpus_of_32_gb_with_a_quarter_more_temporaries_at_most() -> None:
    """The paper's micro-batch of 8 on 2 nodes of 8."""
    config = f"--config={ROOT / 'configs' / 'bert_10b.py'}"
    beside, after = (
        compile_step([config, f"--config.sharding.overlap={choice}"], nodes=2, devices_per_node=8)
        for choice in ("auto", "off")
    )
    assert beside.peak_bytes < 28e9
    assert beside.temporary_bytes <= 1.25 * after.temporary_bytes
