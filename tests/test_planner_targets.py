"""What a step can be compiled for, and what XLA for TPUs says of memory: short texts, nothing is compiled."""

from math import prod

import pytest

from planner.compile import buffer_bytes, needed_bytes
from planner.targets import TARGETS, TPUS, is_installed

# jax 0.12 with libtpu 0.0.52, which names pages and colors; 0.10.2 with 0.0.42.1
ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, color 6, page 0, thread-local:
allocation 1: size 9658368, page 0, parameter 25, shape |f32[3144,768]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 324534784, page 0, preallocated-temp:
allocation 3: size 5120, color 6, page 0, preallocated-temp:
"""


def test_only_buffers_in_the_devices_memory_count() -> None:
    assert buffer_bytes(ASSIGNMENT) == (9658368, 324534784)
    assert buffer_bytes(ASSIGNMENT.replace("page 0, ", "")) == (9658368, 324534784)


def test_a_refusal_for_memory_says_how_much_is_needed() -> None:
    """Both versions' messages; the number is in units of 1024."""
    said = "Ran out of memory on HBM, the total memory required for HLO temporaries (98.56G) exceeds available HBM"
    assert needed_bytes(f"RESOURCE_EXHAUSTED: {said} (15.75G).") == round(98.56 * 2**30)
    assert needed_bytes(f"RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: {said} (15.75G). HLO") == round(98.56 * 2**30)
    assert needed_bytes("RESOURCE_EXHAUSTED: Ran out of memory on SMEM") == 0


def test_slices_have_the_published_shapes() -> None:
    for name, tpu in TPUS.items():
        assert all(prod(tpu.shape(chips)) == chips for chips in tpu.shapes)
        assert {len(tpu.shape(chips)) for chips in tpu.shapes} == {3 if name in ("v5p", "tpu7x") else 2}
    with pytest.raises(ValueError, match="v5e-12: the topology of that slice is unknown; slices have 4, 8, 16"):
        TPUS["v5e"].shape(12)
    with pytest.raises(ValueError, match="v6e-512: the topology"):
        TARGETS["v6e"].devices(2, 512, "")


def test_only_other_hardware_needs_packages() -> None:
    assert is_installed(TARGETS["cpu"]) and not TARGETS["cpu"].variables
    assert {target.missing.partition(":")[0] for target in TARGETS.values()} == {
        "",
        "XLA for GPUs is not installed",
        "XLA for TPUs is not installed",
    }
