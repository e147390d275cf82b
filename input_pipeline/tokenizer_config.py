"""The special tokens of a tokenizer, from the tokenizer_config.json next to its vocabulary."""

from collections.abc import Mapping
from pathlib import Path

from runtime.files import json_objects
from runtime.files.json_objects import JsonObject

CONFIG_FILE = "tokenizer_config.json"


def read(folder: Path) -> JsonObject:
    """Returns the content of the folder's tokenizer_config.json, {} without the file. ValueError if it is damaged."""
    try:
        return json_objects.read(folder / CONFIG_FILE, lenient=True)  # model_max_length is often int(1e30)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{folder / CONFIG_FILE} cannot be read: {error.strerror}") from error


def named_tokens(content: Mapping[str, object]) -> dict[str, str]:
    """Returns the special tokens by their names in the file, such as `eos_token`."""
    tokens = {name: _text(token) for name, token in content.items() if name.endswith("_token")}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def adds_bos(content: Mapping[str, object]) -> bool | None:
    """Returns whether texts begin with `bos_token`; None if the file does not state it."""
    value = content.get("add_bos_token")
    return value if isinstance(value, bool) else None


def _text(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else token
