"""docs/extending.md: every listing is a config file outside the repository that trains and uses its definitions."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extending_page import LISTINGS
from support.running import ROOT, arrays, manifest, rows, run_here, stop_after
from support.tables import check_rows

import models
from configs.register import register
from configs.schema import CompressionConfig, Config, OptimizerConfig, ShardingConfig
from configs.schema.own import OWN
from launch.emulate import __main__ as emulate
from launch.sweeps.plan import plan
from planner import __main__ as planner
from planner import compile as compiling
from sharding.scopes import make_layout
from training import convert, evaluate, generate, trained
from training.experiment import make_experiment
from training.hooks import Hook

RUN: dict[str, Any] = {
    "num_steps": 3,
    "data.seq_len": 16,
    "data.source": "synthetic",
    "batch.global_size": 8,
    "batch.micro_size": 1,
    "elastic.snapshot_every": 0,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 3,
    "eval.every": 0,
    "eval.num_batches": 1,
    "sample.length": 0,
    "optimizer.warmup_steps": 0,
}
DECODER = {"num_layers": 1, "hidden": 32, "intermediate": 32, "num_heads": 2, "num_kv_heads": 2}
LION = LISTINGS["An optimizer"]


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts in a separate folder with a separate cache; registrations of a test are removed after it."""
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield
    for names in OWN.values():
        names.clear()


def flags(*, model: bool = True, **changes: Any) -> list[str]:
    """Returns a small run's flags; `changes` are keys with `__` for a dot, None for the listing's value."""
    keys = RUN | {f"model.{key}": value for key, value in DECODER.items() if model}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"--config.{key}={value}" for key, value in keys.items() if value is not None]


