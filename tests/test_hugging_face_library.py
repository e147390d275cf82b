"""Against the installed transformers: what it writes, we read; what we write, it loads, and computes our logits.

Slow, because torch and transformers are no requirements of the program: `make .venv/hugging-face-installed`.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import chat_cases, hugging_face_reference
from support.hugging_face_folders import flags, our_logits, run_convert, tensors_of
from support.hugging_face_reference import FOLDER, LINEAR, MODELS, YARN, batch_loss, example, loss_of, make, reference
from support.running import ROOT, losses, run_here
from support.suite import sampled

from configs import fine_tune
from configs.schema import DataConfig
from input_pipeline import load

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 24, "activation_function": "gelu"}),
    "llama all biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama linear": ("llama3", {"rope_parameters": LINEAR, "head_dim": 4}),
    "yarn defaults": ("yarn", {"rope_parameters": YARN | dict(beta_fast=None, beta_slow=None, attention_factor=None)}),
    "mistral without a window": ("mistral", {"sliding_window": None, "rope_parameters": None}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3 cap": ("gemma3", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32}),
    "gemma3 all windows": ("gemma3", {"layer_types": ["sliding_attention"] * 3}),
    "gemma3 no window": ("gemma3", {"layer_types": ["full_attention"] * 3}),
    "bert tanh": ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "type_vocab_size": 3}),
    "roberta": ("roberta", {"layer_norm_eps": 1e-5, "type_vocab_size": 2}),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    yield


@pytest.mark.parametrize(("name", "changes"), sampled(VARIANTS, "llama linear", "qwen3 biases"))
def test_our_logits_equal_those_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = make(name, **changes)
    model.save_pretrained(tmp_path)
    tokens = example(name)
    theirs = hugging_face_reference.logits(model, tokens)
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(our_logits(tmp_path, tokens), theirs, atol=1e-5)


@pytest.mark.parametrize("name", sampled([*MODELS], "llama3", "gemma2"))
def test_the_files_of_the_quick_tests_are_what_transformers_computes(name: str, tmp_path: Path) -> None:
    model, stored = make(name), reference(name)
    np.testing.assert_allclose(hugging_face_reference.logits(model, stored["tokens"]), stored["logits"], atol=1e-5)
    np.testing.assert_allclose(batch_loss(model, name), stored["batch_loss"], rtol=1e-5)
    model.save_pretrained(tmp_path)
    saved = tensors_of(tmp_path)
    for key, x in tensors_of(FOLDER / name).items():
        np.testing.assert_array_equal(saved[key], x)


@pytest.mark.parametrize("name", sampled([*MODELS], "llama3", "gemma3"))
def test_an_exported_run_loads_in_transformers_and_computes_our_logits(name: str, tmp_path: Path) -> None:
    """Trained for two steps, so that the weights are the run's own."""
    import transformers

    run, out = tmp_path / "run", tmp_path / "out"
    assert run_here(*flags(name, sharding__partition_size=4), f"--workdir={run}") == 0
    assert run_convert("convert", f"--to_hugging_face={out}", f"--workdir={run}", "--max_file_gb=2e-5") == 0
    kind = transformers.AutoModelForMaskedLM if "bert" in name else transformers.AutoModelForCausalLM
    model, told = kind.from_pretrained(out, output_loading_info=True, attn_implementation="eager")
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    assert type(model).__name__ == MODELS[name][0] and not [*out.glob("model.safetensors")]
    tokens = example(name)
    theirs = hugging_face_reference.logits(model.eval(), tokens)
    np.testing.assert_allclose(our_logits(out, tokens), theirs, atol=1e-5)
    assert np.abs(theirs - reference(name)["logits"]).max() > 1e-2  # it was trained


