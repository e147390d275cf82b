"""The text of a compiled program (`compiled.as_text()`) as data: computations, their instructions, how often loops run.

The instructions of a computation are in the order of the text. In a module that says `is_scheduled=true` that is the
order in which a device starts them.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod

DTYPE_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25, "f4e2m1fn": 0.5, "bf16": 2}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_NAME = re.compile(r"^(ROOT )?%?([\w.\-]+) = ")
_COMMENT = re.compile(r"/\*.*?\*/")
_TENSOR = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{[^}]*\})?")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_KEY = re.compile(r"\s*([\w\-]+)=")
_CALLS = ("to_apply", "calls", "called_computations", "branch_computations", "true_computation", "false_computation")


@dataclass(frozen=True)
class Tensor:
    """Type of one array, its layout left out; `token[]` and the like are tensors of no bytes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.dims)

    @property
    def num_bytes(self) -> float:
        return self.num_elements * dtype_bytes(self.dtype)


Type = Tensor | tuple["Type", ...]


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line: `%name = result opcode(operands), key=value, ...`."""

    name: str
    opcode: str  # as written: all-gather, all-gather-start, fusion, ...
    result: Type
    operands: tuple[str, ...]  # names in the same computation
    literal: str  # what stands in the parentheses: the number of a parameter, the value of a constant
    written_attributes: str  # all of `key=value, ...`
    is_root: bool = False

    @cached_property
    def attributes(self) -> dict[str, str]:
        """What is said behind the operands; a value keeps its brackets."""
        return _attributes(self.written_attributes)

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """The computations of a fusion, call, reduction, async-start or conditional, in order; not those of a loop."""
        named = (self.attributes.get(key, "") for key in _CALLS)
        return tuple(name for text in named for name in re.findall(r"[\w.\-]+", text))

    @cached_property
    def op_name(self) -> str:
        """The name that jax gave the operation, with its scopes; "" where XLA lost it."""
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
        """What the computation returns; None where the text marks none."""
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
    is_scheduled: bool

    def called(self, name: str, by: Instruction) -> Computation:
        """Returns a computation; ValueError if the text lacks it."""
        if name not in self.computations:
            raise ValueError(f"{by} names the computation {name!r}, which the program does not have")
        return self.computations[name]


def dtype_bytes(dtype: str) -> float:
    """Returns the bytes of an element: of f8e4m3fn 1, of a token 0."""
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) / 8 if bits else 0


def tensors(result: Type) -> list[Tensor]:
    """Returns the arrays of a type, those of nested tuples too, in order."""
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in tensors(part)]


def num_bytes(result: Type) -> float:
    """Returns the bytes of all arrays of a type."""
    return sum(tensor.num_bytes for tensor in tensors(result))


def parse_program(text: str) -> Program:
    """Returns the program of a module's text. ValueError names an instruction that cannot be read."""
    found: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = None if line.startswith((" ", "HloModule")) else _HEADER.match(line)
        if header:
            current = header.group(2)
            found[current] = []
            entry = current if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current and " = " in line:
            found[current].append(parse_instruction(line))
    if not entry:
        raise ValueError("the text is no compiled HLO module: it has no ENTRY computation")
    computations = {name: Computation(name, tuple(instructions)) for name, instructions in found.items()}
    is_scheduled = "is_scheduled=true" in text[: text.find("\n")]
    return Program(computations=computations, entry=computations[entry], is_scheduled=is_scheduled)


def parse_instruction(line: str) -> Instruction:
    """Returns the instruction of a line. ValueError quotes a line that is none."""
    line = _COMMENT.sub("", line.strip()) if "/*" in line else line.strip()
    try:
        name = _NAME.match(line)
        assert name
        result, end = _type(line, name.end())
        opcode = _OPCODE.match(line, end)
        assert opcode
        end = _closing(line, opcode.end() - 1)
    except (AssertionError, ValueError):
        raise ValueError(f"an instruction of the compiled program cannot be read: {line[:120]}") from None
    inside = line[opcode.end() : end]
    is_leaf = opcode.group(1) in ("constant", "parameter", "iota")
    return Instruction(
        name=name.group(2),
        opcode=opcode.group(1),
        result=result,
        operands=() if is_leaf else _operands(inside),
        literal=inside.strip(),
        written_attributes=line[end + 1 :],
        is_root=bool(name.group(1)),
    )


def _type(line: str, start: int) -> tuple[Type, int]:
    """Returns the type that is written at `start`, and where it ends."""
    if line[start] != "(":
        tensor = _TENSOR.match(line, start)
        assert tensor
        dims = tuple(int(d.strip().lstrip("<=")) for d in tensor.group(2).split(",") if d.strip())
        return Tensor(tensor.group(1), dims), tensor.end()
    parts: list[Type] = []
    start += 1
    while line[start : start + 1] != ")":
        part, start = _type(line, start)
        parts.append(part)
        while line[start : start + 1] in (",", " "):
            start += 1
        assert start < len(line)
    return tuple(parts), start + 1


def _closing(line: str, start: int) -> int:
    """Returns where the bracket that opens at `start` is closed."""
    depth = 0
    for token in _TOKEN.finditer(line, start):
        if token.group() in "({[":
            depth += 1
        elif token.group() in ")}]":
            depth -= 1
            if not depth:
                return token.start()
    raise ValueError("a bracket stays open")


def _operands(inside: str) -> tuple[str, ...]:
    if "%" in inside:
        return tuple(re.findall(r"%([\w.\-]+)", inside))
    return tuple(words[-1] for part in inside.split(",") if (words := part.split()))


def _attributes(text: str) -> dict[str, str]:
    cuts, depth = [0], 0
    for token in _TOKEN.finditer(text):
        what = token.group()
        if what == "," and not depth:
            cuts.append(token.end())
        elif what in "({[":
            depth += 1
        elif what in ")}]":
            depth -= 1
    found: dict[str, str] = {}
    for begin, end in zip(cuts, [*(cut - 1 for cut in cuts[1:]), len(text)], strict=True):
        key = _KEY.match(text, begin, end)
        if key:
            found[key.group(1)] = text[key.end() : end].strip()
    return found
