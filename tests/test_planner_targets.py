"""What a step can be compiled for, and what XLA for TPUs says of memory: short texts, nothing is compiled."""

from math import prod

import pytest

from planner.compile import buffer_bytes, needed_bytes
from planner.slices import find_cluster, rings
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


# ------------------------------------------------------------------------------- slices as clusters


def test_slices_are_clusters_by_their_chips() -> None:
    """The figures of Google's pages: links and hosts of a chip, 25 Gbit/s of a v5e, 50 of a v5p; two devices a chip."""
    v5e, v5p, ironwood = map(find_cluster, ("v5e-256", "v5p-64", "tpu7x-64"))
    assert (v5e.devices_per_node, v5p.devices_per_node, ironwood.devices_per_node) == (256, 64, 128)
    assert v5e.node_bandwidth == 256 * 25e9 / 8 and v5p.node_bandwidth == 64 * 50e9 / 8
    assert v5e.network().intra_bandwidth == pytest.approx(4 * 45e9)
    assert v5p.network().intra_bandwidth == pytest.approx(6 * 90e9) == 2 * ironwood.network().intra_bandwidth
    assert v5e.usable_bytes(256) == 15.75 * 2**30 and v5e.on_demand == pytest.approx(256 * 1.2)
    assert ironwood.on_demand is None  # no price is published
    assert "10 steps that others published" in str(v5e.error_bar)
    assert find_cluster("p5.48xlarge").is_gpu and not v5e.is_gpu
    assert "Google's names count cores" in v5p.device.note and "cores" not in v5e.device.note


@pytest.mark.parametrize(
    ("sides", "axes"),
    [((16, 16), (True, True)), ((8, 16), (False, True)), ((4, 4), (False, False)), ((4, 4, 8), (True,) * 3)],
)
def test_axes_that_are_rings(sides: tuple[int, ...], axes: tuple[bool, ...]) -> None:
    assert rings(sides) == axes and rings((2, 4, 4)) == (False,) * 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v6e", "--cluster=v6e: give the chips of a slice, such as v6e-64; there are 4, 8, 16, 32, 64, 128, 256"),
        ("v6e-12", "v6e-12: the topology of that slice is unknown"),
        ("v9-8", "--cluster=v9-8 is not known"),
    ],
)
def test_an_unknown_slice_is_named_with_the_known_sizes(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_cluster(name)