def train(listing: str, workdir: Path | str, *more: str, hooks: Sequence[Hook] = (), **changes: Any) -> int:
    """Runs a listing as a file of another folder, named relative to this one."""
    file = Path("elsewhere", "mine.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(listing)
    args = [f"--config={file}", f"--workdir={workdir}", *flags(**changes), *more]
    return run_here(*args, hooks=hooks, make=make_experiment)


def tokens(cache: Path) -> list[bytes]:
    """Returns the token streams in the cache, one byte per token, the longest first."""
    files = [np.fromfile(file, np.uint16).astype(np.uint8).tobytes() for file in cache.glob("streams/*/tokens.bin")]
    return sorted(files, key=len, reverse=True)


def all_reduce(workdir: Path) -> list[dict[str, Any]]:
    """Returns the collectives between nodes of the compiled program."""
    found = json.loads((workdir / "collectives.json").read_text())["collectives"]
    return [collective for collective in found if collective["axes"] == ["replica_inter"]]


# ------------------------------------------------------------------------------ what each listing of the page changes


def a_model(workdir: Path) -> None:
    # the override of a key that only the file declares counts: a table of 300 by 300 and nothing else
    assert json.loads((workdir / "environment.json").read_text())["num_params"] == 300 * 300
    assert rows(workdir)[0]["loss"] == pytest.approx(math.log(300), abs=0.02)
    OWN["model"].clear()  # as in another process: the run remembers the file
    assert evaluate.evaluate(trained.of_run(workdir))["validation_loss"] == pytest.approx(math.log(300), abs=0.02)


def a_data_set(workdir: Path) -> None:
    train, validation = tokens(workdir.parent / "cache")
    sums = [(b, f"{a} + {b} = {a + b}\n\0") for a in range(100) for b in range(100)]
    assert train.decode() == "".join(text for b, text in sums if b % 10)
    assert validation.decode() == "".join(text for b, text in sums if not b % 10)


def a_tokenizer(workdir: Path) -> None:
    # "file 7: the quick brown fox\n", five times a file, 60 files in two splits
    found = [
        0 if c == "\0" else 1 if not c.isalpha() else ord(c) - ord("a") + 2 for c in "file    the quick brown fox "
    ]
    streams = b"".join(tokens(workdir.parent / "cache"))
    assert streams.count(bytes(found)) >= 5 * 10 and set(streams) == {0, *found}
    sample = (workdir / "sample.txt").read_text()
    assert sample.startswith("the") and len(sample) > 3 and re.fullmatch("[a-z \n]*", sample)


def a_codec(workdir: Path) -> None:
    # the replica all-reduce scatters and gathers two bits per value of a matrix (each device has half of it), for
    # matrices in the layers and outside them
    shapes = [leaf["shape"] for leaf in manifest(workdir, 3)["tree"] if leaf["path"].startswith("params.")]
    matrices = sum(math.prod(shape) for shape in shapes if len([size for size in shape if size > 1]) > 1) // 2
    coded = [c for c in all_reduce(workdir) if c["dtype"] == "u8"]
    for kind in ("all-to-all", "all-gather"):
        payloads = [c["payload_bytes"] for c in coded if c["kind"] == kind]
        assert len(payloads) == 2 and sum(payloads) == matrices / 4
    assert len(coded) == 4
    codec, x = OWN["codec"]["two_bit"](CompressionConfig()), [0.005, 0.0049, -0.006, 0, *(4 * [-1.0]), *(8 * [0.0])]
    payload = codec.encode(jnp.float32([x]), jax.random.key(0))
    assert bytes(payload[0]) == bytes([0b11_00_10_00, 0b10_10_10_10, 0, 0])
    assert codec.decode(payload)[0].tolist() == pytest.approx([0.005, 0, -0.005, 0, *(4 * [-0.005]), *(8 * [0.0])])


def a_method(workdir: Path) -> None:
    # the replica all-reduce returns -1, 0 or 1 for every parameter: the square of its norm counts parameters
    # without a tie
    num_params = json.loads((workdir / "environment.json").read_text())["num_params"]
    for row in rows(workdir):
        voted = row["grad_norm"] ** 2
        assert voted == pytest.approx(round(voted), rel=1e-6) and num_params / 4 < voted <= num_params


def a_strategy(workdir: Path) -> None:
    sharding = Config.from_dict(json.loads((workdir / "config.json").read_text())).sharding
    by_hand = ShardingConfig(strategy="custom", parameters="node", gradients="node", optimizer="all")
    made, wanted = (make_layout(one, num_nodes=4, devices_per_node=2) for one in (sharding, by_hand))
    assert made == wanted
    assert {c["kind"] for c in all_reduce(workdir)} >= {"reduce-scatter", "all-gather"}  # quickstart's has neither


def moved(workdir: Path, step: int) -> np.ndarray:
    """Returns by how much each parameter has moved until `step`."""
    config = Config.from_dict(json.loads((workdir / "config.json").read_text()))
    new = jax.tree_util.tree_leaves_with_path(models.build(config.model).init(jax.random.key(config.seed)))
    after = arrays(workdir, step)
    return np.concatenate(
        [np.abs(after[f"params.{jax.tree_util.keystr(k, simple=True, separator='.')}"] - x).ravel() for k, x in new]
    )


def an_optimizer(workdir: Path) -> None:
    # Lion's first step is the learning rate in every entry, for any gradient
    distance = moved(workdir, 1)
    still = distance == 0  # an embedding's rows of ids that have not occurred
    np.testing.assert_allclose(distance[~still], rows(workdir)[0]["learning_rate"], rtol=1e-2)
    assert still.mean() < 0.7


def a_schedule(workdir: Path) -> None:
    # one step of warm-up, then the peak over the root of the steps
    rates = [row["learning_rate"] for row in rows(workdir)]
    np.testing.assert_allclose(np.array(rates) / rates[0], 1 / np.sqrt([1, 1, 2]), rtol=1e-5)


CHECKS: dict[str, Callable[[Path], None]] = {
    "A model": a_model,
    "A data set": a_data_set,
    "A tokenizer": a_tokenizer,
    "A codec": a_codec,
    "A method of the replica all-reduce": a_method,
    "A strategy": a_strategy,
    "An optimizer": an_optimizer,
    "A schedule": a_schedule,
}
# listings that one run can use together, and the keys of that run
RUNS: dict[tuple[str, ...], dict[str, Any]] = {
    ("A model",): {"model": False, "model__vocab_size": 300},
    ("A data set", "An optimizer", "A schedule"): {"data__source": None, "optimizer__warmup_steps": 1},
    ("A tokenizer", "A codec"): {
        "data__source": "folder",
        "data__path": "corpus",
        "sample__length": 8,
        "sample__prompt": "the",
    },
    ("A method of the replica all-reduce",): {},
    ("A strategy",): {},
}
# A config file with the changes of each file to the quickstart's config.
TOGETHER = """
import runpy
import shutil
from configs import quickstart
from configs.schema import flat

def get_config():
    config, plain = quickstart.get_config(), flat(quickstart.get_config().to_dict())
    for file in {files}:
        made = flat(runpy.run_path(file)["get_config"]().to_dict())
        config.update_from_flattened_dict({{key: value for key, value in made.items() if value != plain.get(key)}})
    return config
"""


def test_the_page_has_a_listing_for_each_topic() -> None:
    """But for `interval`, which examples/methods/utilisation.py shows."""
    assert LISTINGS.keys() == CHECKS.keys() == {title for titles in RUNS for title in titles}
    listed = {re.findall(r'^register\("(\w+)"', code, re.MULTILINE)[0] for code in LISTINGS.values()}
    assert listed == OWN.keys() - {"interval"}


QUICK = [("A model",)]  # the others are slow


@pytest.mark.parametrize("titles", [pytest.param(t, marks=[pytest.mark.slow] * (t not in QUICK)) for t in RUNS])
@pytest.mark.usefixtures("corpus")
def test_a_listing_trains_and_what_it_defines_is_used(titles: tuple[str, ...], tmp_path: Path) -> None:
    files = []
    for title in titles:
        files.append(str(tmp_path / f"{title}.py"))
        Path(files[-1]).write_text(LISTINGS[title])
        assert len(LISTINGS[title].splitlines()) < 70
    assert train(LISTINGS[titles[0]] if len(titles) == 1 else TOGETHER.format(files=files), "run", **RUNS[titles]) == 0
    for title in titles:
        CHECKS[title](tmp_path / "run")


@pytest.mark.slow
def test_the_learning_rate_of_an_optimizer_with_its_own_is_not_logged(tmp_path: Path) -> None:
    listing = LION.replace("lion(schedule", "lion(lambda step: 1e-3")
    assert train(listing, "run", num_steps=2) == 0
    assert moved(tmp_path / "run", 2).max() == pytest.approx(2e-3, rel=1e-2)
    assert [row.get("learning_rate") for row in rows(tmp_path / "run")] == [None] * 2


def test_a_model_that_cannot_be_sampled_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(LISTINGS["A model"], "run", model=False, num_steps=1, sample__length=8) == 0
    said = "warning: no sample: model.kind=bigram cannot be sampled; "
    assert capsys.readouterr().out.count(said) == 1 and not (tmp_path / "run" / "sample.txt").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("corpus")
def test_a_run_remembers_the_file_that_registered_its_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"data__source": "folder", "data__path": "corpus", "num_steps": 1}
    assert train(LISTINGS["A tokenizer"], "run", **changes) == 0
    file, measure = Path("elsewhere", "mine.py"), ["", "--workdir=run", "--num_batches=1"]
    OWN["tokenizer"].clear()  # as in another process
    assert evaluate.main(measure) == 0
    OWN["tokenizer"].clear()
    Path("run", "replicas", "0").mkdir(parents=True)  # replicas have separate directories for such files
    Path("run", "environment.json").rename("run/replicas/0/environment.json")
    assert trained.of_run(tmp_path / "run").tokenizer().decode(np.int32([2, 3])) == "ab"
    OWN["tokenizer"].clear()
    environment = Path("run/replicas/0/environment.json")
    told = environment.read_text()
    shutil.copy(file, "run/theirs.py")
    environment.write_text(told.replace("elsewhere/mine.py", "run/theirs.py"))  # a stranger's directory runs no code
    assert evaluate.main(measure) == 2
    assert "whose config file " in capsys.readouterr().err
    environment.write_text(told)
    file.rename("other.py")
    assert evaluate.main(measure) == 2
    assert "run was trained with data.tokenizer=letters, which " in capsys.readouterr().err
    assert generate.main(["", "--workdir=run", "--config=other.py", "--prompt=a", "--length=2"]) == 0
    assert convert.main(["", "--to_hugging_face=out", "--workdir=run"]) == 0


