"""docs/paper_tables.md: its parts by name, in order, each between marks that `--only` finds again."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType

from files.pages import head
from paper import (
    compression,
    elastic,
    fsdp,
    mics_ablations,
    mics_figure_2,
    mics_figure_16,
    mics_figures_7_9,
    mics_figures_12_to_15,
    mics_predictions,
    mics_section_3,
    mics_table_1,
    pipelines,
    scopes,
    three_calls,
    zero,
    zeropp,
)
from paper.records import Records

PARTS: Mapping[str, Sequence[ModuleType]] = {
    "mics": (
        mics_section_3,
        mics_table_1,
        mics_figure_2,
        mics_figures_7_9,
        mics_ablations,
        mics_figures_12_to_15,
        mics_predictions,
        mics_figure_16,
    ),
    "pipelines": (pipelines,),
    "zero": (zero,),
    "fsdp": (fsdp,),
    "zeropp": (zeropp,),
    "compression": (compression,),
    "scopes": (scopes,),
    "elastic": (elastic,),
    "calls": (three_calls,),
}


def named(words: str) -> list[str]:
    """Returns the names of parts in `mics,zero`. ValueError with the nearest names for an unknown one."""
    names = [word.strip() for word in words.split(",")]
    for name in names:
        if name not in PARTS:
            near = get_close_matches(name.lower(), PARTS, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(PARTS)}"
            raise ValueError(f"--only={name} is not a part of the page; {hint}")
    return names


def plots(names: Sequence[str]) -> list[ModuleType]:
    """Returns the modules of these parts that draw a picture: those with `IMAGE` and `plot`."""
    return [module for name in names for module in PARTS[name] if hasattr(module, "IMAGE")]


def document(records: Records) -> str:
    """Returns the page. ValueError if a record lacks what a part needs."""
    return "\n\n".join([*_head(records), *(_part(name, records) for name in PARTS)]) + "\n"


def replaced(page: str, names: Sequence[str], records: Records) -> str:
    """Returns the page with these parts written again. ValueError if the page has not exactly one of each."""
    for name in names:
        if page.count(_begin(name)) != 1 or page.count(_end(name)) != 1:
            raise ValueError(f"docs/paper_tables.md has no part {name}: run python -m paper")
        before, _, rest = page.partition(_begin(name))
        page = before + _part(name, records) + rest.partition(_end(name))[2]
    return page


def _begin(name: str) -> str:
    return f"<!-- {name} -->"


def _end(name: str) -> str:
    return f"<!-- end of {name} -->"


def _part(name: str, records: Records) -> str:
    sections = [module.section(records).markdown() for module in PARTS[name]]
    return "\n\n".join([_begin(name), *sections, _end(name)])


def _head(records: Records) -> list[str]:
    about, steps = records.about, len(next(iter(records.curves.values()))["losses"])
    commits = ", ".join(sorted({line["commit"][:7] for line in records.papers}))
    return [
        head("The papers' numbers beside ours").rstrip(),
        "Written by `python -m paper` from the records in `benchmarks/results`; do not edit. Every number of ours in "
        "a table is computed from a record or a formula; published ones are in `paper/published*.py`. "
        f"Compiled programs: commit {about['commit'][:7]}, jax {about['jax']}, virtual CPU devices; benchmarks.papers: "
        f"commit {commits}. `python -m paper` runs nothing (`--only=NAME` writes one part again: {', '.join(PARTS)}); "
        "the records are made by",
        f"    {about['command']}\n    python -m benchmarks.papers\n    python -m benchmarks.full_scale\n"
        f"    python -m benchmarks.fidelity --steps={steps}",
        "and by the commands of docs/strategies.md and docs/compression_accuracy.md.",
        "How ours was obtained: *compiled*, the collectives of a compiled program are counted; *shapes*, the bytes of "
        "the state are added up, nothing is compiled; *replayed*, the planner replays a compiled program on links and "
        "devices that are not here, with a queue for each network level (jax 0.10.2 has one stream for all "
        "collectives: what is exposed is a lower bound); *on the wire*, the interface of an emulated node counted; "
        "*measured*, a run on the emulated cluster was timed; *enumerated*, all cases were tried.",
    ]
