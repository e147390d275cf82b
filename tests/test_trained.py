"""training.evaluate and training.generate: a run's checkpoint on other devices, and a Hugging Face folder."""

import json
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from support.chat_cases import CHATML, template, write_chats, write_tokenizer
from support.hugging_face_folders import flags, our_logits
from support.hugging_face_reference import FOLDER
from support.planning import small
from support.refusals import refused
from support.running import ROOT, arguments, rows, run_here
from support.tables import check_rows, every_row
from support.tokenizer_files import tokenizer_json, with_image_token

from configs import base, digits
from configs.schema import DataConfig
from elastic.saved_arrays import SavedArrays
from input_pipeline import index, load
from input_pipeline.chat_records import candidates, conversation_of
from input_pipeline.chat_template import ChatTemplate
from input_pipeline.chats import encode
from input_pipeline.tokenizers import HuggingFace
from training import convert, evaluate, generate, trained
from training.datasets import tokenizer_of
from training.experiment import make_experiment
from training.sampling import Continuation, Sampler
from training.validation import Validator

CHANGES: dict[str, Any] = {
    "data__source": "chats",
    "data__packing": "whole",
    "data__tokenizer": "hugging_face",
    "data__seq_len": 64,
    "model__vocab_size": 288,
    "model__max_len": 64,
    "eval__every": 5,
    "sample__length": 20,
    "sample__temperature": 0.0,
    "sample__prompt": "the",
    "sharding__overlap": "off",
    "seed": 3,
}


@pytest.fixture(scope="module", name="run")
def a_run_on_chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 10 steps in 4 groups of 2 devices, with its data beside it."""
    folder = tmp_path_factory.mktemp("run")
    write_chats(folder / "chats.jsonl", 200)
    vocabulary = write_tokenizer(folder / "model", CHATML)
    paths = {"data__path": folder / "chats.jsonl", "data__tokenizer_path": vocabulary}
    assert run_here(*arguments(folder / "run", **CHANGES, **paths)) == 0
    return folder / "run"


def evaluated(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    assert evaluate.main(["evaluate", *args]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def generated(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert generate.main(["generate", *args]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_the_validation_of_a_run_is_that_of_its_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged = {row["step"]: row for row in rows(run) if "validation_loss" in row}
    for step, args in {10: [], 5: ["--step=5"]}.items():
        found = evaluated(capsys, f"--workdir={run}", *args)
        assert found["step"] == step
        for key in ("validation_loss", "validation_bits_per_byte"):
            assert found[key] == pytest.approx(logged[step][key], rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(found["validation_loss"]))
    assert logged[5]["validation_loss"] > logged[10]["validation_loss"] + 0.1


@pytest.mark.slow
def test_any_number_of_devices_gives_the_same(run: Path) -> None:
    """Validation loss and the run's own sample, here on 3, which divide no parameter."""
    model = trained.of_run(run, devices=jax.devices()[:3])
    assert model.experiment.plan.layout.shape.num_devices == 3
    wanted = json.loads((run / "summary.json").read_text())["validation_loss"]
    assert evaluate.evaluate(model)["validation_loss"] == pytest.approx(wanted, rel=1e-6)
    how = {"length": 20, "chat": False}
    (text,) = generate.generate(model, ["the"], temperature=0.0, seed=0, **how)
    assert text == (run / "sample.txt").read_text()
    (one,), (other,) = (generate.generate(model, ["the"], temperature=5.0, seed=seed, **how) for seed in (1, 2))
    assert one != other


def test_ghost_batches_of_more_rows_than_a_device_has_do_not_matter() -> None:
    """What is trained normalises by its running averages."""
    saved = digits.get_config().to_dict()
    saved["model"] |= {"norm": "batch", "norm_rows": 8}
    saved["batch"] |= {"global_size": 48, "micro_size": 16}
    experiment = trained._experiment(saved, lambda data: {}, jax.devices()[:8])  # pyright: ignore
    assert (experiment.batches.config.micro_size, experiment.config.rows_together) == (6, 1)


