"""The special token that ends an answer: which one a template writes, and the warning where none is trained."""

import json
from pathlib import Path

import pytest
from support.chat_cases import TEMPLATES, template, write_tokenizer

from configs.schema import DataConfig
from input_pipeline import load
from input_pipeline.chat_template import ChatTemplate
from input_pipeline.tokenizers import HuggingFace
from training import answer_ends

ENDS = {"chatml": "<|im_end|>", "llama 3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>", "words": "</s>"}
PLAIN = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


@pytest.mark.parametrize("marks", [True, False])
def test_the_end_of_an_answer_by_its_template(marks: bool, tmp_path: Path) -> None:
    assert ENDS.keys() == TEMPLATES.keys()
    for name, wanted in {**ENDS, "plain": None, "refuses": None}.items():
        source = PLAIN if name == "plain" else template(name, marks=marks) if name in TEMPLATES else ""
        source = "{{ raise_exception('no') }}" if name == "refuses" else source
        vocabulary = write_tokenizer(tmp_path / name, source)
        tokenizer = HuggingFace(vocabulary)
        found = answer_ends.end_of_answers(tokenizer, ChatTemplate(vocabulary))
        assert found == (tokenizer.vocabulary[wanted] if wanted else None), name


def test_answers_without_an_end_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
    chats = [{"prompt": f"a{number}", "answer": "the one" * 9} for number in range(20)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    found = {}
    for name, source in {"chatml": template("chatml", marks=True), "plain": PLAIN}.items():
        tokenizer = HuggingFace(vocabulary := write_tokenizer(tmp_path / name, source))
        for seq_len in (128, 24):  # 24: the answers are cut and lose their ends
            config = DataConfig(
                source="chats",
                path=str(tmp_path / "chats.jsonl"),
                packing="whole",
                seq_len=seq_len,
                tokenizer="hugging_face",
                tokenizer_path=str(vocabulary),
            )
            found[name, seq_len] = len(answer_ends.warnings(load(config, "train", 0, tokenizer=tokenizer)))
    assert found == {("chatml", 128): 0, ("chatml", 24): 1, ("plain", 128): 1, ("plain", 24): 1}
