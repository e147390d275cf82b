"""The forms of a conversation in files: messages, ShareGPT, Alpaca, and prompts with their answers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from configs.schema.data import ROLES
from input_pipeline.chat_template import Messages
from runtime.files import json_objects
from runtime.files.json_objects import JsonMapping, JsonObject

SHARE_GPT = {"human": "user", "gpt": "assistant", "observation": "tool"}  # roles with other names there
ANSWERS = ("answer", "completion", "response")  # the names of an answer to a `prompt`
MASKS = ("weight", "train")  # fields of a message that exclude it from the loss


class Conversation(NamedTuple):
    """The messages of a record, the tools that their template gets, and the names of the record's unread fields."""

    messages: Messages
    tools: Sequence[JsonMapping]
    unread: Sequence[str]


class _Form(NamedTuple):
    """A form: the fields that identify it, the fields that it may have, and the function that makes the messages."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    messages: Callable[[JsonMapping], object]


def _of_share_gpt(record: JsonMapping) -> object:
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return turns
    return _system(record) + [_renamed(turn) for turn in turns]


def _renamed(turn: JsonObject) -> JsonObject:
    """Returns a message of ShareGPT with today's names of role and content."""
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if "from" not in turn:
        return others
    role = SHARE_GPT.get(str(turn["from"]), turn["from"])  # a list has no hash
    return {"role": role, "content": turn.get("value"), **others}


def _of_alpaca(record: JsonMapping) -> object:
    asked = [record["instruction"], *([record["input"]] if record.get("input") else [])]
    question = "\n".join(asked) if all(isinstance(text, str) for text in asked) else asked
    return [*_system(record), _message("user", question), _message("assistant", record["output"])]


def _of_prompt(name: str, record: JsonMapping) -> object:
    """Returns messages of which only the answer counts. Prompt and answer are texts or lists of messages."""
    asked, answer = record["prompt"], record[name]
    if isinstance(asked, list) and all(isinstance(message, dict) for message in asked):
        asked = [message | {"train": False} if message.get("role") == "assistant" else message for message in asked]
    else:
        asked = [_message("user", asked)]
    return asked + (answer if isinstance(answer, list) else [_message("assistant", answer)])


def _system(record: JsonMapping) -> list[JsonObject]:
    return [_message("system", record["system"])] if record.get("system") else []


def _message(role: str, content: object) -> JsonObject:
    return {"role": role, "content": content}


FORMS = (
    _Form(("messages",), (), lambda record: record["messages"]),
    _Form(("conversations",), ("system",), _of_share_gpt),
    _Form(("instruction", "output"), ("input", "system"), _of_alpaca),
    *(_Form(("prompt", name), (), partial(_of_prompt, name)) for name in ANSWERS),
)


def conversation_of(record: object) -> Conversation:
    """Returns the conversation of a record. ValueError if the record has none of the forms, or a message is broken."""
    if not isinstance(record, Mapping):
        raise ValueError(f"it is not a JSON object, but of type {type(record).__name__}: write an object on each line")
    record = {name: value for name, value in record.items() if value is not None}
    form = next((form for form in FORMS if all(name in record for name in form.needed)), None)
    if form is None:
        has = ", ".join(sorted(map(str, record))) or "nothing"
        names = "; ".join(" and ".join(form.needed) for form in FORMS)
        raise ValueError(f"it has {has}, but the fields of no conversation ({names})")
    messages = form.messages(record)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("its messages are no list of objects")
    messages = [_checked(number, message) for number, message in enumerate(messages, start=1)]
    unread = sorted({*record} - {*form.needed, *form.optional, "tools"})
    return Conversation(messages, _tools_of(record.get("tools", [])), unread)


def _tools_of(tools: Any) -> Sequence[JsonMapping]:
    """Returns the tools of a record, a list of objects or its JSON."""
    if isinstance(tools, str) and tools:
        tools = json_objects.value(tools, "its field tools", lenient=True)
    tools = tools or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("its tools are no list of objects")
    return tools


def _checked(number: int, message: JsonObject) -> JsonObject:
    """Returns a message with its parts of text joined. ValueError without a known role and text, or for a bad mask."""
    if (role := message.get("role")) not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}; known are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
        if other := [kind for kind in kinds if kind != "text"]:
            raise ValueError(f"message {number} has a content part of type {other[0]!r}: only text is trained")
        texts = [part.get("text") for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"message {number} has a content part of type 'text' without a string")
        content = "".join(texts)
        message = message | {"content": content}
    if not isinstance(content, str) and not (role == "assistant" and content is None):
        raise ValueError(f"message {number} has a content of type {type(content).__name__}: write one string")
    if message.get("weight") not in (None, 0, 1):
        raise ValueError(f"message {number} has the weight {message['weight']!r}; it may be 0 or 1")
    if message.get("train") not in (None, False, True):
        raise ValueError(f"message {number} has train={message['train']!r}; it may be true or false")
    return message


def candidates(messages: Messages, loss_on: str) -> list[int]:
    """Returns the messages, by number, that `data.loss_on` selects. Masks may exclude some of them.

    ValueError if no message has a selected role.
    """
    if loss_on == "marked":
        return [n for n, message in enumerate(messages) if any(message.get(name) for name in MASKS)]
    roles = ("assistant",) if loss_on == "last" else tuple(loss_on.split(","))
    found = [n for n, message in enumerate(messages) if message["role"] in roles]
    if not found:
        raise ValueError(f"it has no answer: no message has the role {' or '.join(roles)}")
    last_question = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [n for n in found if n > last_question] if loss_on == "last" else found


def is_trained(message: JsonMapping) -> bool:
    """Whether the masks of a message include it in the loss."""
    return all(message.get(name) is None or message[name] for name in MASKS)
