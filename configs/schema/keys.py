"""Declaration of config keys: default, meaning, allowed values, unit, and whether a resumed run may change them."""

import ast
import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from configs.schema.own import EXAMPLES, OWN

Value = TypeVar("Value")
BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
# the name in the documentation, that in errors, and the value of a text; KeyError, ValueError or SyntaxError for others
TYPES: Mapping[Any, tuple[str, str, Callable[[str], Any]]] = {
    bool: ("bool", "True or False", lambda text: BOOLS[text.lower()]),
    int: ("int", "a whole number", lambda text: int(text, 16 if text.lower().startswith("0x") else 10)),
    float: ("float", "a number", float),
    str: ("str", "a string", str),
    str | int: ("str", "a string or a whole number", str),
    tuple[int, ...]: ("tuple of int", "a tuple of whole numbers", ast.literal_eval),
}
NAME = ":NAME"  # suffix of a choice that allows any name: `tfds:NAME` allows `tfds:lm1b`


@dataclass(frozen=True, kw_only=True)
class Key:
    """The declaration of a key. NaN is outside of every range."""

    default: Any
    meaning: str
    type: Any = None  # the annotation, which `keys_of` adds
    choices: Sequence[str | int] = ()
    topics: Sequence[str] = ()  # of `register`, whose names are choices too
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    unit: str = ""
    resumable: bool = False  # whether a resumed run may change it

    @property
    def type_name(self) -> str:
        """Its type's name in the documentation."""
        return TYPES[self.type][0]

    @property
    def range(self) -> str:
        """The allowed range of numbers, in words; "" if it is not limited."""
        if self.least is not None and self.most is not None:
            return f"from {self.least} to {self.most}"
        if self.below == math.inf:
            return f"above {self.above} and finite"
        bounds = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)

    @property
    def every_choice(self) -> tuple[str | int, ...]:
        """The built-in choices, and the choices registered by the config file."""
        return (*self.choices, *(name for topic in self.topics for name in OWN[topic]))

    @property
    def allowed(self) -> str:
        """The allowed choices, with commas; "" if any value is allowed."""
        return ", ".join(map(str, self.every_choice))

    def is_choice(self, value: Any) -> bool:
        """Whether a value is a choice, or a name that the config file registered."""
        return any(_is_choice(value, choice) for choice in self.every_choice)

    def parse(self, text: str) -> Any:
        """Returns the value that a text on the command line means; other text as it is, which `check` refuses."""
        try:
            return TYPES[self.type][2](text)
        except (KeyError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return text

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError if `value` is not allowed for the key, whose full name is `name`."""
        if not _has_type(value, self.type):
            raise ValueError(f"{name}={value!r} must be {TYPES[self.type][1]}, like {self.default!r}")
        if self.choices and not self.is_choice(value):
            if isinstance(self.default, int):
                raise ValueError(f"{name}={value} must be {' or '.join(map(str, self.choices))}")
            choices = [str(choice) for choice in self.every_choice]
            near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            examples = "".join(f"; {EXAMPLES[topic]} registers others" for topic in self.topics if topic in EXAMPLES)
            raise ValueError(f"{name}={value} is not known; one of {', '.join(choices)}{hint or examples}")
        if self.range and not self._is_in_range(value):
            raise ValueError(f"{name}={value} must be {self.range}: {self.meaning}")

    def _is_in_range(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


def key(default: Value, meaning: str, **facts: Any) -> Value:
    """Declares a key as a field of a section; `facts` are further fields of `Key`."""
    return field(default=default, metadata={"key": Key(default=default, meaning=meaning, **facts)})


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the config. ValueError for a value that its key does not allow."""

    SECTION: ClassVar[str] = ""  # its name in the config
    RESUMABLE: ClassVar[bool] = False  # whether a resumed run may change all of its keys

    def __init_subclass__(cls, name: str = "", *, resumable: bool = False) -> None:
        if name:
            cls.SECTION, cls.RESUMABLE = name, resumable

    def __post_init__(self) -> None:
        for name, declared in keys_of(type(self)).items():
            declared.check(f"{self.SECTION}.{name}".lstrip("."), getattr(self, name))


@functools.cache
def keys_of(section: type[Section]) -> Mapping[str, Key]:
    """Returns the keys of a section by name, in order of declaration."""
    declared = {f.name: (f.metadata["key"], f.type) for f in fields(section) if "key" in f.metadata}
    return {
        name: replace(found, type=annotation, resumable=found.resumable or section.RESUMABLE)
        for name, (found, annotation) in declared.items()
    }


def nearest(word: str, known: Sequence[str]) -> str:
    """Returns the known word most similar to `word`; prefers words that it abbreviates, and words of its section.

    `optimizer.lr` is `optimizer.learning_rate`, as everywhere, and `layers` `model.num_layers`.
    """
    word = re.sub(r"\blr$", "learning_rate", word)
    section = word.rpartition(".")[0]
    meant = [name for name in known if abbreviates(word, name)]
    meant = [name for name in meant if name.rpartition(".")[0] == section] or meant
    fewest = min((name.count("_") for name in meant), default=0)  # of words: no `outer_learning_rate`
    meant = [name for name in meant if name.count("_") == fewest]
    return difflib.get_close_matches(word, meant or known, n=1, cutoff=0.0)[0]


def abbreviates(word: str, name: str) -> bool:
    """Whether the last part of `word` is made of beginnings of words of the last part of `name`, in their order."""
    short, words = (text.rpartition(".")[2].lower() for text in (word, name))
    pattern = ""
    for part in words.split("_"):
        pattern += functools.reduce(lambda rest, letter: f"(?:{re.escape(letter)}{rest})?", reversed(part), "")
    return bool(short) and re.fullmatch(pattern, short.replace("_", "")) is not None


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested dict as `{"a.b": value}`."""
    out: dict[str, Any] = {}
    for name, value in section.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {f"{prefix}{name}": value}
    return out


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Returns `{"a.b": value}` as a nested dict."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        (out.setdefault(section, {}) if section else out)[last] = value
    return out


def _has_type(value: Any, wanted: Any) -> bool:
    if wanted == tuple[int, ...]:
        return isinstance(value, tuple | list) and all(_has_type(item, int) for item in value)
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, int | float if wanted is float else wanted)


def _is_choice(value: object, choice: str | int) -> bool:
    if isinstance(choice, str) and choice.endswith(NAME):
        prefix = choice.removesuffix(NAME) + ":"
        return value.startswith(prefix) and value != prefix
    return value == choice
