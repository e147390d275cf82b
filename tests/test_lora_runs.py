"""Runs that train adapters: resumed on other meshes, with a base that is read again, and mistakes that are one line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.hugging_face_folders import HERE, batch_loss, changed, flags, run_convert, section
from support.hugging_face_reference import FOLDER
from support.mistakes import error_of
from support.refusals import refused
from support.running import arrays, losses, run_here, stop_after
from support.tables import every_row, raised

import models
from models import hugging_face, peft
from models.lora import ADAPTERS
from models.model import Params
from sharding.spec import is_spec, path_name
from training import convert, experiment, generate

LORA = {"model__lora_rank": 2, "model__lora_alpha": 4}
WEIGHTS = hugging_face.SINGLE_FILE


def train(workdir: Path, hooks: Any = (), **changes: Any) -> int:
    return run_here(*flags("llama", **LORA | changes), f"--workdir={workdir}", hooks=hooks)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 steps, with checkpoints of the last two and its adapters in PEFT's layout next to it."""
    workdir = tmp_path_factory.mktemp("lora") / "run"
    assert train(workdir, num_steps=3, checkpoint__every=1) == 0
    assert run_convert("convert", f"--to_peft={workdir.parent / 'adapters'}", f"--workdir={workdir}") == 0
    return workdir


