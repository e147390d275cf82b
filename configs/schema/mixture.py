"""Values that name sources: `data.mixture="3 folder:/wiki, 1 tfds:lm1b"` and `eval.data="wiki folder:/d, split"`."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

LEAST_SHARE = Fraction(1, 1 << 20)  # the order of a block of examples in which each source occurs is kept in memory
TFDS = re.compile(r"(tfds:.*?)(?::([/~.].*))?")  # a version, `tfds:wiki40b/en:1.3.0`, is part of the name
_SECRET = re.compile(r"\w://.*[?#@]", re.DOTALL)
_BEFORE_WEIGHT = re.compile(r",(?=\s*[\d.eE/+-]+\s)")


def refuse_secrets(what: str, text: str) -> None:
    """ValueError, which does not show `text`, if it has a URL with a query, a fragment, a user name or a password."""
    if _SECRET.search(text):
        raise ValueError(
            f"{what} is a URL with a query, or with a user name or password: it would be saved in config.json or "
            "shown; leave these out, and give credentials by environment variables (docs/data.md)"
        )


@dataclass(frozen=True, kw_only=True)
class Component:
    """One source of a mixture."""

    weight: Fraction  # above 0; only its ratio to the others' counts
    source: str  # as data.source
    path: str  # as data.path; "" for none

    @cached_property
    def name(self) -> str:
        """SOURCE[:PATH]; no two components of a mixture have the same."""
        return f"{self.source}:{self.path}" if self.path else self.source


def parse(mixture: str) -> tuple[Component, ...]:
    """Returns the components of `WEIGHT SOURCE[:PATH], ...`; () for "". ValueError for anything else.

    A path has no comma. The data_dir of a TFDS data set begins with `/`, `~` or `.`. Sources and paths are not checked.
    """
    for part in _BEFORE_WEIGHT.split(mixture):  # a comma may be part of a password
        refuse_secrets("data.mixture: the path of a component", part)
    components = tuple(_component(part.strip()) for part in mixture.split(",")) if mixture else ()
    names = [component.name.rstrip("/") for component in components]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"data.mixture names {name} twice: add up its weights in one component")
    total = sum(component.weight for component in components)
    for component in components:
        if component.weight < LEAST_SHARE * total:
            raise ValueError(
                f"data.mixture: {component.name} would be less than one example in {1 / LEAST_SHARE}: raise its weight "
                "or leave it out"
            )
    return components


def _component(text: str) -> Component:
    number, _, what = text.partition(" ")
    what = what.strip()
    try:
        weight = Fraction(number if what else "")
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"data.mixture has the component {text!r}: write WEIGHT SOURCE[:PATH], with commas between components, "
            "such as '3 folder:/data/wiki, 1 tfds:lm1b'"
        ) from error
    if weight <= 0:
        raise ValueError(f"data.mixture: the weight of {what} is {number}: it must be above 0, or leave {what} out")
    source, path = _source_of(what)
    return Component(weight=weight, source=source, path=path)


def _source_of(text: str) -> tuple[str, str]:
    """Returns source and path of SOURCE[:PATH]."""
    if found := TFDS.fullmatch(text):
        return found[1], found[2] or ""
    source, _, path = text.partition(":")
    return source, path


SPLIT = "split"  # the validation split of the training data
_SET_NAME = re.compile(r"[\w.-]+")


def parse_sets(text: str) -> dict[str, Component]:
    """Returns the validation sets of `NAME SOURCE[:PATH], ...` by name; {} for "". ValueError for anything else.

    `split` alone names the validation split of the training data, whose source is "" here.
    """
    sets: dict[str, Component] = {}
    for part in (part.strip() for part in text.split(",") if text):
        refuse_secrets("eval.data: the path of a set", part)
        name, _, what = part.partition(" ")
        if not _SET_NAME.fullmatch(name) or bool(what.strip()) == (name == SPLIT) or name in sets:
            raise ValueError(
                f"eval.data has the set {part!r}: write NAME SOURCE[:PATH] with different names, or split, with commas "
                "between sets, such as 'wiki folder:/data/wiki, split'"
            )
        source, path = _source_of(what.strip())
        sets[name] = Component(weight=Fraction(1), source=source, path=path)
    return sets
