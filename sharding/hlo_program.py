"""Parses the text of a compiled program (`compiled.as_text()`): computations, instructions, trip counts of loops.

The instructions of a computation are in the order of the text. In a module with `is_scheduled=true` this is the order
in which a device starts them. XLA states the trip counts of most loops. For other loops (peeled or pipelined by XLA)
the counter, its first value, its step and the limit are looked up. They may be inside fusions, or enter through the
tuples of outer loops.
"""

import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")  # of source lines, above the computations
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_NAME = re.compile(r"^(ROOT )?%?([\w.\-]+) = ")
_COMMENT = re.compile(r"/\*.*?\*/")
_TENSOR = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{[^}]*\})?")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ELEMENT = re.compile(r"#\d+")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_CALLS = ("to_apply", "calls", "called_computations", "branch_computations", "true_computation", "false_computation")
_KNOWN = re.compile(r'known_trip_count\\?"?:\s*\{\\?"?n\\?"?:\\?"?(\d+)')
_MOST = 2**40  # largest number of iterations
_SAME = {"copy", "bitcast", "convert", "reshape", "copy-done", "opt-barrier", "optimization-barrier"}
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    **{name: getattr(operator, name.lower()) for name in ("LT", "LE", "GT", "GE", "EQ", "NE")},
}
Path = tuple[int, ...]  # indices into nested tuples
HOST_MEMORY = "S(5)"  # in the layout of an array


@dataclass(frozen=True)
class ArrayType:
    """Type of one array, without its layout. `token[]` and similar types are tensors of zero bytes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.dims)

    @property
    def num_bytes(self) -> float:
        bits = re.search(r"\d+", self.dtype)  # the first number: 8 for f8e4m3fn
        return self.num_elements * (int(bits.group()) / 8 if bits else self.dtype == "pred")


Type = ArrayType | tuple["Type", ...]


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line: `%name = result opcode(operands), key=value, ...`."""

    name: str
    opcode: str  # as written: all-gather, all-gather-start, fusion, ...
    result: Type
    operands: tuple[str, ...]  # names in the same computation
    literal: str  # content of the parentheses: the number of a parameter, the value of a constant
    written_attributes: str  # the text `key=value, ...`
    is_root: bool = False
    is_on_host: bool = False  # whether an array of its result is in the host's memory

    @cached_property
    def attributes(self) -> dict[str, str]:
        """The attributes after the operands. A value keeps its brackets."""
        pairs = (part.partition("=") for part in _parts(self.written_attributes)[0])
        return {key: value for key, equals, value in pairs if equals}

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """The computations of a fusion, call, reduction, async-start or conditional, in order. A loop has none here."""
        named = (self.attributes.get(key, "") for key in _CALLS)
        return tuple(name for text in named for name in re.findall(r"[\w.\-]+", text))

    @cached_property
    def op_name(self) -> str:
        """The name that jax gave the operation, with its scopes; "" if XLA lost it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes.get("metadata", ""))
        return found.group(1) if found else ""

    @cached_property
    def index(self) -> int:
        """The index of a get-tuple-element."""
        return int(self.attributes["index"])

    def computation(self, key: str) -> str:
        """Returns the name of the computation `body=` or `condition=` of a loop."""
        return self.attributes.get(key, "").lstrip("%")

    def __str__(self) -> str:
        return f"%{self.name} = {self.opcode}({', '.join(self.operands) or self.literal})"


@dataclass(frozen=True)
class Computation:
    """Instructions in the order of the text."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by their number."""
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def root(self) -> Instruction | None:
        """The instruction that makes the result, or None if the text marks none."""
        return next((i for i in reversed(self.instructions) if i.is_root), None)

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction's result."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found


@dataclass(frozen=True, kw_only=True)
class Program:
    """A module."""

    computations: dict[str, Computation]
    entry: Computation

    def called(self, name: str, by: Instruction) -> Computation:
        """Returns a computation. ValueError if the text lacks it."""
        if name not in self.computations:
            raise ValueError(f"{by} names the computation {name!r}, which the program does not have")
        return self.computations[name]


def tensors(result: Type) -> list[ArrayType]:
    """Returns the arrays of a type in order, including nested tuples."""
    return [result] if isinstance(result, ArrayType) else [tensor for part in result for tensor in tensors(part)]


def num_bytes(result: Type) -> float:
    """Returns the bytes of all arrays of a type."""
    return sum(tensor.num_bytes for tensor in tensors(result))


# ---------------------------------------------------------------------------------------------- the text


