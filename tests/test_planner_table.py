"""The table's bytes and the drawing's shards against a real state on eight devices; what users see."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from matplotlib.colors import to_hex
from support.planning import FILE, tiny_config
from support.refusals import refused
from support.tables import every_row

from configs.base import typed
from configs.schema import ShardingConfig
from planner import table
from runtime.files import palette
from sharding import drawing
from sharding.scopes import make_layout
from sharding.spec import path_name
from training.experiment import Experiment, make_experiment

ROOT = Path(table.__file__).parents[1]
BERT = f"--config={ROOT}/configs/mics_paper.py:bert_10b"

LAYOUTS: dict[str, dict[str, Any]] = {
    "mics4 over two nodes": {"partition_size": 4},
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "hsdp": {"strategy": "hsdp", "per_node": 4},
    "node, node, all": {"strategy": "custom", "parameters": "node", "gradients": "node", "optimizer": "all"},
    "mics4, tensor 2": {"partition_size": 4, "tensor": 2, "per_node": 4},
    "lamb": {"partition_size": 2, "optimizer_name": "lamb"},
    "adafactor": {"partition_size": 2, "optimizer_name": "adafactor", "hidden": 128},
    "muon": {"strategy": "zero1", "optimizer_name": "muon"},
}


QUICK = ("node, node, all", "mics4, tensor 2", "adafactor")
PARAMS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LAYOUTS]


@pytest.mark.parametrize("layout", PARAMS)
def test_the_table_and_the_drawing_are_those_of_a_real_state(layout: str) -> None:
    experiment = make_experiment(typed(tiny_config(**LAYOUTS[layout])))
    state = experiment.init_state()
    check_bytes(experiment, state)
    check_formula(experiment)
    check_drawing(experiment, state)
    check_picture(experiment)


def bytes_on_first_device(tree: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def check_bytes(experiment: Experiment, state: Any) -> None:
    rows, layout = table.table_rows(experiment), experiment.plan.layout
    size = layout.shape.size
    parameters = jax.tree_util.tree_leaves_with_path(state.params)
    assert [row.name for row in rows[:-1]] == [path_name(path) for path, _ in parameters]
    for row, (_, x) in zip(rows, parameters, strict=False):
        assert row.shape == x.shape
        in_parameters, in_gradients, _ = row.device_bytes
        assert in_parameters == x.addressable_shards[0].data.nbytes
        assert in_gradients * size(layout.gradients) == in_parameters * size(layout.parameters)
        assert row.whole_bytes[:2] == (x.nbytes, x.nbytes)
    assert sum(row.device_bytes[2] for row in rows) == bytes_on_first_device(state.opt_state)
    assert sum(row.whole_bytes[2] for row in rows) == sum(x.nbytes for x in jax.tree.leaves(state.opt_state))


def test_residuals_belong_to_their_parameter() -> None:
    """A device holds one replica's, cut like the gradient; one device alone would have none."""
    config = tiny_config(partition_size=2)
    plain = table.table_rows(make_experiment(typed(config)))
    config.compression.all_reduce = "int8"
    for before, row in zip(plain[:-1], table.table_rows(make_experiment(typed(config))), strict=False):
        assert row.device_bytes[2] == before.device_bytes[2] + row.device_bytes[1]
        assert row.whole_bytes == before.whole_bytes


def test_what_each_replica_keeps_by_itself_counts_once() -> None:
    """Of local SGD Adam's moments and the drift of one replica, and the outer momentum: four copies."""
    config = tiny_config(partition_size=2)
    config.local_sgd.inner_steps = 2
    *rows, rest = table.table_rows(make_experiment(typed(config)))
    for row in rows:
        assert row.device_bytes[2] == 4 * row.device_bytes[0] and row.whole_bytes[2] == 4 * row.whole_bytes[0]
    assert rest.spec == ("whole in every replica",) and 0 < rest.whole_bytes[2] < 100


# what each optimizer keeps for a matrix of a layer and for a bias, in copies of the parameter
COPIES = {"adamw": (2, 2), "lamb": (2, 2), "muon": (1, 2), "adafactor": (0, 1)}


