"""The ladder: replicas as arrays of one device, the text of pinned packages, the rule of tuning, and the laws."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from lab.benchmarks import ladder, ladder_table, site_packages
from lab.virtual_replicas import CODECS_FROM, VirtualReplicas, divided
from training.experiment import make_experiment

STEPS, RATE, REPLICAS = 4, 2e-2, 4
WAYS: dict[str, Any] = {
    "int8": {"compression.all_reduce": "int8", "sharding.overlap": "off"},  # all layers share blocks, as here
    "delayed": {"compression.delayed": True},
    "DiLoCo int4": {"compression.all_reduce": "int4", "local_sgd.inner_steps": 2},
    "MuLoCo": {"optimizer.name": "muon", "local_sgd.inner_steps": 2, "local_sgd.outer_momentum": 0.6},
}


def small(**keys: Any) -> Any:
    """A decoder of 2 layers for rows of 8 bytes, on 4 devices that are nodes and replicas."""
    config = base.get_config()
    sizes = {"num_layers": 2, "hidden": 16, "intermediate": 24, "num_heads": 2, "num_kv_heads": 2, "max_len": 8}
    fixed = {f"model.{name}": value for name, value in sizes.items()} | {"model.remat": "none", "data.seq_len": 8}
    fixed |= {"sharding.strategy": "ddp", "sharding.partition_size": 0, "mesh.devices_per_node": 1}
    fixed |= {"batch.global_size": 8, "batch.micro_size": 2, "compression.block": 64, "optimizer.warmup_steps": 2}
    config.update_from_flattened_dict(fixed | {"num_steps": STEPS} | keys)
    return base.typed(config)


@pytest.mark.slow
@pytest.mark.usefixtures("muon_in_float32")
@pytest.mark.parametrize("way", WAYS)
def test_virtual_replicas_train_like_replicas_on_devices(way: str) -> None:
    """Parameters after four steps, with two exchanges of local SGD."""
    tokens = np.random.default_rng(0).integers(0, 256, (STEPS, 8, 9)).astype(np.int32)
    virtual = VirtualReplicas(small(**WAYS[way], **{"optimizer.learning_rate": 1.0}), REPLICAS)
    if jax.__version_info__ < CODECS_FROM and "compression.all_reduce" in WAYS[way]:
        with pytest.raises(ValueError, match=r"need jax 0\.11, not .*; use Python 3\.12$"):
            virtual.init(0)
        return
    found, losses = virtual.steps(virtual.init(0), jnp.float32(RATE), divided(tokens, REPLICAS))
    ex = make_experiment(small(**WAYS[way], **{"optimizer.learning_rate": RATE}), jax.devices()[:REPLICAS])
    state, step = ex.init_state(), ex.compile_train_step()
    for number, rows in enumerate(tokens):
        batch = {"tokens": rows[None, :, :-1], "targets": rows[None, :, 1:]}
        batch["weights"] = np.ones(batch["tokens"].shape, np.float32)
        shardings = jax.tree.map(lambda x: x.sharding, ex.batches.shapes)
        state, metrics = step(state, jax.device_put(batch, shardings))
        assert np.sum(metrics["loss"]) / np.sum(metrics.get("weight", 1)) == pytest.approx(losses[number], rel=1e-4)
    for ours, wanted in zip(jax.tree.leaves(found.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=2e-5)


# ------------------------------------------------------------------------------------------------------- the text


def install(folder: Path, name: str, sources: dict[str, str], version: str = "1.0") -> None:
    """Installs a package of some source files into a folder."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    for file, text in sources.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in sources))


def test_the_text_of_packages_is_the_same_everywhere(tmp_path: Path) -> None:
    """In another folder, and in another order of files. Equal files and empty ones are written once, or not at all."""
    sources = {
        "a/x.py": "x = 1\n",
        "a/y.py": "y = 2\n",
        "a/copy.py": "x = 1\n",
        "a/__init__.py": "",
        "a/data.txt": "no",
    }
    one, other = tmp_path / "one", tmp_path / "other"
    install(one, "a", sources)
    install(other, "a", dict(reversed(sources.items())))
    tables = [site_packages.table_of(iter([("a", "1.0")]), [str(path)]) for path in (one, other)]
    assert tables[0] == tables[1] and tables[0].splitlines()[1].startswith("a,1.0,3,18,")
    (tmp_path / "list.csv").write_text(tables[0])
    rows = site_packages.rows_of(tmp_path / "list.csv")
    for number, path in enumerate((one, other)):
        assert site_packages.write(tmp_path / str(number), rows, [str(path)]) == site_packages.write(
            tmp_path / str(number), rows, []
        )  # a complete folder needs no packages
    texts = [{file.name: file.read_text() for file in (tmp_path / str(n)).iterdir()} for n in (0, 1)]
    assert texts[0] == texts[1]
    assert sum(text.count("x = 1") for text in texts[0].values()) == 1