def test_an_exported_run_brings_its_tokenizer(tmp_path: Path) -> None:
    import transformers
    from support.tokenizer_files import tokenizer_json

    vocabulary = tokenizer_json(tmp_path / "tokenizer.json")
    run, out, text = tmp_path / "run", tmp_path / "out", "def main(): return 42\n"
    changes = {"data__tokenizer": "hugging_face", "data__tokenizer_path": vocabulary, "data__source": "folder"}
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.txt").write_text(text * 40)
    args = flags("gpt2", **changes, data__path=corpus, num_steps=1)
    assert run_here(*args, f"--workdir={run}") == 0
    assert run_convert("convert", f"--to_hugging_face={out}", f"--workdir={run}") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and max(ids) < 260
    assert (tokenizer.eos_token, tokenizer.mask_token) == ("<|endoftext|>", "<mask>")
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_weights_in_mxfp4_are_those_that_transformers_computes_with(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, rng = make("gpt_oss", hidden_size=32, intermediate_size=64), np.random.default_rng(0)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    found = tensors_of(tmp_path)
    for path, parameter in model.named_parameters():
        if path.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = found.pop(path).shape
            blocks = rng.integers(0, 256, (experts, columns, rows // 32, 16), np.uint8)
            scales = rng.integers(122, 127, blocks.shape[:3], np.uint8)
            found |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
            parts = (torch.from_numpy(x) for x in (blocks, scales))
            parameter.data = convert_moe_packed_tensors(*parts, dtype=torch.float32)
    save_file(found, file)
    theirs = hugging_face_reference.logits(model, example("gpt_oss"))
    np.testing.assert_allclose(our_logits(tmp_path, example("gpt_oss")), theirs, atol=1e-5)


TARGETS = {"q_proj": "query", "v_proj": "value", "gate_proj": "gate", "down_proj": "down"}


def test_twenty_steps_of_adapters_equal_those_of_peft(tmp_path: Path) -> None:
    """From PEFT's own files; then its library reads ours, and transformers the merged model: the same logits."""
    import peft
    import torch
    import transformers

    base, adapters, run = tmp_path / "base", tmp_path / "adapters", tmp_path / "run"
    make("llama").save_pretrained(base)
    how = peft.LoraConfig(r=3, lora_alpha=6, target_modules=[*TARGETS], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(make("llama"), how)
    model.save_pretrained(adapters)
    sgd = dict(name="sgd", learning_rate=0.3, momentum=0.9, weight_decay=0, clip_norm=0, schedule="constant")
    ours = dict(rank=3, alpha=6, targets=" ".join(TARGETS.values()), weights=adapters)
    changes = {f"optimizer__{key}": x for key, x in sgd.items()} | {f"model__lora_{key}": x for key, x in ours.items()}
    changes |= dict(num_steps=20, optimizer__warmup_steps=0, sharding__partition_size=4)
    assert run_here(*flags("llama", base, **changes), f"--workdir={run}") == 0

    tx, theirs = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.3, momentum=0.9), []
    for step in range(20):
        loss = loss_of(model, "llama", step)
        tx.zero_grad()
        loss.backward()
        tx.step()
        theirs.append(float(loss))
    np.testing.assert_allclose(losses(run), theirs, atol=1e-4)
    assert theirs[-1] < theirs[0] - 0.05

    assert run_convert("convert", f"--to_peft={tmp_path / 'out'}", f"--workdir={run}") == 0
    loaded = peft.PeftModel.from_pretrained(make("llama"), tmp_path / "out")
    np.testing.assert_allclose(float(loss_of(loaded, "llama", 20)), float(loss_of(model, "llama", 20)), atol=1e-4)
    assert run_convert("convert", f"--to_hugging_face={tmp_path / 'merged'}", f"--workdir={run}") == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    both = (hugging_face_reference.logits(x.eval(), example("llama")) for x in (merged, loaded))
    np.testing.assert_allclose(*both, atol=1e-5)


def test_embeddings_trained_next_to_adapters_are_those_of_peft(tmp_path: Path) -> None:
    """With ten new tokens: PEFT's `modules_to_save` on a resized base is the merged model; another run starts there."""
    import peft
    import transformers

    run, out, merged = tmp_path / "run", tmp_path / "out", tmp_path / "merged"
    changes = dict(model__lora_rank=2, model__lora_targets="query value", model__lora_embeddings=True)
    changes |= dict(model__vocab_size=270, sharding__partition_size=4, optimizer__learning_rate=0.1)
    assert run_here(*flags("llama", **changes), f"--workdir={run}") == 0
    assert run_convert("convert", f"--to_peft={out}", f"--workdir={run}") == 0
    assert run_convert("convert", f"--to_hugging_face={merged}", f"--workdir={run}") == 0
    base = make("llama")
    base.resize_token_embeddings(270)
    loaded = peft.PeftModel.from_pretrained(base, out)
    assert not torch_equal(loaded.get_input_embeddings().weight[:260], make("llama").get_input_embeddings().weight)
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged)
    theirs, ours = (hugging_face_reference.logits(x.eval(), example("llama")) for x in (loaded, whole))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    again = dict(model__lora_weights=out, num_steps=1, optimizer__learning_rate=1e-6, optimizer__warmup_steps=0)
    assert run_here(*flags("llama", **changes | again), f"--workdir={tmp_path / 'again'}") == 0
    assert losses(tmp_path / "again")[0] < losses(run)[0] - 0.05


def torch_equal(one: Any, other: Any) -> bool:
    import torch

    return torch.equal(one.detach(), other.detach())


@pytest.mark.parametrize(("name", "targets"), [("mixtral", "query value experts"), ("gpt_oss", "query key value out")])
def test_adapters_of_a_model_with_experts_are_those_of_peft(name: str, targets: str, tmp_path: Path) -> None:
    """After two steps with experts divided in nodes: PEFT's model, which fuses experts' adapters, is the merged one."""
    import peft
    import transformers

    run, out, merged = tmp_path / "run", tmp_path / "out", tmp_path / "merged"
    changes = dict(model__lora_rank=2, model__lora_targets=targets)
    changes |= dict(sharding__experts="node", sharding__partition_size=4, optimizer__learning_rate=0.1)
    assert run_here(*flags(name, **changes), f"--workdir={run}") == 0
    assert run_convert("convert", f"--to_peft={out}", f"--workdir={run}") == 0
    assert run_convert("convert", f"--to_hugging_face={merged}", f"--workdir={run}") == 0
    loaded = peft.PeftModel.from_pretrained(make(name), out)
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged)
    theirs, ours = (hugging_face_reference.logits(x.eval(), example(name)) for x in (loaded, whole))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert np.abs(theirs - reference(name)["logits"]).max() > 1e-2  # it was trained


def test_the_small_model_of_the_page_and_its_chats_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    (program,) = re.findall(r"```python\n(from tokenizers.*?)```", (ROOT / "docs/hugging_face.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    turns = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    config = fine_tune.get_config("DIR")
    config.data.seq_len = 24
    row = load(DataConfig(**config.data), "all", 0)[0]
    ids = transformers.AutoTokenizer.from_pretrained("DIR").apply_chat_template(turns, return_dict=False)
    assert row["tokens"][: len(ids)].tolist() == ids and row["weights"].sum() == len("a") + 1
    model = transformers.AutoModelForCausalLM.from_pretrained("DIR").eval()
    theirs = hugging_face_reference.logits(model, example("llama"))
    ours = our_logits(tmp_path / "DIR", example("llama"))[..., :257]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_conversations_of_the_quick_tests_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    wanted = [json.loads(line) for line in chat_cases.FILE.read_text().splitlines()]
    assert [*chat_cases.of_transformers(tmp_path)] == wanted
