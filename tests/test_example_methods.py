"""examples/methods/config.py: its choices and refusals, and saved runs whose methods were part of the core."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.examples import METHODS, example_methods  # noqa: F401 (fixture)
from support.four_nodes import config as config_with
from support.running import ROOT, arguments, arrays, check_same_end, rows, run_here, stop_after
from support.tables import every_row

from configs import command_line
from configs.schema import SETTINGS, CompressionConfig, Config, flat, nested
from configs.schema.own import OWN
from examples.methods import demo, dgc, power_sgd, rotation, sparse_loco, utilisation
from training.experiment import make_experiment
from training.resume import Start, check_same_run

FILE = f"--config={ROOT}/examples/methods/config.py"
QUICKSTART = f"--config={ROOT}/configs/quickstart.py"


@pytest.fixture(autouse=True)
def only_registered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it, and what others have registered is unknown in it."""
    for topic in ("all_reduce", "codec", "interval"):
        monkeypatch.setitem(OWN, topic, {})


def parse(file: str, **keys: Any) -> Config:
    words = [f"--config.{key.replace('__', '.')}={value}" for key, value in keys.items()]
    return command_line.parse(["train.py", file, *words])


def started_from(saved: dict[str, Any] | None) -> Start:
    """Returns the start of a run that was saved with a config; None: nothing was saved."""
    return Start(restored=None if saved is None else cast(Any, SimpleNamespace(config=saved)), logged=3)


def test_it_is_any_config_with_further_methods() -> None:
    for name in METHODS:
        optimizer = METHODS[name].takes_over or "adamw"
        found = parse(FILE, compression__all_reduce=name, optimizer__name=optimizer)
        assert found.values == parse(QUICKSTART, optimizer__name=optimizer).values | {"compression.all_reduce": name}
    assert parse(f"{FILE}:digits:vit") == parse(f"--config={ROOT}/configs/digits.py:vit")
    with pytest.raises(ValueError, match=r"^config.py:quick is not known; configs/quick.py does not exist$"):
        parse(f"{FILE}:quick")


def test_a_rotated_codec_encodes_groups_by_a_hadamard_matrix() -> None:
    """The matrix is orthogonal, and an outlier costs the other values of its block less than without it."""
    codec = rotation.int4_rotated(CompressionConfig(block=64))
    matrix = np.ones((1, 1))
    while len(matrix) < rotation.GROUP:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    matrix /= len(matrix) ** 0.5
    x = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    x[:, ::64] = 30
    by_hand = (x.reshape(3, 4, 32) @ matrix).reshape(3, 128).astype(np.float32)
    np.testing.assert_allclose(rotation.rotated(jnp.asarray(x)), by_hand, atol=1e-5)
    payload = codec.encode(jnp.asarray(x), jax.random.key(0))
    decoded = (np.asarray(codec.codec.decode(payload)).reshape(3, 4, 32) @ matrix.T).reshape(3, 128)
    np.testing.assert_allclose(codec.decode(payload), decoded, atol=1e-4)
    plain = codec.codec.decode(codec.codec.encode(x))
    assert np.linalg.norm(decoded - x) < 0.5 * np.linalg.norm(plain - x)
    with pytest.raises(ValueError, match=r"^compression.block=40 must be a multiple of 32 for int4_rotated$"):
        rotation.int4_rotated(CompressionConfig(block=40))


@every_row("name", METHODS)
def test_without_it_an_error_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"all_reduce={name} is not known; .*; examples/methods/config.py registers"):
        parse(QUICKSTART, compression__all_reduce=name)


def test_a_mistyped_name_is_corrected_instead() -> None:
    with pytest.raises(ValueError, match=r"all_reduce=int88 is not known; .*; did you mean int8\?$"):
        parse(QUICKSTART, compression__all_reduce="int88")


@every_row("key", SETTINGS)
def test_a_key_that_was_a_setting_names_it(key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} is not a key any more; .* such as examples/methods/config.py$"):
        parse(FILE, **{key: 3})


def test_a_run_of_an_older_version_goes_on_with_it() -> None:
    """Whose config has the settings as keys; without the file one line says what is missing."""
    keys = {"compression__all_reduce": "power_sgd"}
    today = parse(FILE, **keys)
    settings = {"compression.rank": 2, "compression.sparsity": 0.999, "compression.feedback_decay": 0.95}
    saved = nested(flat(today.to_dict()) | settings)
    check_same_run(saved, today, Path("run"))
    (warning,) = started_from(saved).warnings
    assert "compression.rank=2, compression.sparsity=0.999" in warning and "file gives power_sgd: they must" in warning
    assert started_from(today.to_dict()).warnings == started_from(None).warnings == []
    assert started_from(nested(flat(parse(QUICKSTART).to_dict()) | settings)).warnings == [], "no method uses them"
    OWN["all_reduce"].clear()
    other = parse(QUICKSTART)
    with pytest.raises(ValueError, match="^run holds a run with compression.all_reduce=power_sgd, which this --config"):
        check_same_run(saved, other, Path("run"))


