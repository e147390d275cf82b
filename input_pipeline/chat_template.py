"""A tokenizer's chat template (Jinja2): messages as text, rendered as transformers does, and where the answers are."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from files import json_objects
from input_pipeline.rendering import BEGIN, END, TODAY, Renderer

Messages = Sequence[Mapping[str, Any]]  # each with `role` and `content`
Span = tuple[int, int]  # characters from, to

CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
MOST_BYTES = 1 << 20  # of a template's file
RENDERER = Renderer()
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The template beside a tokenizer.json: chat_template.jinja, or the `chat_template` of tokenizer_config.json.

    `source` is its text, `tokens` its variables for special tokens, such as `bos_token`; `identity` changes whenever a
    conversation may be rendered in another way. ValueError if there is no template, it or its file cannot be read, or
    no file names the special tokens that it uses.
    """

    def __init__(self, tokenizer_path: Path) -> None:
        folder = tokenizer_path.parent
        try:
            about = json_objects.read(folder / CONFIG_FILE, lenient=True)
        except FileNotFoundError:
            about = {}
        self.source = _source(folder, about)
        tokens = {name: _content(token) for name, token in about.items() if name.endswith("_token")}
        self.tokens = {name: token for name, token in tokens.items() if isinstance(token, str)}
        self._marks_answers = bool(_GENERATION.search(self.source))
        try:
            used = RENDERER.undeclared(self.source)
        except ValueError as error:
            raise ValueError(f"the chat template in {folder} cannot be read: {error}") from error
        lacking = sorted(name for name in used if name.endswith("_token"))
        if lacking and not (folder / CONFIG_FILE).exists():  # jinja renders them as nothing
            raise ValueError(f"{folder} has no {CONFIG_FILE}, and the chat template uses its {' and '.join(lacking)}")
        described = json.dumps([self.source, self.tokens, str(TODAY)], sort_keys=True)
        self.identity = hashlib.sha256(described.encode()).hexdigest()

    def render(self, messages: Messages, *, asks: bool = False) -> str:
        """Returns a conversation as text; `asks`: with the beginning of an answer. ValueError if it is refused."""
        return _unmarked(self._rendered(messages, asks))[0]

    def answers(self, messages: Messages) -> tuple[str, list[Span]]:
        """Returns a conversation as text, and the characters of the answers in it. ValueError if it is refused.

        They are what the template marks by `{% generation %}`; without marks, what each message of the assistant adds
        to the conversation before it with the beginning of an answer.
        """
        text, spans = _unmarked(self._rendered(messages))
        if self._marks_answers:
            return text, spans
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:number], asks=True)
                until = self.render(messages[: number + 1])
                if not (until.startswith(before) and text.startswith(until)):
                    raise ValueError(
                        f"the template renders message {number + 1} in another way before other messages, or without "
                        "its answer: mark the answers in the template by {% generation %} and {% endgeneration %}"
                    )
                spans.append((len(before), len(until)))
        return text, spans

    def _rendered(self, messages: Messages, asks: bool = False) -> str:
        plain = [{name: value for name, value in one.items() if value is not None} for one in messages]
        if any(mark in json.dumps(plain, ensure_ascii=False) for mark in (BEGIN, END)):
            raise ValueError("a message has one of the noncharacters U+FDD0 and U+FDD1")
        how = {"tools": None, "documents": None, "add_generation_prompt": asks}
        try:
            return RENDERER.render(self.source, {"messages": plain, **how, **self.tokens})
        except ValueError as error:
            raise ValueError(f"the chat template refuses it: {error}") from error


def _source(folder: Path, about: Mapping[str, Any]) -> str:
    """Returns the text of a template. ValueError if there is none."""
    if (file := folder / TEMPLATE_FILE).is_file():
        return _text_of(file)
    found = about.get("chat_template")
    if isinstance(found, list):  # several by name
        named = [one for one in found if isinstance(one, dict)]
        found = next((one.get("template") for one in named if one.get("name") == "default"), None)
    if not isinstance(found, str):
        raise ValueError(
            f"{folder} has no chat template: data.source=chats needs {TEMPLATE_FILE} there, or chat_template in "
            f"{CONFIG_FILE}, as instruction-tuned models have them"
        )
    return found


def _text_of(file: Path) -> str:
    """Returns the text of a template's file. ValueError if it is not UTF-8, or too large for a template."""
    if (size := file.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{file} has {size} bytes: too large for a chat template")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error.reason}") from error


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """Returns a text without its marks, and what was between them."""
    pieces, spans, at = re.split(f"[{BEGIN}{END}]", marked), [], 0
    for number, piece in enumerate(pieces):
        if number % 2:
            spans.append((at, at + len(piece)))
        at += len(piece)
    return "".join(pieces), spans
