"""Choices that config files add to the built-in choices, by topic and name (configs/register.py)."""

from typing import Any

TOPICS = ("model", "source", "tokenizer", "codec", "all_reduce", "interval", "strategy", "optimizer", "schedule")
OWN: dict[str, dict[str, Any]] = {topic: {} for topic in TOPICS}
EXAMPLES = dict.fromkeys(("all_reduce", "interval"), "examples/methods/config.py")  # config files with further names
