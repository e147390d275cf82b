"""The values of config files."""

import importlib
import json
from typing import Any


def values_of(file: str) -> dict[str, Any]:
    """Returns the values of a config file with its argument, as JSON."""
    path, _, argument = file.partition(":")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    return json.loads((module.get_config(argument) if argument else module.get_config()).to_json())