@pytest.mark.slow
def test_a_run_of_adapters_is_measured_with_its_base(tmp_path: Path) -> None:
    assert run_here(*flags("llama", model__lora_rank=2, optimizer__learning_rate=0.1), f"--workdir={tmp_path}") == 0
    wanted = json.loads((tmp_path / "summary.json").read_text())["validation_loss"]
    found = evaluate.evaluate(trained.of_run(tmp_path, devices=jax.devices()[:1]))
    assert found["validation_loss"] == pytest.approx(wanted, rel=1e-6)


def test_settings_for_other_devices_do_not_count(run: Path) -> None:
    saved = SavedArrays(run / "checkpoints")
    saved.config["model"] |= {"attention": "pallas", "remat": "none", "unroll": True}
    saved.config["batch"] = {"global_size": 4, "micro_size": 4}
    experiment = trained._experiment(saved.config, lambda data: {}, jax.devices()[:2])  # pyright: ignore
    assert experiment.config.seed == 3  # a mesh does not matter, what is learned does
    assert experiment.model.config.attention == "xla" and experiment.batches.config.micro_size == 2
    shape = jax.ShapeDtypeStruct((2,), np.float32, sharding=experiment.replicated)
    with pytest.raises(ValueError, match="/10 is a checkpoint of another model: params.x is absent in the checkpoint"):
        saved.place({"params": {"x": shape}})