@pytest.mark.slow
def test_new_adapters_change_nothing_at_first_and_only_they_are_kept(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.testing.assert_allclose(losses(trained)[0], batch_loss("llama"), rtol=1e-5)
    kept = {name: x for name, x in arrays(trained, 3).items() if name.startswith(("params", "frozen"))}
    again = ("convert", f"--to_peft={trained.parent / 'adapters'}", f"--workdir={trained}")
    assert "adapters holds adapters already; choose an empty folder" in refused(capsys, lambda: run_convert(*again))
    assert len(kept) == 14 and all(name.endswith(("lora_a", "lora_b")) and x.all() for name, x in kept.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mics", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_same(strategy: str, trained: Path, tmp_path: Path) -> None:
    """Bit by bit on the same mesh, and on another one up to the order of additions."""
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    shutil.rmtree(workdir / "checkpoints" / "3")
    (workdir / "summary.json").unlink()
    mesh = {} if strategy == "mics" else {"sharding__strategy": strategy, "sharding__partition_size": 0}
    assert train(workdir, num_steps=3, checkpoint__every=1, **mesh) == 0
    before, after = arrays(trained, 3), arrays(workdir, 3)
    assert before.keys() == after.keys()
    for name, x in before.items():
        np.testing.assert_allclose(after[name], x, rtol=0 if strategy == "mics" else 1e-4, atol=1e-6 * bool(mesh))


@pytest.mark.slow
def test_adapters_in_memory_go_on_in_another_number_of_replicas(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in four groups of two devices, ended in two of four: the base is read again, as it is not kept."""
    workdir, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    how = {"num_steps": 3, "elastic__snapshot_every": 1, "elastic__memory_dir": memory}
    assert train(workdir, hooks=[stop_after(1)], **how) == 75
    done = len(losses(workdir))
    shutil.rmtree(workdir / "checkpoints")
    assert train(workdir, **how, sharding__partition_size=4) == 0
    assert f"resumed at step {done} of 3 in {workdir}, from memory" in capsys.readouterr().out
    np.testing.assert_allclose(losses(workdir), losses(trained), rtol=1e-5)
    before, after = arrays(trained, 3), arrays(workdir, 3)
    for name in (name for name in before if name.startswith("params")):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_another_base_than_that_of_the_adapters_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node that was replaced has another revision in the folder, of the same names and shapes."""
    folder, kept, workdir = changed(FOLDER / "llama", tmp_path / "base"), tmp_path / "kept", tmp_path / "run"
    assert train(workdir, hooks=[stop_after(1)], num_steps=3, model__weights=folder) == 75
    folder.rename(kept)
    values = load_file(changed(kept, folder) / WEIGHTS)
    values["model.layers.1.mlp.up_proj.weight"][0, 5] += 1
    save_file(values, folder / WEIGHTS)
    capsys.readouterr()
    message = f"{workdir} trained adapters of other weights: the files in its model.weights have changed since"
    programs = [
        lambda: train(workdir, num_steps=3, model__weights=folder),
        lambda: run_convert("convert", f"--to_hugging_face={tmp_path / 'out'}", f"--workdir={workdir}"),
        lambda: generate.main(["generate", f"--workdir={workdir}", "--prompt=a"]),
    ]
    for program in programs:
        assert message in refused(capsys, program)
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)  # a copy is the same
    assert train(workdir, num_steps=3, model__weights=folder) == 0
    assert "resumed at step " in capsys.readouterr().out


def test_processes_with_other_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both a base that is kept frozen and the start of a run that trains all parameters."""
    gather = experiment.all_gather
    other = lambda key, value: [*gather(key, value), "another"] if key.topic == "weights" else gather(key, value)
    monkeypatch.setattr(experiment, "all_gather", other)
    for rank in (0, 2):
        keys = LORA | {"model__lora_rank": rank}
        error = error_of(capsys, *flags("llama", **keys), f"--workdir={tmp_path / str(rank)}")
        assert f"model.weights={FOLDER / 'llama'} differs between processes; give all the same files" in error


@pytest.mark.slow
def test_a_run_that_samples_nothing_can_be_sampled(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for length in ([], ["--length=200"]):
        assert generate.main(["generate", f"--workdir={trained}", "--prompt=a", *length]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > 10


@every_row(
    ("name", "targets", "count"),
    [
        *(("llama", "query out down", 3), ("bert", "query out down", 3), ("qwen3_moe", "query out value", 3)),
        *(("mixtral", "query experts", 1 + 3 * 4), ("olmoe", "query gate experts", 1 + 3 * 5)),
    ],
    isolated=True,
)
def test_peft_finds_the_matrices_that_have_adapters_and_no_others(
    name: str, targets: str, count: int, tmp_path: Path
) -> None:
    """By its rule: a module's name is in `target_modules`, or ends with a dot and such a name. They are read back."""
    config = replace(section(FOLDER / name), lora_rank=2, lora_targets=targets)
    model = models.build(config)
    specs = jax.tree_util.tree_leaves_with_path(model.param_specs(), is_leaf=is_spec)
    shapes, rng = {path_name(path): spec.shape for path, spec in specs}, np.random.default_rng(0)
    values = {path: rng.normal(size=shapes[path]).astype(np.float32) for path in shapes if path.endswith(ADAPTERS)}
    file = peft.write(model, tmp_path, values.__getitem__, "")
    abstract = {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HERE) for path, x in values.items()}
    jax.tree.map(np.testing.assert_array_equal, peft.Adapters(model, tmp_path).load(Params(abstract)), values)
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    modules = {tensor.rpartition(".")[0] for tensor in load_file(FOLDER / name / "model.safetensors")}
    found = {module for module in modules if any(f".{module}".endswith(f".{target}") for target in targets)}
    adapted = {tensor.removeprefix("base_model.model.").rpartition(".lora_")[0] for tensor in load_file(file)}
    assert found == adapted and len(found) == count * config.num_layers


def test_adapters_that_peft_would_not_find_are_refused(tmp_path: Path) -> None:
    config = replace(section(FOLDER / "qwen2_moe"), lora_rank=2, lora_targets="query experts")
    message = raised(lambda: peft.write(models.build(config), tmp_path, lambda path: np.zeros(1), ""))
    assert message.endswith("adapters of experts next to a shared expert; use --to_hugging_face")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, pytest.param(np.float16, marks=pytest.mark.slow)])