def test_a_run_with_a_target_of_utilisation_goes_on_with_it() -> None:
    """Its interval was chosen by the same rule, whose target is the config file's now."""
    keys = {"local_sgd__inner_steps": 10}
    today = parse(FILE, **keys, local_sgd__interval="utilisation")
    saved = flat(today.to_dict()) | {"local_sgd.target_utilisation": 0.95}
    del saved["local_sgd.interval"]
    check_same_run(nested(saved), today, Path("run"))
    fixed = parse(FILE, **keys)
    check_same_run(nested(saved | {"local_sgd.target_utilisation": 0.0}), fixed, Path("run"))
    with pytest.raises(ValueError, match="local_sgd.interval was 'utilisation' and is 'fixed'"):
        check_same_run(nested(saved), fixed, Path("run"))
    OWN["interval"].clear()
    with pytest.raises(ValueError, match="interval=utilisation is not known; one of fixed; examples/methods/config.py"):
        parse(QUICKSTART, **keys, local_sgd__interval="utilisation")


@every_row(
    ("make", "said"),
    [
        (lambda: power_sgd.method(rank=0), "rank=0 of PowerSGD must be at least 1"),
        (lambda: sparse_loco.method(sparsity=1.0), "sparsity=1.0 must be between 0 and 1, and decay=0.95 from 0 to 1"),
        (lambda: sparse_loco.method(sparsity=0.0), "sparsity=0.0 must be"),
        (lambda: demo.method(decay=1.1), "sparsity=0.999 must be between 0 and 1, and decay=1.1 from 0 to 1"),
        (lambda: demo.method(decay=-0.1), "decay=-0.1 from 0 to 1"),
        (lambda: dgc.method(sparsity=1.0), "sparsity=1.0 of DGC must be between 0 and 1"),
        (lambda: utilisation.Utilisation(0.0), "target=0.0 of Utilisation must be between 0 and 1"),
        (lambda: utilisation.Utilisation(1.0), "target=1.0 of Utilisation must be"),
    ],
)
def test_bad_settings_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.usefixtures("example_methods")
def test_demo_refuses_a_wider_optimizer_state() -> None:
    changes = {"compression.all_reduce": "demo", "optimizer.name": "sgd", "sharding.partition_size": 0}
    with pytest.raises(ValueError, match=r"^compression.all_reduce=demo needs gradients and optimizer state in one sc"):
        make_experiment(config_with(changes | {"sharding.strategy": "zero1"}))


# ------------------------------------------------------------------------------------------------------- a whole run
@pytest.mark.slow
def test_dgc_trains_and_resumes_with_the_velocities_of_each_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values and places of 1 % cross nodes; it takes the place of SGD, and of no other optimizer."""

    def train(name: str, stop: int = 0, optimizer: str = "sgd") -> int:
        OWN["all_reduce"].clear()  # as in another process
        OWN["interval"].clear()
        keys = {"compression__all_reduce": "dgc", "optimizer__name": optimizer}
        words = arguments(tmp_path / name, **keys)[1:]
        return run_here(f"{FILE}:quickstart", *words, hooks=[stop_after(stop)] if stop else [])

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert train("whole") == 0
    found = json.loads((whole / "collectives.json").read_text())["collectives"]
    sent = [one for one in found if one["axes"] == ["replica_inter"] and one["kind"] == "all-gather"]
    assert {one["dtype"] for one in sent} == {"f32", "s32"}

    assert train("resumed", stop=6) == 75
    kept = {name: x for name, x in arrays(resumed, 6).items() if ".velocity." in name}
    assert kept and all(len(x) == 4 and np.abs(x).max() > 0 for x in kept.values())
    assert all(np.any(x[0] != x[1]) for x in kept.values())
    shards = [x[0].size // 2 for x in kept.values()]  # of the two devices of a node
    fraction = sum(max(1, round(size / 100)) for size in shards) / sum(shards)
    assert [row["all_reduce_fraction_sent"] for row in rows(whole)] == pytest.approx([fraction] * 10, rel=1e-5)
    capsys.readouterr()
    assert train("resumed") == 0
    assert "resumed at step 6 of 10" in capsys.readouterr().out
    check_same_end(resumed, whole)
    assert train("other", optimizer="adamw") == 2
    assert "set optimizer.name=sgd" in capsys.readouterr().err