def test_the_sample_of_a_run_is_made_again(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt, length, temperature and seed are the run's own; others can be given, and several prompts, a line each."""
    sample = (run / "sample.txt").read_text()
    assert generated(capsys, f"--workdir={run}") == sample
    (tmp_path / "prompts").write_text("the\r\n\non\u2028x\n\n")
    flags = [f"--workdir={run}", f"--prompts={tmp_path / 'prompts'}", "--length=3", "--step=10"]
    first, second = map(json.loads, generated(capsys, *flags).split("\n"))
    assert (first["prompt"], second["prompt"]) == ("the", "on\u2028x") and second["text"].startswith("on")
    assert sample.startswith(first["text"]) and len(first["text"]) < len(sample)


def test_a_sample_that_gathers_between_nodes_says_so() -> None:
    """Over the links of a run between regions each token may take seconds, or more."""

    def check(strategy: str, size: int, said: bool) -> None:
        config = small(
            sharding__strategy=strategy, sharding__partition_size=size, sample__length=8, sample__prompt="def "
        )
        warnings = Sampler(make_experiment(config), tokenizer_of(config), config.sample).warnings
        assert ["between nodes for each of 11 tokens" in line for line in warnings] == [True] * said

    check_rows([("zero3", 0, True), ("mics", 2, False)], check)


def test_what_is_written_for_transformers_chats_as_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, tokenizer, special tokens and chat template go with it."""
    assert convert.main(["convert", f"--to_hugging_face={tmp_path}", f"--workdir={run}"]) == 0
    assert (tmp_path / "chat_template.jinja").read_text() == CHATML
    vocabulary = HuggingFace(tmp_path / "tokenizer.json").vocabulary
    ends = [vocabulary["</s>"], vocabulary["<|im_end|>"]]  # a text's, and an answer's by the template
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": ends}
    about = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert about.items() >= {"bos_token": "<s>", "eos_token": "</s>"}.items()
    flags = ["--prompt=the", "--temperature=0", "--length=12", "--chat"]
    answers = [generated(capsys, *flags, model) for model in (f"--workdir={run}", f"--hugging_face={tmp_path}")]
    assert answers[0] == answers[1] and "<|im_start|>" not in answers[0]


@pytest.fixture(name="folder")
def a_hugging_face_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    shutil.copytree(FOLDER / "llama", folder)
    with_image_token(tokenizer_json(folder / "tokenizer.json", ("</s>", "<|im_start|>", "<|im_end|>")))
    (folder / "chat_template.jinja").write_text(template("chatml", marks=True))
    return folder


def losses_of(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Returns the cross-entropies of ids [B, T + 1], each of its own, on one device: [B, T]."""
    logits = np.asarray(our_logits(folder, ids[:, :-1].astype(np.int32)), np.float64)
    chosen = np.take_along_axis(logits, ids[:, 1:, None].astype(np.int64), axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(axis=-1)) - chosen


def test_perplexity_of_a_hugging_face_folder_on_text(
    folder: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In windows of the longest row, the first batch of which is measured here."""
    found = evaluated(capsys, f"--hugging_face={folder}", f"--path={corpus}", "--num_batches=1")
    tokenizer, length, size = HuggingFace(folder / "tokenizer.json"), 40, 32
    stream = np.concatenate([tokenizer.document(path.read_text()) for path in sorted(corpus.iterdir())])
    windows = np.stack([stream[i : i + length + 1] for i in range(0, len(stream) - length, length)])
    assert len(windows) > size
    first = windows[[index.window_of(i, windows=len(windows), seed=0) for i in range(size)]]
    wanted = losses_of(folder, first).mean()
    assert found["validation_loss"] == pytest.approx(wanted, rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(wanted), rel=1e-5) and found["step"] is None


def test_perplexity_of_a_hugging_face_folder_on_chats(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the answers alone, in a folder of files of chats."""
    chats = [{"prompt": "a", "answer": "the"}, {"prompt": "b", "answer": "quick fox"}, {"prompt": "c", "answer": "c"}]
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    found = evaluated(capsys, f"--hugging_face={folder}", f"--path={tmp_path / 'chats'}")
    vocabulary = folder / "tokenizer.json"
    turns = [conversation_of(chat).messages for chat in chats]
    coded = [
        encode(chat, candidates(chat, "assistant"), HuggingFace(vocabulary), ChatTemplate(vocabulary)) for chat in turns
    ]
    ids, counted = (np.stack([np.pad(one[k], (0, 60 - len(one[k]))) for one in coded]) for k in (0, 1))
    wanted = losses_of(folder, ids[:, :41])[counted[:, 1:41]].mean()
    assert counted.sum() == counted[:, :41].sum() and found["validation_loss"] == pytest.approx(wanted, rel=1e-5)


SECTIONS = [  # source, mixture and packing of the run, --path, source and packing
    ("chats", "", "whole", "chats.jsonl", "chats", "whole"),
    ("chats", "", "whole", "chats", "chats", "whole"),
    ("chats", "", "whole", "texts", "folder", "whole"),
    ("chats", "", "whole", "texts/a.txt", "shards", "documents"),
    ("stdlib_text", "3 chats:c, 1 folder:d", "whole", "s3://bucket/chats", "chats", "whole"),
    ("shards", "", "documents", "chats.jsonl", "shards", "documents"),
    ("shards", "", "stream", "texts", "shards", "stream"),
    ("folder", "", "stream", "chats.jsonl", "shards", "stream"),
    ("stdlib_text", "", "whole", "chats", "folder", "whole"),
]


def test_a_path_is_read_as_the_run_reads_its_data(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And prints how."""
    for name in ("chats.jsonl", "chats/a/b.json.gz", "texts/a.txt", "texts/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def check(source: str, mixture: str, packing: str, path: str, wanted: str, rows_of: str) -> None:
        section = {"source": source, "mixture": mixture, "packing": packing}
        found = section | evaluate.section_of(path, section, has_run=True)
        assert (found["source"], found["packing"], found["mixture"]) == (wanted, rows_of, "")
        if mixture == "" and wanted != "shards":
            assert evaluate.section_of(path, section, has_run=False)["source"] == {"texts": "folder"}.get(path, "chats")

    monkeypatch.chdir(tmp_path)
    check_rows(SECTIONS, check)
    capsys.readouterr()
    assert evaluate.main(["evaluate", f"--workdir={run}", f"--path={run.parent}/chats.jsonl", "--num_batches=1"]) == 0
    manner = "chats by the template, with a loss on data.loss_on=assistant"
    assert capsys.readouterr().err.startswith(f"{run.parent}/chats.jsonl is read as {manner}\ndata.path ")


def test_chat_gives_the_answer_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    vocabulary = HuggingFace(folder / "tokenizer.json")
    prompt, _ = vocabulary.encode_template(asked)
    model = trained.of_hugging_face(folder, devices=jax.devices()[:1])
    ids = Continuation(model.experiment, temperature=0.0, seed=0)(model.params, prompt, 40 - len(prompt))
    np.testing.assert_array_equal(
        np.argmax(our_logits(folder, ids[None, :-1]), axis=-1)[0, len(prompt) - 1 :], ids[len(prompt) :]
    )
    answer = ids[len(prompt) :].tolist()
    ends = [answer.index(number) for number in vocabulary.special_ids if number in answer]
    wanted = vocabulary.decode(np.array(answer[: min(ends, default=None)]))
    flags = [f"--hugging_face={folder}", "--prompt=the fox", "--temperature=0", "--length=100", "--chat"]
    assert generated(capsys, *flags) == wanted != ""


def test_an_answer_ends_at_its_first_special_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = HuggingFace(folder / "tokenizer.json")
    said, _ = vocabulary.encode_template("a fox<|im_end|>\n<|im_start|>user")
    monkeypatch.setattr(Continuation, "__call__", lambda self, params, prompt, length: np.append(prompt, said))
    model = trained.of_hugging_face(folder, devices=jax.devices()[:1])
    how = {"length": 9, "temperature": 0.0, "seed": 0}
    assert [*generate.generate(model, ["x"], chat=True, **how)] == ["a fox"]


def error_of(capsys: pytest.CaptureFixture[str], program: Any, *args: str) -> str:
    return refused(capsys, lambda: program.main(["program", *args]))


def test_mistakes_are_one_line(run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_run, long = f"--workdir={run}", f"--prompt={'x' * 64}"
    (tmp_path / "empty").write_text("")
    chats, of_folder = tmp_path / "chats.jsonl", f"--hugging_face={folder}"
    chats.write_text('{"prompt": "<image_soft_token>", "answer": "a"}')
    beyond = "'<image_soft_token>' has the id 260, not below model.vocab_size"
    for program, args, message in [
        (evaluate, [f"--workdir={tmp_path}"], f"{tmp_path}/checkpoints holds no checkpoint"),
        (evaluate, [of_run, "--step=7"], "checkpoints holds no step 7; its steps are 5, 10"),
        (evaluate, [of_run, "--path=/nowhere"], "data.path /nowhere does not exist; set it to a file or a folder"),
        (evaluate, [f"--hugging_face={folder}"], "--hugging_face needs --path, a folder of text or a file of chats"),
        (generate, [of_run, f"--hugging_face={folder}"], "give either --workdir=DIR, of a run, or --hugging_face=DIR"),
        (evaluate, [f"--hugging_face={folder}", "--step=1", "--path=x"], "--step belongs to --workdir"),
        (evaluate, [of_run, "--num_batches=0"], "--num_batches=0"),
        (evaluate, [of_folder, f"--path={chats}"], f"{chats}, line 1: {beyond}"),
        (generate, [of_folder, "--chat", "--prompt=<image_soft_token>"], beyond),
        (generate, [of_run, "x"], "unexpected argument 'x'; flags are written --name=value"),
        (generate, [of_run, long], f"the prompt '{'x' * 40}' has 64 tokens; it must have 1 to 63"),
        (generate, [of_run, "--prompt="], "the prompt '' has 0 tokens; it must have 1 to 63"),
        (generate, [of_run, "--prompt=a", "--prompts=b"], "give either --prompt=TEXT or --prompts=FILE"),
        (generate, [of_run, f"--prompts={tmp_path / 'empty'}"], "is empty; write a prompt per line"),
        (generate, [of_run, f"--prompts={tmp_path / 'absent'}"], "absent cannot be read: No such file"),
    ]:
        assert message in error_of(capsys, program, *args)
    assert error_of(capsys, evaluate, of_folder, f"--path={chats}").endswith("; mend or remove it")


def test_models_that_write_no_text_and_changed_data_are_one_line(
    run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(FOLDER / "bert", tmp_path / "bert")
    shutil.copy(folder / "tokenizer.json", tmp_path / "bert")
    bert = f"--hugging_face={tmp_path / 'bert'}"
    assert "has no special token <mask> or [MASK]" in error_of(capsys, generate, bert)
    tokenizer_json(tmp_path / "bert" / "tokenizer.json", ("[SEP]", "[MASK]"))
    assert error_of(capsys, generate, bert) == "model.kind=encoder cannot be sampled: it is no decoder"
    shutil.copytree(run.parent, tmp_path / "other")
    data = tmp_path / "other" / "chats.jsonl"
    kept = run.parent / "chats.jsonl"
    content = kept.read_text()
    try:
        kept.write_text(data.read_text().replace("the", "on"))
        assert f"{run} was validated on other data: data.source=chats has changed; give --path" in error_of(
            capsys, evaluate, f"--workdir={run}"
        )
    finally:
        kept.write_text(content)


def test_help_shows_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--prompts=FILE" in generated(capsys, "--help")
    page = (ROOT / "docs" / "training.md").read_text()
    assert "python -m training.generate" in page and "python -m training.evaluate" in page


# ---------------------------------------------------------------------- a validation, given the sums of its batches


def experiment_of(config: DataConfig, evaluate: Callable[[dict[str, np.ndarray]], Any]) -> Any:
    """Returns one with batches of 4 rows."""
    same = lambda x: x
    return SimpleNamespace(
        batches=SimpleNamespace(global_size=4, local_rows=range(4), to_devices=same),
        config=SimpleNamespace(data=config),
        block=same,
        compile_eval_step=lambda: lambda params, batch: evaluate(batch),
    )


def data_config(**changes: Any) -> DataConfig:
    return DataConfig(**base.get_config().data.to_dict() | dict(source="synthetic", seq_len=16) | changes)


@every_row("objective", ["causal", "masked"])
def test_bits_per_byte_are_those_of_a_model_that_predicts_every_token(objective: str) -> None:
    """Bytes are the tokens here; a masked model's loss is of the masked ones alone, and says nothing of the text."""
    data = load(config := data_config(objective=objective), "validation", 0)
    sums = iter([{"loss": np.float32(6), "weight": np.float32(4)}, {"loss": np.float32(2), "weight": np.float32(1)}])
    result = Validator(experiment_of(config, lambda batch: next(sums)), {"": data}, 2)({})
    assert result.loss == pytest.approx(8 / 5)
    bits = 8 / 5 / np.log(2)
    if objective == "causal":
        assert result.scalars()["validation_bits_per_byte"] == pytest.approx(bits)
        assert result.message == f"validation loss 1.6000 nats per token, {bits:.4f} bits per byte"
    else:
        assert "validation_bits_per_byte" not in result.scalars()
        assert result.message == "validation loss 1.6000 nats per masked token"


def test_a_batch_is_gone_before_the_next_one_is_measured() -> None:
    """They are read anew each time: a split of images takes more than a device has."""
    held: list[weakref.ref[np.ndarray]] = []

    def sums(batch: dict[str, np.ndarray]) -> dict[str, np.float32]:
        assert not any(one() is not None for one in held)
        held.append(weakref.ref(tokens := batch["tokens"]))
        return {"loss": np.float32(tokens.sum()), "weight": np.float32(tokens.size)}

    data = load(config := data_config(), "validation", 0)
    validator = Validator(experiment_of(config, sums), {"": data}, 3)
    wanted = np.mean([data[i]["tokens"] for i in range(12)])
    assert [validator({}).loss for _ in range(2)] == [pytest.approx(wanted)] * 2 and len(held) == 6