def test_another_package_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    install(tmp_path / "one", "a", {"a.py": "x = 1\n"})
    (tmp_path / "list.csv").write_text(site_packages.table_of(iter([("a", "1.0")]), [str(tmp_path / "one")]))
    rows = site_packages.rows_of(tmp_path / "list.csv")
    install(tmp_path / "two", "a", {"a.py": "x = 2\n"})
    install(tmp_path / "three", "a", {"a.py": "x = 1\n"}, version="1.1")
    for folder, message in {
        "two": "^a 1.0 has other source files than in site_packages.csv: pip install .*a==1.0$",
        "three": "^a 1.0 is not installed, but 1.1: ",
        "none": "^a 1.0 is not installed, but nothing: ",
    }.items():
        with pytest.raises(ValueError, match=message):
            site_packages.write(tmp_path / "to", rows, [str(tmp_path / folder)])


def test_the_list_names_the_pinned_versions() -> None:
    pinned = dict(site_packages.pinned(site_packages.CONSTRAINTS.read_text()))
    rows = site_packages.rows_of(site_packages.PACKAGES)
    assert {row["package"]: row["version"] for row in rows}.items() <= pinned.items()
    assert sum(int(row["bytes"]) for row in rows) > 140e6  # 20 bytes for each of 7 M parameters


# ----------------------------------------------------------------------------------------------- tuning and laws


def test_the_sizes_are_what_they_are_called() -> None:
    """A run has 19.9 to 20.1 bytes a parameter, in whole intervals of 10, 30 and 100 steps."""
    for size in ladder.SIZES:
        parameters = ladder.parameters(size)
        assert parameters == pytest.approx(1e6 * float(size[:-1]), rel=0.08)
        steps = ladder.steps_of(parameters)
        assert steps % 300 == 0
        assert steps * 16 * 64 / parameters == pytest.approx(20, abs=0.1)


def rate_line(size: str, rate: float, loss: float) -> dict[str, Any]:
    """A line of a run that tunes AdamW's learning rate."""
    return {"part": "rates", "size": size, "method": "dense AdamW", ladder.RATE: rate, "validation_loss": loss}


def test_the_learning_rate_follows_a_power_law_through_the_best_rates() -> None:
    """Losses are parabolas over log(rate) around 0.01 at 0.05M, around 0.005 at 0.1M."""
    best = {"0.05M": 0.01, "0.1M": 0.005}
    rates = ladder.GRID["dense AdamW"]
    lines = [rate_line(size, rate, 2 + np.log(rate / at) ** 2) for size, at in best.items() for rate in rates]
    lines += [rate_line("0.1M", 2e-3, 2 + np.log(2e-3 / 0.005) ** 2)]
    exponent = np.log(0.5) / np.log(ladder.parameters("0.1M") / ladder.parameters("0.05M"))
    for size in ladder.SIZES:
        wanted = 0.01 * (ladder.parameters(size) / ladder.parameters("0.05M")) ** exponent
        assert ladder.learning_rate(lines, "DiLoCo", size) == pytest.approx(wanted, rel=6e-3)
    assert ladder.best_rate({1.0: 3.0, 2.0: 4.0, 4.0: 5.0}) == 1.0  # at an edge
    with pytest.raises(ValueError, match=r"dense AdamW: runs at 0.004, .*, 0.032 are missing: .* --part=rates$"):
        ladder.learning_rate([], "DiLoCo", "1M")
    without = [line for line in lines if (line["size"], line["learning_rate"]) != ("0.1M", 1.6e-2)]
    with pytest.raises(ValueError, match="runs at 0.016 are missing"):
        ladder.learning_rate(without, "DiLoCo", "1M")
    assert ladder.learning_rate(without, "DiLoCo", "0.05M") == pytest.approx(0.01, rel=6e-3)


def test_a_law_is_found_and_its_intervals_hold_new_runs() -> None:
    """Gaps of 2 % M^0.5 (N / 1e5)^-0.4 with noise: nine of ten new runs at least are inside the prediction interval."""
    rng = np.random.default_rng(0)
    gap = lambda n, m: 0.02 * m**0.5 * (n / 1e5) ** -0.4 * np.exp(0.1 * rng.standard_normal())
    runs = [(n, m, gap(n, m)) for n in (50_000, 100_000, 200_000) for m in (2, 4, 8) for _ in range(3)]
    law = ladder_table.fit(runs)
    assert law
    np.testing.assert_allclose(law.terms[1:], [-0.4, 0.5], atol=0.1)
    _, low, high = law.predict(1_000_000, 16)
    assert 0.9 <= np.mean([low <= gap(1_000_000, 16) <= high for _ in range(200)]) < 1
    assert ladder_table.fit([*runs, (50_000, 2, -0.01)]) is None  # no logarithm
    assert ladder_table.fit(runs[:9]) is None  # a single size