# ---------------------------------------------------------------------------------------------- names, and mistakes


@pytest.mark.slow
def test_a_run_resumes_with_the_file_and_names_what_is_missing_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(LION, "run", hooks=[stop_after(2)]) == 75
    OWN["optimizer"].clear()  # as in another process
    quickstart = f"--config={ROOT}/configs/quickstart.py"
    assert run_here(quickstart, "--workdir=run", *flags()) == 2
    assert capsys.readouterr().err == (
        "error: run holds a run with optimizer.name=lion, which this --config does not register; give the config file "
        "that does, or choose another --workdir\n"
    )
    assert run_here(quickstart, "--workdir=run", *flags(optimizer__name="lion")) == 2
    assert "optimizer.name=lion is not known; one of adamw, " in capsys.readouterr().err
    assert train(LION, "run") == 0
    assert "resumed at step 2 of 3" in capsys.readouterr().out


def test_names_and_sizes_that_are_refused() -> None:
    # names that cannot be registered
    def check(arguments: tuple[str, str], message: str) -> None:
        register("all_reduce", "mine", None)
        with pytest.raises(ValueError, match=message):
            register(*arguments, None)

    check_rows(
        [
            (("optimiser", "lion"), r"^register\('optimiser', 'lion'\): the topic must be optimizer, or another of"),
            (("optimizer", "adamw"), r"^register\('optimizer', 'adamw'\): optimizer.name=adamw exists already"),
            (("model", "my model"), r"^register\('model', 'my model'\): the name must be letters, digits and _"),
            (("codec", "one_bit_adam"), "compression.all_reduce=one_bit_adam exists already"),
            (("codec", "mine"), "compression.all_reduce=mine exists already"),
        ],
        check,
    )

    # errors list registered names
    register("optimizer", "lion", None)
    with pytest.raises(ValueError, match=r"one of adamw, .*muon, lion; did you mean lion\?$"):
        OptimizerConfig(name="lino")

    # a strategy that does not fit is named
    register("strategy", "thirds", (3, 3, 3))
    with pytest.raises(ValueError, match="^sharding.strategy=thirds, parameters=3: a partition group of 3 devices"):
        make_layout(ShardingConfig(strategy="thirds"), num_nodes=4, devices_per_node=2)


