"""Prints docs/config.md: `python -m configs.schema > docs/config.md`."""

import functools
from collections.abc import Mapping

from configs.schema import MODELS, Config, Key, Section, TransformerConfig, combinations, keys_of, sections
from configs.schema.model import ImageConfig, ModelConfig

HEAD = """# Config

[mics-jax](../README.md), [all pages](README.md)

Every key, written by `python -m configs.schema > docs/config.md`. A config file sets `config.batch.global_size = 64`,
the command line `--config.batch.global_size=64`. A value has the default's type, and is never NaN. Units and allowed
values are in parentheses. Starred keys may change when a run [resumes](training.md#a-run). Methods that send fewer
bytes may cost loss ([which do](results/compression_accuracy.md#which-methods-are-free)).
"""

COMBINATIONS = """## What does not go together

Each pair is refused in one line with the reason and a remedy. Others can be combined, if sizes divide.
With one replica (`zero2`, `zero3`, or a group of all devices) the method of the replica all-reduce
[idles](elasticity.md). A remedy "in a new run" names a key that a resumed run may not change.
"""
SIGNS = {"at least ": "≥", "at most ": "≤", "above ": ">", "below ": "<", " and ": ", ", "from ": ""}


def page() -> str:
    """Returns the page: one table per section; keys that several models share are listed once."""
    parts = [HEAD, table("Keys without a section", "", keys_of(Config))]
    for name, section in sections("").items():
        parts += _models() if name == "model" else [table(f"`{name}`", "", keys_of(section))]
    return "\n".join([*parts, COMBINATIONS, combinations.table(), ""])


def _models() -> list[str]:
    titles = {ModelConfig: "`model`", TransformerConfig: "`model` of text", ImageConfig: "`model` of images"}
    titles |= {model: f"`model` with `kind={kind}`" for kind, model in MODELS.items()}
    parts = []
    for model, title in titles.items():
        (base,) = model.__bases__
        known = keys_of(base) if base in titles else {}
        own = {
            name: key  # each has its own model.kind
            for name, key in keys_of(model).items()
            if name not in known or (key != known[name] and "model" not in key.topics)
        }
        parts.append(table(title, _about(model) + f" Further keys: {titles.get(base)}." * bool(known), own))
    return parts


def _about(section: type[Section]) -> str:
    return (section.__doc__ or "").partition("\n")[0]


def table(title: str, about: str, keys: Mapping[str, Key]) -> str:
    """Returns a heading, a description, and a table with one row per key."""
    lines = [f"## {title}\n", *([f"{about}\n"] if about else [])]
    lines += ["| key=default | meaning |", "|---|---|"]
    for name, key in keys.items():
        limits = functools.reduce(lambda words, sign: words.replace(*sign), SIGNS.items(), key.range)
        allowed = ", ".join(f"`{choice}`" for choice in key.choices) or limits
        # a meaning names its unit, or the name ends in _s
        unit = "" if key.unit.rstrip("s") in key.meaning else key.unit
        facts = ", ".join(filter(None, (unit, allowed)))
        lines.append(f"| `{name}={key.default!r}`{'*' * key.resumable} | {key.meaning}{f' ({facts})' * bool(facts)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
