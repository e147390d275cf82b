"""Prints docs/config.md: `python -m configs.schema > docs/config.md`."""

from collections.abc import Mapping

from configs.schema import MODELS, Config, Key, Section, combinations, keys_of, sections

HEAD = """# Config

[mics-jax](../README.md) trains large sharded models on clusters with a slow network.
This is one of [its pages](README.md), listed there in the order in which to read them.

Every key of a config with its default and its meaning, written by `python -m configs.schema > docs/config.md` from
`configs/schema/`. An experiment changes keys in its file (`config.batch.global_size = 64`), a command line with
`--config.batch.global_size=64`. "resumable": a resumed run may change the value
([Training](training.md#a-run)). NaN is never allowed.
"""

COMBINATIONS = """## What does not go together

Each pair is refused in one line, with the reason and what would work. All others can be combined, if sizes divide.
One replica: `zero2`, `zero3`, a group of all devices, `sharding.partitioner=auto`, `sharding.two_hop=False`.
"""


def page() -> str:
    """Returns the page: one table per section, and one per kind of model."""
    parts = [HEAD, table("Keys without a section", "", keys_of(Config))]
    for name, section in sections("").items():
        if name != "model":
            parts.append(_section(f"`{name}`", section))
            continue
        parts += [_section(f"`model` with `kind={kind}`", model) for kind, model in MODELS.items()]
    return "\n".join([*parts, COMBINATIONS, combinations.table(), ""])


def _section(title: str, section: type[Section]) -> str:
    return table(title, (section.__doc__ or "").partition("\n")[0], keys_of(section))


def table(title: str, about: str, keys: Mapping[str, Key]) -> str:
    """Returns a heading, a description, and a table with one row per key."""
    lines = [f"## {title}\n", *([f"{about}\n"] if about else [])]
    lines += ["| key | type | default | allowed | meaning | resumable |", "|---|---|---|---|---|---|"]
    for name, key in keys.items():
        kind = f"{key.type_name} ({key.unit})" if key.unit else key.type_name
        allowed = ", ".join(f"`{choice}`" for choice in key.choices) or key.range
        cells = (f"`{name}`", kind, f"`{key.default!r}`", allowed, key.meaning, "yes" if key.resumable else "")
        lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