def test_an_error_in_the_file_is_not_hidden_by_an_unknown_key(capsys: pytest.CaptureFixture[str]) -> None:
    listing = LISTINGS["A model"].replace("Bigram)", "Bigramm)")
    assert train(listing, "run", "--config.model.tables=3", model=False) == 2
    assert "Bigramm)`: name 'Bigramm' is not defined (NameError)\n" in capsys.readouterr().err
    assert train(LISTINGS["A model"], "run", "--config.model.vocab_sizes=3", model=False) == 2
    assert "model.vocab_sizes is not a key; the nearest is model.vocab_size" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- other programs with --config


def listed(title: str) -> Path:
    """Returns the path, relative to the current folder, of a file with a listing."""
    file = Path("mine.py")
    file.write_text(LISTINGS[title])
    return file


def test_a_sweep_plans_runs_of_the_file(tmp_path: Path) -> None:
    runs = plan(str(listed("An optimizer")), [{"seed": 0}, {"optimizer.name": "adamw"}], workdir=tmp_path)
    assert [run.train_command[2] for run in runs] == [f"--config={tmp_path / 'mine.py'}"] * 2  # they start elsewhere


@pytest.mark.slow
def test_the_planner_compiles_again_when_the_file_changes() -> None:
    """For a change of the computation, not of the text."""
    file = listed("An optimizer")
    found = []
    for before, after in (("", ""), ("", "# a comment\n"), ("b2=0.99", "b2=0.9")):
        file.write_text(file.read_text().replace(before, after, 1))
        words = [f"--config={file}", *flags(), "--config.mesh.num_cpu_devices=0"]
        found.append(compiling.compile_step(words, nodes=1, devices_per_node=2, target="cpu").from_cache)
    assert found == [False, True, False]


@pytest.mark.slow
def test_emulated_nodes_see_the_file() -> None:
    file = listed("An optimizer")
    assert {file, file.parent} <= {*emulate.named_paths(["train.py", f"--config={file}:{file.parent}"])}


@pytest.mark.slow
def test_emulated_nodes_see_what_the_file_names(tmp_path: Path) -> None:
    """But not its RAM disk, of which each node has its own."""
    (tmp_path / "chats").mkdir()
    changes = f"config.data.mixture = '1 folder:{tmp_path}/chats, 1 stdlib_text'; config.elastic.memory_dir = '/tmp'"
    source = f"from configs import quickstart\ndef get_config():\n config = quickstart.get_config(); {changes}\n"
    Path("mine.py").write_text(f"{source} return config\n")
    found = emulate.named_paths(["train.py", "--config=mine.py", f"--config.sample.prompt={'x' * 300}"])
    assert tmp_path / "chats" in found and not {Path("/tmp"), Path("/dev/shm")} & {*found}
    assert tmp_path / "chats" not in emulate.named_paths(["train.py", "--config=mine.py", "--config.sead=1"])


@pytest.mark.slow
def test_the_planner_prices_the_file_s_codec_in_every_hop(capsys: pytest.CaptureFixture[str]) -> None:
    codecs = [
        f"--config.compression.{key}=two_bit" for key in ("all_reduce", "all_gather_inter", "reduce_scatter_inter")
    ]
    words = [f"--config={listed('A codec')}", *flags(sharding__partition_size=4), "--cluster=emulated", "--nodes=4"]
    assert planner.main(["planner", *words, *codecs]) == 0
    assert "mics(4)" in capsys.readouterr().out
