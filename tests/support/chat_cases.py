"""Conversations, chat templates and a small tokenizer, with the results of transformers for them, for the tests.

    python tests/support/chat_cases.py

writes tests/data/chats.jsonl again, with requirements/hugging-face.txt. The quick tests read the file;
tests/test_hugging_face_library.py compares it with the installed transformers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

FILE = Path(__file__).parents[1] / "data" / "chats.jsonl"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
NAMES += "<start_of_turn> <end_of_turn> [INST] [/INST]"
MERGES = "t h|th e|Ġ the|Ġ t|Ġt w|o n|Ġ on|e r|u s|us er|Ġ A|Ċ Ċ|: Ġ|i s"

# A template's text for an answer is between ANSWER and END; the variant with marks has `{% generation %}` there.
TEMPLATES = {
    "chatml": r"""{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}
ANSWER{{ message['content'] + '<|im_end|>' + '\n' }}END{% else %}
{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama 3": r"""{%- for message in messages %}
    {%- set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' %}
    {{- bos_token + header if loop.first else header }}
    {%- if message.role == 'assistant' %}ANSWER{{ message['content'] | trim + '<|eot_id|>' }}END
    {%- else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "gemma": r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}ANSWER{{ message['content'] | trim }}<end_of_turn>
END{% else %}{{ message['content'] | trim + '<end_of_turn>\n' }}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    "mistral": r"""{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}ANSWER{{ ' ' + message['content'] + eos_token }}END
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    "words": r"""{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}
{{ message.role | upper + ': ' }}{% if message.role == 'assistant' %}ANSWER{{ message.content + eos_token }}END
{%- else %}{{ message.content | tojson + ' ' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}""",
}
CHATS = {
    "one turn": [("user", "the one?"), ("assistant", "the two")],
    "three turns": [
        ("system", "Is the user on?"),
        ("user", "the"),
        ("assistant", "Answer\n\n: 1"),
        ("user", " two "),
        ("assistant", " the user is on \n"),
        ("user", "on"),
        ("assistant", "the"),
    ],
    "scripts": [("user", "naïve \u6771\u4eac"), ("assistant", "the \U0001f600 caf\u00e9 &<b>'\"")],
    "names of tokens": [("user", "</s><|im_end|>"), ("assistant", "<|im_start|>assistant [INST]</s>")],
    "an empty answer": [("user", "on"), ("assistant", ""), ("user", "the"), ("assistant", "on")],
    "assistant first": [("assistant", "the"), ("user", "on"), ("assistant", "is")],
}


def template(name: str, *, marks: bool) -> str:
    """Returns a template, which marks the answers or not."""
    begin, end = ("{% generation %}", "{% endgeneration %}") if marks else ("", "")
    return TEMPLATES[name].replace("ANSWER", begin).replace("END", end)


CHATML = template("chatml", marks=False)


def messages(name: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in CHATS[name]]


def write_tokenizer(folder: Path, template: str = "", **about: Any) -> Path:
    """Writes a byte-level tokenizer.json, with its tokenizer_config.json, and returns the former."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split(" ")) for merge in MERGES.split("|")]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([*SPECIAL.values(), *NAMES.split()])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **about}
    about |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder / "tokenizer.json"


def write_chats(file: Path, count: int = 60) -> list[dict[str, Any]]:
    """Writes conversations of different lengths, one twice, and returns them."""
    records = []
    for number in range(count):
        turns = [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": "the" * (1 + number % 5)}]
        records.append(
            {"messages": turns * (1 + number % 2)} if number % 3 else {"prompt": "on", "answer": f"{number}"}
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n\n" for record in [*records, records[0]]))
    return [*records, records[0]]


def of_transformers(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the result of transformers per conversation and template: ids and mask, or the reason of a refusal."""
    import transformers

    for name in TEMPLATES:
        write_tokenizer(folder, template(name, marks=True))
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        for chat in CHATS:
            case = {"template": name, "chat": chat}
            try:
                found = tokenizer.apply_chat_template(
                    messages(chat), return_assistant_tokens_mask=True, return_dict=True
                )
                yield case | {"ids": found["input_ids"], "mask": found["assistant_masks"]}
            except Exception as error:
                yield case | {"refused": str(error)}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        cases = [json.dumps(case, separators=(",", ":")) for case in of_transformers(Path(folder))]
    FILE.write_text("\n".join(cases) + "\n")