def parse_program(text: str) -> Program:
    """Returns the program of a module's text. ValueError names an instruction, or a line, that cannot be read."""
    found: dict[str, list[Instruction]] = {}
    entry, current, is_table = "", "", False
    for line in _whole_lines(text):
        if current and " = " in line:
            found[current].append(_instruction(line))
        elif current and line.startswith("}"):
            current = ""
        elif not current and (header := _HEADER.match(line)):
            current = header.group(2)
            found[current] = []
            entry = current if header.group(1) else entry
        elif not line.strip():
            is_table = False
        elif line in _TABLES:
            is_table = True
        elif current or not (is_table or line.startswith("HloModule")):
            raise ValueError(f"a line of the compiled program cannot be read: {line.strip()[:120]}")
    if not entry:
        raise ValueError("the text is no compiled HLO module: it has no ENTRY computation")
    if current:
        raise ValueError(f"the text of the compiled program ends inside the computation {current}")
    computations = {name: Computation(name, tuple(_with_elements(read))) for name, read in found.items()}
    return Program(computations=computations, entry=computations[entry])


def _whole_lines(text: str) -> Iterator[str]:
    """Yields the lines of a text, with the attributes of an instruction, in which Mosaic breaks lines, in one line."""
    lines = iter(text.splitlines())
    for line in lines:
        whole = line
        while line.startswith("  ") and _is_open(whole) and (more := next(lines, None)) is not None:
            whole += more
        yield whole


def _is_open(line: str) -> bool:
    """Returns whether brackets of an instruction continue on the next line."""
    if line.count("{") == line.count("}"):  # quick, and right unless a quoted text has an unpaired brace
        return False
    return sum({"{": 1, "}": -1}.get(token.group(), 0) for token in _TOKEN.finditer(line)) > 0