def test_a_merged_model_has_the_dtype_of_its_base(
    dtype: Any, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded once, after the merge: `W + (alpha / rank) (A B)'`. Matrices without adapters keep their bits."""
    folder, out, kept = tmp_path / "base", tmp_path / "out", arrays(trained, 3)
    before = {name: x.astype(dtype) for name, x in load_file(changed(FOLDER / "llama", folder) / WEIGHTS).items()}
    save_file(before, folder / WEIGHTS)
    monkeypatch.setattr(convert, "check_same_base", lambda *_: None)  # it was trained on another copy
    monkeypatch.setattr(hugging_face, "Weights", lambda model, _, opened=hugging_face.Weights: opened(model, folder))
    assert run_convert("convert", f"--to_hugging_face={out}", f"--workdir={trained}") == 0
    after = load_file(out / WEIGHTS)
    assert json.loads((out / "config.json").read_text())["dtype"] == np.dtype(dtype).name
    assert after.keys() == before.keys() and {x.dtype for x in after.values()} == {np.dtype(dtype)}
    adapted = [f"layers.1.self_attn.{name}_proj.weight" for name in "qkvo"]
    for name, ours in zip(adapted, ("query", "key", "value", "out"), strict=True):
        a, b = (kept[f"params.layers.{ours}.lora_{end}"][1] for end in "ab")
        merged = before[f"model.{name}"].astype(np.float32) + 4 / 2 * (a @ b).T
        np.testing.assert_allclose(
            after[f"model.{name}"].astype(np.float32), merged, rtol=ml_dtypes.finfo(dtype).eps, atol=1e-7
        )
    assert after["lm_head.weight"].tobytes() == before["lm_head.weight"].tobytes()


def other_base(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"base": "0" * 64})


def without_a_tensor(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[max(tensors)]
    save_file(tensors, file)


def with_value(number: float, dtype: Any = np.float32) -> Any:
    """Returns a function that sets one value of a tensor of the adapters in a folder."""

    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        found = load_file(file)
        name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
        found[name] = found[name].astype(dtype)
        found[name][0, 0] = number
        save_file(found, file)

    return change


def configured(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


@every_row(
    ("spoil", "changes", "words"),
    [
        (None, {"model__lora_rank": 3}, "has r=2, but model.lora_rank=3; set it to that"),
        (None, {"model__lora_alpha": 5}, "has lora_alpha=4.0, but model.lora_alpha=5.0; set it to that"),
        (None, {"model__lora_targets": "query"}, "for which model.lora_targets has no place"),
        (other_base, {}, "holds adapters of another base: its names or shapes are not those of this model"),
        (with_value(np.nan), {}, "self_attn.v_proj.lora_B.weight has a NaN or an infinity, with which no model can"),
        (with_value(1, np.int8), {}, "self_attn.v_proj.lora_B.weight has dtype I8; adapters are float32, float16"),
        (without_a_tensor, {}, "has no tensor base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"),
        (configured(use_dora=True), {}, "use_dora=True is not supported; False is"),
        (configured(alora_invocation_tokens=[5]), {}, "alora_invocation_tokens=[5] is not supported; None is"),
        (configured(init_lora_weights="pissa_niter_4"), {}, "init_lora_weights='pissa_niter_4' changes the base"),
        (shutil.rmtree, {}, "adapter_config.json cannot be read (No such file or directory)"),
        (None, {"model__lora_base": "nf4"}, "stores blocks of 64 columns, but"),
        (None, {"model__weights": ""}, "adapters need model.weights, their base"),
    ],
    isolated=True,
)
def test_adapters_that_do_not_fit_are_one_line(
    spoil: Any, changes: dict, words: str, trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = shutil.copytree(trained.parent / "adapters", tmp_path / "adapters")
    if spoil:
        spoil(folder)
    keys = LORA | {"model__lora_weights": folder} | changes
    assert words in error_of(capsys, *flags("llama", **keys), f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
