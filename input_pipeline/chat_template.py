"""A tokenizer's chat template (Jinja2): renders messages as transformers does, and finds the answers in the text."""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from copy import copy
from pathlib import Path
from typing import Self

from input_pipeline import tokenizer_config
from input_pipeline.rendering import BEGIN, END, TODAY, Renderer
from input_pipeline.tokenizer_config import CONFIG_FILE
from runtime.files.json_objects import JsonMapping

Messages = Sequence[JsonMapping]  # each with `role` and `content`
CharacterSpan = tuple[int, int]  # characters from, to

TEMPLATE_FILE = "chat_template.jinja"
MOST_BYTES = 1 << 20  # largest size of a template's file
LONG = 16  # messages; for shorter conversations, rendering each prefix is as fast as rendering each turn
RENDERER = Renderer()
_CONTENT = "\ufdd2"  # a noncharacter in place of a message's content
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The chat template of a tokenizer.json: chat_template.jinja, or `chat_template` in tokenizer_config.json.

    `source` is the template's text. `tokens` holds its variables for special tokens, such as `bos_token`. `identity`
    changes whenever a conversation may be rendered in another way. Raises ValueError if the template is missing or
    cannot be read, or if no file names the special tokens that it uses.
    """

    def __init__(self, tokenizer_path: Path) -> None:
        folder = tokenizer_path.parent
        config = tokenizer_config.read(folder)
        self.source = _source(folder, config)
        self.tokens = tokenizer_config.named_tokens(config)
        self.tools: Sequence[JsonMapping] = ()
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
        """Returns a conversation as text, with the beginning of an answer if `asks`.

        ValueError if the template refuses it.
        """
        return _unmarked(self._rendered(messages, asks))[0]

    def with_tools(self, tools: Sequence[JsonMapping]) -> Self:
        """Returns the template for conversations with these tools."""
        other = copy(self)
        other.tools = tools
        return other

    def spans(self, messages: Messages, numbers: Sequence[int]) -> tuple[str, list[CharacterSpan]]:
        """Returns a conversation as text, and the characters of some messages. ValueError if the template refuses it.

        The template marks answers by `{% generation %}`. Without marks, an answer is the text that an assistant message
        adds to the preceding conversation rendered with the beginning of an answer. For other roles it is the content,
        and the text that ends the message. ValueError if marks cannot be attributed to messages.
        """
        text, marked = _unmarked(self._rendered(messages))
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = [number for number in numbers if number in answers]
        if self._marks_answers and [*numbers] == answers:
            return text, marked
        if self._marks_answers and chosen and len(marked) != len(answers):
            raise ValueError(
                f"the chat template marks {len(marked)} answers in {len(answers)} messages of the assistant: it must "
                "mark each of them to exclude one"
            )
        if not self._marks_answers:
            marked = self._answers_by_turns(messages, text) if len(messages) > LONG and len(chosen) > 1 else []
        known = dict(zip(answers, marked, strict=False))
        return text, [known.get(number) or self._added(messages, text, number) for number in numbers]

    def _added(self, messages: Messages, text: str, number: int) -> CharacterSpan:
        """Returns the character range of a message, from renderings of all messages before it."""
        is_answer = messages[number]["role"] == "assistant"
        before = self.render(messages[:number], asks=is_answer) if is_answer or number else ""
        until = self.render(messages[: number + 1])
        if not (until.startswith(before) and text.startswith(until)):
            raise ValueError(
                f"the template renders message {number + 1} in another way before other messages, or without "
                "its answer: mark the answers in the template by {% generation %} and {% endgeneration %}"
            )
        if is_answer:
            return len(before), len(until)
        marked = self.render([*messages[:number], {**messages[number], "content": _CONTENT}])
        start = marked.find(_CONTENT, len(before))  # a short content may also be a part of the header or the end
        if start < 0 or not until.startswith(marked[:start]):
            raise ValueError(f"the chat template does not render the content of message {number + 1}")
        return start, len(until)

    def _answers_by_turns(self, messages: Messages, text: str) -> list[CharacterSpan]:
        """Returns the character ranges of the answers in time linear, not quadratic, in the length of the conversation.

        Each turn is rendered right after the first question. Returns [] if the text is not the concatenation of these
        turns, because then the template looks further back.
        """
        first, *others = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        spans, last = [self._added(messages, text, first)], first
        try:
            for number in others:
                begin = [*messages[:first], messages[last]]
                turn = [*begin, *messages[last + 1 : number]]
                known = len(self.render(begin))
                before, until = self.render(turn, asks=True), self.render([*turn, messages[number]])
                end = spans[-1][1]
                if not until.startswith(before) or not text.startswith(until[known:], end):
                    return []
                spans.append((end + len(before) - known, end + len(until) - known))
                last = number
        except ValueError:
            return []
        return spans

    def unrendered(self, messages: Messages) -> set[tuple[int, str]]:
        """Returns (message, field) for each field that does not change the text. ValueError if the template refuses it.

        For each role, a template omits a field either in all messages, or in the messages before a certain message.
        """
        marked = self._rendered(messages)
        holders: dict[tuple[str, str], list[int]] = {}
        for number, name in _fields_to_check(messages, _unmarked(marked)[0]):
            holders.setdefault((messages[number]["role"], name), []).append(number)
        found: set[tuple[int, str]] = set()
        for (_, name), numbers in holders.items():

            def shows(count: int, name: str = name, numbers: list[int] = numbers) -> bool:
                return self._shows(messages, {(number, name) for number in numbers[:count]}, marked)

            count = len(numbers) if not shows(len(numbers)) else bisect_left(range(len(numbers)), True, key=shows) - 1
            found |= {(number, name) for number in numbers[: max(0, count)]}
        return found

    def _shows(self, messages: Messages, left_out: Set[tuple[int, str]], marked: str) -> bool:
        """Returns whether removing some fields changes the text, or makes the template refuse the conversation."""
        rest = [
            {name: value for name, value in message.items() if (number, name) not in left_out}
            for number, message in enumerate(messages)
        ]
        try:
            return self._rendered(rest) != marked
        except ValueError:
            return True

    def _rendered(self, messages: Messages, asks: bool = False) -> str:
        plain = [{name: value for name, value in one.items() if value is not None} for one in messages]
        if any(mark in json.dumps(plain, ensure_ascii=False) for mark in (BEGIN, END)):
            raise ValueError("a message has one of the noncharacters U+FDD0 and U+FDD1")
        how = {"tools": [*self.tools] or None, "documents": None, "add_generation_prompt": asks}
        try:
            return RENDERER.render(self.source, {"messages": plain, **how, **self.tokens})
        except ValueError as error:
            raise ValueError(f"the chat template refuses it: {error}") from error


def _fields_to_check(messages: Messages, text: str) -> Iterator[tuple[int, str]]:
    """Yields (message, field) for values that may be missing in the text. Skips roles, and contents found in order."""
    at = 0
    for number, message in enumerate(messages):
        content = (message.get("content") or "").strip()
        place = text.find(content, at)
        if place < 0:
            yield number, "content"
        else:
            at = place + len(content)
        yield from ((number, name) for name, value in message.items() if value and name not in ("role", "content"))


def _source(folder: Path, config: Mapping[str, object]) -> str:
    """Returns the text of a template. ValueError if the template is missing."""
    if (file := folder / TEMPLATE_FILE).is_file():
        return _text_of(file)
    found = config.get("chat_template")
    if isinstance(found, list):  # a list of named templates
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


def _unmarked(marked: str) -> tuple[str, list[CharacterSpan]]:
    """Returns a text without its marks, and the character ranges between the marks."""
    pieces, spans, at = re.split(f"[{BEGIN}{END}]", marked), [], 0
    for number, piece in enumerate(pieces):
        if number % 2:
            spans.append((at, at + len(piece)))
        at += len(piece)
    return "".join(pieces), spans