def _with_elements(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yields instructions, with a get-tuple-element before the first that reads an element of a tuple by name.

    XLA of jax 0.12 writes `%name#2` for that element, and XLA of jax 0.10 an instruction.
    """
    results = {instruction.name: instruction.result for instruction in instructions}
    for instruction in instructions:
        for operand in instruction.operands:
            for end in (found.end() for found in _ELEMENT.finditer(operand)):
                name = operand[:end]
                if name not in results:
                    whole, _, index = name.rpartition("#")
                    parts = results.get(whole, ())
                    if not isinstance(parts, tuple) or int(index) >= len(parts):
                        raise ValueError(f"{instruction} reads %{name}, which the compiled program does not have")
                    results[name] = parts[int(index)]
                    yield Instruction(
                        name=name,
                        opcode="get-tuple-element",
                        result=results[name],
                        operands=(whole,),
                        literal="",
                        written_attributes=f"index={index}",
                    )
        yield instruction


def _instruction(line: str) -> Instruction:
    """Returns the instruction of a line. ValueError quotes a line that is not an instruction."""
    line = _COMMENT.sub("", line.strip()) if "/*" in line else line.strip()
    try:
        name = _NAME.match(line)
        assert name
        begin = name.end()
        tensor = _TENSOR.match(line, begin)
        end = tensor.end() if tensor else _parts(line, begin + 1)[1] + 1
        result, opcode = _type(line[begin:end]), _OPCODE.match(line, end)
        assert opcode
        inside, end = _parts(line, opcode.end())
        assert end < len(line)
    except (AssertionError, ValueError, IndexError):
        raise ValueError(f"an instruction of the compiled program cannot be read: {line[:120]}") from None
    is_leaf = opcode.group(1) in ("constant", "parameter", "iota")
    return Instruction(
        name=name.group(2),
        opcode=opcode.group(1),
        result=result,
        operands=() if is_leaf else tuple(part.split()[-1].lstrip("%") for part in inside if part),
        literal=line[opcode.end() : end].strip(),
        written_attributes=line[end + 1 :],
        is_root=bool(name.group(1)),
        is_on_host=HOST_MEMORY in line[begin:end],
    )


def _type(text: str) -> Type:
    """Parses a type: a tensor, or a tuple of types."""
    if text[0] == "(":
        return tuple(_type(part) for part in _parts(text, 1)[0] if part)
    tensor = _TENSOR.match(text)
    assert tensor
    return ArrayType(
        tensor.group(1), tuple(int(d.strip().lstrip("<=")) for d in tensor.group(2).split(",") if d.strip())
    )


def _parts(text: str, start: int = 0) -> tuple[list[str], int]:
    """Returns the texts between commas from `start` on, and their end: an unmatched bracket or the end of the text."""
    parts, begin, depth, end = [], start, 0, len(text)
    for token in _TOKEN.finditer(text, start):
        what = token.group()
        if what in "({[":
            depth += 1
        elif what in ")}]":
            depth -= 1
            if depth < 0:
                end = token.start()
                break
        elif what == "," and not depth:
            parts.append(text[begin : token.start()].strip())
            begin = token.end()
    return [*parts, text[begin:end].strip()], end


# ------------------------------------------------------------------------------------------ trip counts


@dataclass(frozen=True, kw_only=True)
class Site:
    """A computation and the instruction that runs it, which determines the values of its parameters."""

    computation: Computation
    caller: Instruction | None = None
    outer: "Site | None" = None
    counters: dict[Path, int] = field(default_factory=dict)  # assumed values of elements of a loop's tuple


def trip_count(loop: Instruction, site: Site, program: Program) -> int:
    """Returns the trip count of a `while` in the computation of `site`. ValueError if it cannot be determined."""
    if known := _KNOWN.search(loop.attributes.get("backend_config", "")):
        return int(known.group(1))

    unknown = f"{loop} has no trip count that can be read"
    condition = program.called(loop.computation("condition"), loop)
    body = program.called(loop.computation("body"), loop)
    read = {(i.index,) for i in condition.instructions if i.opcode == "get-tuple-element"}
    changing = [path for path in read if not _is_kept(body, path)]
    if len(changing) != 1:
        raise ValueError(f"{unknown}: its condition does not depend on one counter")
    counter = changing[0]
    first = _value(program, site, loop.operands[0], counter)

    def evaluated(computation: Computation, path: Path, at: int | None) -> int | None:
        if at is None or computation.root is None:
            return None
        inside = Site(computation=computation, caller=loop, outer=site, counters={counter: at})
        return _value(program, inside, computation.root.name, path)

    after = evaluated(body, counter, first)
    again = evaluated(body, counter, after)
    if first is None or after is None or again is None or again - after != after - first:
        raise ValueError(f"{unknown}: its counter has no first value and step")
    step = after - first

    def stops(iteration: int) -> bool:
        value = evaluated(condition, (), first + iteration * step)
        if value is None:
            raise ValueError(f"{unknown}: its condition is no comparison of integers")
        return not value

    trips = bisect_left(range(_MOST), True, key=stops)
    if trips == _MOST:
        raise ValueError(f"{unknown}: its counter does not reach a limit")
    return trips


def _origin(computation: Computation, name: str, path: Path) -> tuple[Instruction | None, Path]:
    """Returns the instruction that makes a value (or an element of its tuple), through tuples and copies."""
    while instruction := computation.by_name.get(name):
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "tuple" and path:
            name, path = operands[path[0]], path[1:]
        elif opcode == "get-tuple-element":
            name, path = operands[0], (instruction.index, *path)
        elif opcode in _SAME:
            name = operands[0]
        else:
            return instruction, path
    return None, path


def _is_kept(body: Computation, path: Path) -> bool:
    """Whether the body leaves an element of a loop's tuple unchanged."""
    made, found = _origin(body, body.root.name, path) if body.root else (None, path)
    return made is not None and made.opcode == "parameter" and found == path


def _value(program: Program, site: Site, name: str, path: Path) -> int | None:
    """Returns the constant integer that an instruction (or an element of its tuple) always has, or None if unknown."""
    instruction, path = _origin(site.computation, name, path)
    if instruction is None:
        return None
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "parameter":
        return _of_parameter(program, site, int(instruction.literal), path)
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
    operation = _OPERATIONS.get(instruction.attributes["direction"] if opcode == "compare" else opcode)
    values = [_value(program, site, operand, ()) for operand in operands] if operation else []
    known = [value for value in values if value is not None]
    return int(operation(*known)) if operation and len(known) == len(values) == 2 else None


def _of_parameter(program: Program, site: Site, number: int, path: Path) -> int | None:
    """Returns the value of a parameter of the site's computation, if it is the same in all executions, else None."""
    if path in site.counters:
        return site.counters[path]
    caller, outer = site.caller, site.outer
    if caller is None or outer is None or caller.opcode == "conditional":
        return None
    if caller.opcode == "while":
        body = program.called(caller.computation("body"), caller)
        return _value(program, outer, caller.operands[0], path) if _is_kept(body, path) else None
    return _value(program, outer, caller.operands[number], path) if number < len(caller.operands) else None
