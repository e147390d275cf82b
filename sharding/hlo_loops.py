"""How often the loops of a compiled program run.

XLA says it of most loops. Of the others (those that it peeled or pipelined) the counter, its first value, its step and
the limit are looked up: they may stand in fusions, or come in through the tuples of the loops around.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from sharding.hlo_program import Computation, Instruction, Program

_KNOWN = re.compile(r'known_trip_count\\?"?:\s*\{\\?"?n\\?"?:\\?"?(\d+)')
_MOST = 2**40
_SAME = {"copy", "bitcast", "convert", "reshape", "copy-done", "opt-barrier", "optimization-barrier"}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "minimum": min,
    "maximum": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}
Path = tuple[int, ...]  # of indices into nested tuples


@dataclass(frozen=True, kw_only=True)
class Site:
    """A computation, and the instruction that runs it: what its parameters are, is found there."""

    computation: Computation
    caller: Instruction | None = None
    outer: "Site | None" = None
    counters: dict[Path, int] = field(default_factory=dict)  # elements of a loop's tuple, taken to be these values


def trip_count(loop: Instruction, site: Site, program: Program) -> int:
    """Returns how often a `while` in the computation of `site` runs. ValueError if the program does not tell."""
    known = _KNOWN.search(loop.attributes.get("backend_config", ""))
    if known:
        return int(known.group(1))
    condition = program.called(loop.computation("condition"), loop)
    body = program.called(loop.computation("body"), loop)
    read = {(i.index,) for i in condition.instructions if i.opcode == "get-tuple-element"}
    changing = [path for path in read if not _is_kept(body, path)]
    if len(changing) != 1:
        raise ValueError(f"{loop} has no trip count that can be read: its condition does not depend on one counter")
    counter = changing[0]
    first = _value(program, site, loop.operands[0], counter)

    def evaluated(computation: Computation, path: Path, at: int) -> int | None:
        inside = Site(computation=computation, caller=loop, outer=site, counters={counter: at})
        return _value(program, inside, computation.root.name, path) if computation.root else None

    after = None if first is None else evaluated(body, counter, first)
    again = None if after is None else evaluated(body, counter, after)
    if first is None or after is None or again is None or again - after != after - first:
        raise ValueError(f"{loop} has no trip count that can be read: its counter has no first value and step")
    step = after - first

    def runs(iteration: int) -> bool:
        value = evaluated(condition, (), first + iteration * step)
        if value is None:
            raise ValueError(f"{loop} has no trip count that can be read: its condition is no comparison of integers")
        return bool(value)

    most = 1
    while runs(most - 1):
        most *= 2
        if most > _MOST:
            raise ValueError(f"{loop} has no trip count that can be read: its counter does not reach a limit")
    low, high = most // 2, most - 1  # the first iteration that does not run is one of these
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if runs(middle) else (low, middle)
    return low


def _is_kept(body: Computation, path: Path) -> bool:
    """Whether an element of a loop's tuple is what it was, after the body."""
    wanted, name = path, body.root.name if body.root else ""
    while name in body.by_name:
        instruction = body.by_name[name]
        if instruction.opcode == "parameter":
            return path == wanted
        if instruction.opcode == "tuple" and path:
            name, path = instruction.operands[path[0]], path[1:]
        elif instruction.opcode == "get-tuple-element":
            name, path = instruction.operands[0], (instruction.index, *path)
        elif instruction.opcode in _SAME:
            name = instruction.operands[0]
        else:
            return False
    return False


def _value(program: Program, site: Site, name: str, path: Path) -> int | None:
    """Returns the integer that an instruction (or an element of its tuple) has in every execution; None: not known."""
    instruction = site.computation.by_name.get(name)
    if instruction is None:
        return None
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "parameter":
        return _of_parameter(program, site, int(instruction.literal), path)
    if opcode == "get-tuple-element":
        return _value(program, site, operands[0], (instruction.index, *path))
    if opcode == "tuple" and path:
        return _value(program, site, operands[path[0]], path[1:])
    if opcode in _SAME:
        return _value(program, site, operands[0], path)
    if opcode in ("fusion", "call") and instruction.calls:
        called = program.called(instruction.calls[0], instruction)
        inside = Site(computation=called, caller=instruction, outer=site)
        return _value(program, inside, called.root.name, path) if called.root else None
    if opcode == "while":
        body = program.called(instruction.computation("body"), instruction)
        return _value(program, site, operands[0], path) if _is_kept(body, path) else None
    if path:
        return None
    if opcode == "constant":
        literal = {"true": "1", "false": "0"}.get(instruction.literal, instruction.literal)
        return int(literal) if re.fullmatch(r"-?\d+", literal) else None
    values = [_value(program, site, operand, ()) for operand in operands]
    if None in values or len(values) != 2:
        return None
    a, b = values
    assert a is not None and b is not None
    if opcode == "compare":
        return int(_COMPARISONS[instruction.attributes["direction"]](a, b))
    return _ARITHMETIC[opcode](a, b) if opcode in _ARITHMETIC else None


def _of_parameter(program: Program, site: Site, number: int, path: Path) -> int | None:
    """Returns what a parameter of the site's computation is where that is run, if always the same."""
    if path in site.counters:
        return site.counters[path]
    caller, outer = site.caller, site.outer
    if caller is None or outer is None:
        return None
    if caller.opcode == "while":
        body = program.called(caller.computation("body"), caller)
        return _value(program, outer, caller.operands[0], path) if _is_kept(body, path) else None
    if caller.opcode == "conditional":
        return None
    return _value(program, outer, caller.operands[number], path) if number < len(caller.operands) else None
