"""Devices that divide no dim of a parameter: its storage is padded, losses, updates and files are as without."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import workload
from support.checkpointing import restore, save
from support.suite import SLOW
from support.three_steps import SMALL

from configs import base, quickstart
from elastic import tree
from elastic.saved_arrays import SavedArrays
from elastic.snapshots import Snapshots
from input_pipeline import Batches, load
from sharding.hlo import read_collectives
from sharding.padding import Padded, from_regions, padded, unpadded, without_wrappers
from sharding.spec import ParamSpec, Placement, is_placement
from sharding.state import by_name
from sharding.step import TrainState
from training.experiment import Experiment, make_experiment

DEVICES = 6  # three nodes of two; hidden 16 and intermediate 32 are stored as 18 and 36


def placements(plan: Any) -> list[Placement]:
    return jax.tree.leaves(plan.placements, is_leaf=is_placement)


RELEASE = pytest.mark.slow
CASES: list[tuple[dict[str, Any], str, Any]] = [
    ({"strategy": "zero3"}, "decoder", ()),
    ({"strategy": "zero3", "gather": "node", "overlap": True}, "decoder", SLOW),
    ({"strategy": "mics", "partition_size": 3, "nodes": 2, "per_node": 3}, workload.BATCH_NORM, SLOW),
    ({"strategy": "zero3", "partitioner": "auto"}, "decoder", SLOW),
    ({"parameters": "node", "gradients": "node", "optimizer": "all", "gather": "step"}, "decoder", RELEASE),
    ({"strategy": "zero1"}, "encoder", RELEASE),
    ({"strategy": "zero2"}, "decoder", RELEASE),
    ({"strategy": "zero3", "hierarchical": False, "two_hop": False}, "decoder", RELEASE),
    ({"strategy": "hsdp", "nodes": 2, "per_node": 3, "overlap": True}, "decoder", RELEASE),
    ({"strategy": "zero3"}, workload.LORA + "nf4", RELEASE),
    ({"strategy": "zero3", "nodes": 1, "per_node": 6, "tensor": 2}, "decoder", RELEASE),
]


@pytest.mark.parametrize(("how", "kind"), [pytest.param(*case, marks=marks) for *case, marks in CASES], ids=str)
def test_losses_equal_one_device_and_bytes_the_padded_sizes(how: dict[str, Any], kind: str) -> None:
    how = {"nodes": 3, "per_node": 2} | how
    plan = workload.plan(kind, **how)
    assert sum(p.padding > 0 for p in placements(plan)) > 2
    accumulation = 1 if kind == workload.BATCH_NORM else 2  # it needs two rows on each device
    step, *begin = workload.compiled_step(kind, plan, rows=12, accumulation=accumulation)
    losses, state, _ = workload.run_steps(step, *begin, workload.NUM_STEPS)
    np.testing.assert_allclose(losses, workload.single_device_losses(kind, rows=12), rtol=1e-5)
    for p, x in zip(placements(plan), jax.tree.leaves(state.params), strict=True):  # the padding stays zero
        np.testing.assert_array_equal(padded(p, unpadded(p, np.asarray(x))), x)
    if (how, kind) == ({"nodes": 3, "per_node": 2, "strategy": "zero3"}, "decoder"):
        check_gathers(step.as_text(), plan)


def check_gathers(text: str, plan: Any) -> None:
    """Layers are gathered twice, in the forward and the backward pass, the others once; two micro-steps."""
    found = [c for c in read_collectives(text, plan.layout.shape) if (c.label, c.kind) == ("gather", "all-gather")]
    wanted = 0
    for name, group in plan.placements.items():
        specs = by_name({name: workload.specs("decoder")[name]}, lambda x: isinstance(x, ParamSpec))
        for path, p in by_name({name: group}, is_placement).items():
            shape = list(specs[path].shape)
            shape[p.dim] = -(-shape[p.dim] // DEVICES) * DEVICES
            wanted += 2 * math.prod(shape) * (1 + specs[path].stacked)
    inside = sum(c.num_elements * c.times for c in found if c.axes == ("shard_intra",))
    between = sum(c.num_elements * c.times for c in found if c.axes == ("shard_inter",))
    assert (inside, between) == (wanted, wanted // 2)


# ---------------------------------------------------------------------------------------------- checkpoints, snapshots


def experiment(devices: int, **changes: Any) -> Experiment:
    """A decoder of hidden 20 and intermediate 36, which are stored as 24 and 40 on eight devices, on six as 24 and 36.

    Adafactor has factors without padding, and moments of vectors with it.
    """
    config = quickstart.get_config()
    sizes = {"model.hidden": 20, "model.intermediate": 36, "model.num_heads": 2, "model.vocab_multiple": 1}
    sizes |= {"batch.global_size": 24, "mesh.devices_per_node": 2}
    config.update_from_flattened_dict(SMALL | sizes | {"optimizer.name": "adafactor"} | changes)
    config.sharding.update(strategy="zero3", partition_size=0)
    return make_experiment(base.typed(config), jax.devices()[:devices])


def true_values(ex: Experiment, state: TrainState) -> dict[str, np.ndarray]:
    """The arrays of a state without their padding, which is zero."""
    shapes = [leaf.shape for leaf in tree.flatten_arrays(ex.in_files(state))[1]]
    values = {path: np.asarray(x) for path, x in by_name(state).items()}
    cut = {path: x[tuple(map(slice, n))] for (path, x), n in zip(values.items(), shapes, strict=True)}
    assert all(np.sum(cut[path] != 0) == np.sum(x != 0) for path, x in values.items())
    return cut


def random_state(ex: Experiment) -> TrainState:
    """A state whose arrays all have values, but for the padding."""
    rng = np.random.default_rng(0)

    def fill(x: Any) -> Any:
        shape = x.shape
        array = x.array if isinstance(x, Padded) else x
        values = np.asarray(rng.integers(1, 99, shape), array.dtype)
        return from_regions(array, lambda index: values[index])

    return jax.tree.map(fill, ex.in_files(ex.state_shapes), is_leaf=lambda x: isinstance(x, Padded))


def check_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for path, x in wanted.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)


def test_checkpoints_have_the_true_shapes(tmp_path: Path) -> None:
    """Written by six devices, which store 13 rows as 18, read by others, and written by these."""
    values = {"w": np.random.default_rng(0).normal(size=(2, 13, 4)).astype(np.float32), "b": np.arange(24)}

    def shapes(devices: int) -> dict[str, Any]:
        mesh = Mesh(np.array(jax.devices()[:devices]), "d")
        rows, all_rows = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((None, "d"), ("d",)))
        w = jax.ShapeDtypeStruct((2, 13 + -13 % devices, 4), np.float32, sharding=rows)
        return {"w": Padded(w, (2, 13, 4)), "b": jax.ShapeDtypeStruct((24,), np.int32, sharding=all_rows)}  # pyright: ignore

    six = shapes(6)
    first = {"w": from_regions(six["w"].array, lambda index: values["w"][index])}
    state: Any = {"w": Padded(first["w"], (2, 13, 4)), "b": jax.device_put(values["b"], six["b"].sharding)}
    for step, devices in enumerate((4, 8, 1)):
        save(tmp_path, state, step)
        for name, found in zip(values, SavedArrays(tmp_path).read(*values), strict=True):
            np.testing.assert_array_equal(found, values[name])
        state = restore(tmp_path, shapes(devices))
        array = np.asarray(state["w"].array)
        assert array.shape == (2, 13 + -13 % devices, 4) and not array[:, 13:].any()


def test_snapshots_in_memory_have_the_true_shapes(tmp_path: Path) -> None:
    four, three = experiment(8), experiment(6)
    state = random_state(four)
    wanted = three.in_files(three.state_shapes)
    with Snapshots(tmp_path / "run", str(tmp_path), 1) as snapshots:
        snapshots.begin(0)
        snapshots.save(1, four.in_files(state), data={}, config={"elastic": {}})
        snapshots.wait()
    with Snapshots(tmp_path / "run", str(tmp_path), 1) as snapshots:
        found = snapshots.find(wanted)
        assert found
        assert {leaf.path: leaf.shape for leaf in found.snapshot.tree}["params.layers.up.weight"] == (2, 20, 36)
        restored = snapshots.load(found, wanted)
    assert restored
    check_equal(true_values(three, without_wrappers(restored.state)), true_values(four, state))


@pytest.mark.slow
def test_a_run_on_four_nodes_continues_on_three_and_on_four(tmp_path: Path) -> None:
    """With the losses of one device."""

    def train(ex: Experiment, state: TrainState, steps: int) -> tuple[list[float], TrainState]:
        step, found = ex.compile_train_step(), []
        rows = {"global_size": 24, "rows": ex.batches.local_rows}
        with Batches(load(ex.config.data, "train", 0), **rows, start_step=0, prefetch=1) as batches:
            batch = ex.batches.to_devices(next(batches))
        for _ in range(steps):
            state, metrics = jax.block_until_ready(step(state, batch))
            found.append(float(metrics["loss"]))
        return found, state

    one = experiment(1, **{"mesh.devices_per_node": 1})
    wanted, _ = train(one, one.init_state(), 6)
    losses, state = [], None
    for devices in (8, 6, 8):
        ex = experiment(devices)
        state = without_wrappers(restore(tmp_path, ex.in_files(ex.state_shapes))) if state else ex.init_state()
        found, state = train(ex, state, 2)
        losses += found
        save(tmp_path, ex.in_files(state), len(losses))
        assert SavedArrays(tmp_path).read("params.layers.up.weight")[0].shape == (2, 20, 36)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