def check_formula(experiment: Experiment) -> None:
    config = experiment.config
    shards = {"none": 1, "node": config.mesh.devices_per_node, "all": 8, config.sharding.partition_size: None}
    words = {
        "ddp": ("none",) * 3, "zero1": ("none", "none", "all"), "zero2": ("none", "all", "all"), "zero3": ("all",) * 3,
        "hsdp": ("node",) * 3, "custom": ("node", "node", "all"),
    }  # fmt: skip
    tensor = config.mesh.tensor
    if config.sharding.strategy == "mics":
        p, g, o = (config.sharding.partition_size // tensor,) * 3
    else:
        p, g, o = (shards[word] for word in words[config.sharding.strategy])
    matrix, vector = COPIES[config.optimizer.name]
    rows = {row.name: row for row in table.table_rows(experiment)}
    size = 4 * config.model.num_layers * config.model.hidden * config.model.intermediate
    up = size // tensor  # Megatron's column split
    assert rows["layers/up/weight"].device_bytes == (up // p, up // g, matrix * up // o)
    bias = 4 * config.model.num_layers * config.model.intermediate  # vectors are not split over tensor
    assert rows["layers/up/bias"].device_bytes == (bias // p, bias // g, vector * bias // o)
    assert rows["layers/up/weight"].whole_bytes == (size, size, matrix * size)
    if config.optimizer.name == "adafactor":  # a row and a column for each matrix of a layer
        assert rows[table.REST].device_bytes[2] > 4 * config.model.num_layers * (config.model.hidden * 3)


def check_drawing(experiment: Experiment, state: Any) -> None:
    """Every device has the shards that the drawing names, of the parameters and of the optimizer's moments."""
    layout = experiment.plan.layout
    shape, names = layout.shape, [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
    placements = jax.tree.leaves(experiment.plan.placements, is_leaf=lambda x: hasattr(x, "pspec"))
    of_parameter = dict(zip(names, zip(placements, jax.tree.leaves(state.params), strict=True), strict=True))
    assert [d.id for d in experiment.plan.mesh.devices.flat] == list(range(8))
    for scope, tree in ((layout.parameters, state.params), (layout.optimizer, state.opt_state)):
        held, seen = drawing.holdings(layout, scope).reshape(-1, 3), set()
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name = next((name for name in names if path_name(path).endswith(name.removeprefix("layers/"))), "")
            if not name or of_parameter[name][1].shape != x.shape:
                continue  # a counter, or factors of a matrix
            seen.add(name)
            placement = of_parameter[name][0]
            for shard in x.addressable_shards:
                group, number, slice_ = held[shard.device.id]
                for dim, part, degree in (
                    (placement.dim, number, shape.size(scope)),
                    (placement.tensor_dim, slice_, shape.tensor),
                ):
                    if dim is not None:
                        step = x.shape[dim] // degree
                        start, stop, _ = shard.index[dim].indices(x.shape[dim])
                        assert (start, stop) == (part * step, (part + 1) * step), (name, shard.device, group, number)
        assert "layers/up/bias" in seen
        # a group holds every shard (and tensor slice) once
        for group in range(shape.num_devices // (shape.size(scope) * shape.tensor)):
            members = held[held[:, 0] == group][:, 1:]
            assert sorted(map(tuple, members)) == list(np.ndindex(shape.size(scope), shape.tensor))


def check_picture(experiment: Experiment) -> None:
    layout = experiment.plan.layout
    (axes,) = drawing.mesh_figure(layout).axes
    words = [text.get_text() for text in axes.texts]
    assert [word for word in words if word.startswith("device ")] == [f"device {i}" for i in range(8)]
    expected: Counter[str] = Counter()
    scopes = {"P": layout.parameters, "G": layout.gradients, "O": layout.optimizer}
    for scope in scopes.values() if len({*scopes.values()}) > 1 else [layout.parameters]:  # a band each
        shards, held = layout.shape.size(scope), drawing.holdings(layout, scope)[..., 1].ravel()
        expected.update(palette.SERIES[shard] if shards > 1 else palette.FILL for shard in held)
    drawn = Counter(map(to_hex, axes.collections[0].get_array().reshape(-1, 3)))
    assert {colour: drawn[colour] for colour in (*palette.SERIES, palette.FILL) if drawn[colour]} == expected


@every_row(("per_node", "group"), [(4, 2), (9, 3), (16, 16), (12, 4), (1, 2), (3, 6)])
def test_frames_contain_their_devices(per_node: int, group: int) -> None:
    layout = make_layout(ShardingConfig(partition_size=group), num_nodes=4, devices_per_node=per_node)
    held = drawing.holdings(layout)
    (axes,) = drawing.mesh_figure(layout).axes
    names = {text.get_text(): text.get_position() for text in axes.texts}
    frames = {int(patch.get_label()): patch.get_bbox() for patch in axes.patches}
    for (node, i), number in np.ndenumerate(held[..., 0]):
        device = names[f"device {node * per_node + i}"]
        assert [g for g, box in frames.items() if box.contains(*device)] == [number]


QUICKSTART = (
    "strategy        mics(2), adamw",
    "groups          8 devices, 4 partition groups of 2",
    "node 3          group 3: d6 0/2, d7 1/2",
    "embed/token | 256 x 128 | vocab by shard_intra, embed | 65.5 kB | 65.5 kB | 131 kB",
    "layers/key/weight | 4 x 128 x 128 | layers, embed by shard_intra, | 131 kB | 131 kB | 262 kB",
    "kv_heads",
    "(counters and the like) | whole on every device | 20 B",
    "each device | 8.66 MB in all | 2.16 MB | 2.16 MB | 4.33 MB",
    "one device, not sharded | 17.3 MB in all | 4.33 MB | 4.33 MB | 8.66 MB",
)


def test_the_quickstarts_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "mesh.png"
    assert table.main(["planner.table", FILE, f"--png={picture}"]) == 0
    out, err = capsys.readouterr()
    lines = [re.sub(" {2,}", " | ", line.strip()) for line in out.splitlines()]
    assert err == "" and {re.sub(" {2,}", " | ", line) for line in QUICKSTART} <= {*lines}
    assert lines[-1] == f"picture of the mesh: {picture}"
    layout = make_layout(ShardingConfig(partition_size=2), num_nodes=4, devices_per_node=2)
    assert picture.read_bytes() == drawing.mesh_png(layout)


@pytest.mark.slow
def test_a_cluster_that_is_not_here() -> None:
    """BERT 10B on 128 GPUs: 16 bytes a parameter, cut into 8 (MiCS section 5.1)."""
    command = [sys.executable, "-m", "planner.table", BERT, "--devices=128"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert "128 devices, 16 partition groups of 8" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    each, alone = done.stdout.splitlines()[-2:]
    gigabytes = 16 * (12 * 127 * 2560**2 + 32128 * 2560) / 1e9
    for line, wanted in ((each, gigabytes / 8), (alone, gigabytes)):
        found = re.search(r"([\d.]+) GB in all", line)
        assert found and float(found[1]) == pytest.approx(wanted, rel=5e-3)


@every_row(
    ("arguments", "text"),
    [
        ([BERT, "--devices=12"], "--devices=12 is not a multiple of mesh.devices_per_node=8"),
        ([BERT, "--devices=100", "--devices_per_node=8"], "--devices=100 is not a multiple of --devices_per_node=8"),
        ([FILE, "--config.sharding.partition_size=3"], "sizes that divide: 1, 2, 4, 8"),
        ([BERT, "--config.sharding.partition_size=16"], "--devices=N --devices_per_node=K"),
        ([FILE, "--devices=0"], "--devices=0 must be at least 1"),
        ([FILE, "--devices=100000"], "100000 devices are too many"),
        ([FILE, "--png=no/such/folder/x.png"], "no/such/folder/x.png cannot be made (No"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in refused(capsys, lambda: table.main(["planner.table", *arguments]))


def test_text_of_a_large_mesh_stays_narrow() -> None:
    done = make_experiment(typed(tiny_config(partition_size=1, per_node=8)))
    text = drawing.mesh_text(done.plan.layout)
    assert max(map(len, text.splitlines())) <= drawing.TEXT_WIDTH
    assert re.findall(r"\bd(\d) whole", text) == [str(i) for i in range(8)]
