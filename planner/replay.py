"""Replays the schedule of a compiled program: the time of a step on a cluster, and its exposed communication.

Kernels run on one stream, in the order of the text. Collectives queue on the communication stream that the program
names (jax 0.10.2: one for all), and on the links that they use. A collective without a start and a done blocks the
kernels; with both, the start enqueues and the done waits. A computation on a separate stream (jax's
`compute_on("gpu_stream:1")`) slows down only the network. All devices do the same at the same time, so one is replayed.
Loops are replayed until two consecutive iterations leave the same state. The remaining iterations are multiplied.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isclose

from planner.clusters import ALL, INSIDE, NOTHING, SCHEDULE, DeviceSpec
from planner.kernels import FREE, kernel_s
from planner.links import Network
from sharding.hlo import KINDS, Collective, collective_of
from sharding.hlo_program import Computation, Instruction, Program, Site, tensors, trip_count
from sharding.hlo_tpu import CARRIED, DONE, START, fused_collective, send_of
from sharding.mesh import MeshShape

LEVELS = ("inter", "intra")
STREAM = "stream"  # the lane of kernels on other streams
HOST = "host"  # the link between the memories of a device and its host
REPEATED = "repeated"  # the lane of iterations that represent several, named `x 8`
# names of the collectives' labels in the output
NAMES = {
    "gather": "gathers",
    "group_reduce_scatter": "group reduce-scatter",
    "replica_all_reduce": "replica all-reduce",
    "experts": "tokens to experts",
}
NAMES |= {"gradient_scope": "gradient scope", "orthogonalise": "Muon's matrices", "parameter_scope": "parameters"}
NAMES |= {"context": "positions to heads", "offload": "offloaded values"}
MAX_INTERVALS = 50_000
ASYNCHRONOUS = ("async", "call", "fusion", "custom-call")  # instructions that start a computation
_PASSED = ("bitcast", "copy", "opt-barrier", "async-update", "get-tuple-element")  # the handle of a transfer survives


@dataclass(frozen=True)
class Bar:
    """A bar of the picture, in seconds of a step without the repeated iterations of its loops."""

    lane: str  # compute, stream, intra, inter, or REPEATED
    start_s: float
    end_s: float
    name: str


@dataclass(frozen=True)
class Use:
    """Time of the collectives of one kind on one level, in a step."""

    times: int = 0
    busy_s: float = 0.0  # the link is busy
    exposed_s: float = 0.0  # the compute stream waits

    def __add__(self, other: "Use") -> "Use":
        return Use(self.times + other.times, self.busy_s + other.busy_s, self.exposed_s + other.exposed_s)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step: `step_s` is `compute_s` plus all exposed time.

    A collective on both levels is counted on the slower one, "inter" or "intra". Kernels on other streams are
    ("kernels", "stream"): busy during the compute, exposed where the compute waits for them.
    """

    step_s: float
    compute_s: float
    uses: dict[tuple[str, str], Use]  # by label (the kind, where the program has lost the label) and level
    intervals: tuple[Bar, ...]
    streams: int  # for communication, named by the program; without any, only the links are queues

    def use(self, *names: str, level: str | None = None) -> Use:
        """Returns the sum over these names, or over all if none is given, on one level or both."""
        found = [u for (name, at), u in self.uses.items() if name in (names or (name,)) and level in (None, at)]
        return sum(found, Use())


def replay(program: Program, shape: MeshShape, device: DeviceSpec, network: Network, hides: str = SCHEDULE) -> Timeline:
    """Returns the timeline of one execution of `program` on a mesh of `shape`.

    `hides` is the communication that kernels hide: as in the program's SCHEDULE, NOTHING, ALL that fits into them, or
    all INSIDE nodes only.
    ValueError names an unsupported instruction: a loop without a trip count, a done without its start, a send.
    """
    if network.devices_per_node != shape.devices_per_node:
        raise ValueError(f"a mesh with nodes of {shape.devices_per_node} on a network with {network.devices_per_node}")
    machine = _Machine(program, shape, device, network, hides)
    machine.run(Site(computation=program.entry), {})
    for transfer in machine.state.in_flight:
        machine.wait(transfer)
    state = machine.state
    return Timeline(
        step_s=state.now + state.skipped,
        compute_s=state.compute,
        uses=state.uses,
        intervals=tuple(machine.intervals),
        streams=len({queue for queue in state.newest if queue not in (*LEVELS, HOST)}),
    )


@dataclass(frozen=True, eq=False)
class _Transfer:
    """A collective on the network, or a piece of another stream; `ahead` is its predecessor in the queue."""

    key: tuple[str, str]
    start: float
    end: float
    ahead: "_Transfer | None" = None


_Handle = _Transfer | tuple["_Handle", ...] | None  # transfers in flight that a value depends on


@dataclass
class _State:
    """The clock and the counts so far; multiplied iterations are in `skipped`, not on the clock."""

    now: float = 0.0
    skipped: float = 0.0
    compute: float = 0.0
    uses: dict[tuple[str, str], Use] = field(default_factory=dict)
    newest: dict[str, _Transfer] = field(default_factory=dict)  # by queue: a level, or a stream
    in_flight: list[_Transfer] = field(default_factory=list)
    other: _Transfer | None = None  # while another stream is replayed: its last transfer

    def copy(self) -> "_State":
        return replace(self, uses=dict(self.uses), newest=dict(self.newest), in_flight=list(self.in_flight))


@dataclass(frozen=True)
class _Step:
    """An instruction with its constant properties."""

    instruction: Instruction
    what: str  # kernel, carrier (a kernel with a transfer in flight), collective, start, done, passed, call-start, ...
    seconds: float = 0.0
    collective: Collective | None = None
    stream: str = ""  # the collective's stream


class _Machine:
    """One device and its network; `run` moves its clock."""

    def __init__(self, program: Program, shape: MeshShape, device: DeviceSpec, network: Network, hides: str) -> None:
        self.state, self._hides = _State(), hides
        self.intervals: list[Bar] = []
        self._program, self._shape, self._device, self._network = program, shape, device, network
        self._steps: dict[str, list[_Step]] = {}

    def run(self, site: Site, arguments: dict[int, _Handle]) -> _Handle:
        """Executes a computation; returns the transfers that its result depends on."""
        held: dict[str, _Handle] = {}
        for step in self._steps_of(site.computation):
            instruction, what = step.instruction, step.what
            handle: _Handle = None
            if what in ("kernel", "carrier"):
                self._kernel(step)
                if what == "carrier":
                    handle = next((held[name] for name in instruction.operands if name in held), None)
            elif what in ("start", "collective"):
                handle = self._transfer(step)
                if self._waits(what == "collective", handle.key[1]):
                    self.wait(handle)
                handle = handle if what == "start" else None
            elif what == "done":
                handle = held.get(instruction.operands[0])
                if not isinstance(handle, _Transfer):
                    raise ValueError(f"{instruction} waits for something that no instruction before it started")
                if self._waits(True, handle.key[1]):
                    self.wait(handle)
                handle = None
            elif what == "parameter":
                handle = arguments.get(int(instruction.literal))
            elif what == "tuple":
                if any(operand in held for operand in instruction.operands):
                    handle = tuple(held.get(operand) for operand in instruction.operands)
            elif what == "passed":
                handle = held.get(instruction.operands[0])
                if isinstance(handle, tuple) and instruction.opcode == "get-tuple-element":
                    handle = handle[instruction.index]
            elif what == "while":
                handle = self._loop(instruction, site, held.get(instruction.operands[0]))
            elif what == "conditional":
                handle = self._longest(instruction, site, [held.get(name) for name in instruction.operands[1:]])
            else:  # a call, or its start
                values = {n: held[name] for n, name in enumerate(instruction.operands) if name in held}
                inside = self._inside(instruction, site, instruction.calls[0])
                handle = self.run(inside, values) if what == "call" else self._beside(inside, values)
            if handle is not None:
                held[instruction.name] = handle
        return held.get(site.computation.root.name) if site.computation.root else None

    def _waits(self, in_schedule: bool, level: str) -> bool:
        """Whether the kernels wait for a collective on a level, given whether they do `in_schedule`."""
        return {SCHEDULE: in_schedule, NOTHING: True, ALL: False, INSIDE: level == "inter"}[self._hides]

    def wait(self, transfer: _Handle) -> None:
        """Moves the clock to the end of a transfer. The exposed time belongs to the transfers on the link."""
        state = self.state
        if not isinstance(transfer, _Transfer) or transfer.end <= state.now:
            return
        pieces, at = [(transfer, state.now, transfer.end)], transfer
        while at.start > state.now and at.ahead:
            pieces[-1:] = [(at, at.start, pieces[-1][2]), (at.ahead, state.now, at.start)]
            at = at.ahead
        for piece, begin, end in reversed(pieces):
            self._spend(piece.key, begin, end)
        state.now = transfer.end

    # ------------------------------------------------------------------------------------- one instruction

    def _kernel(self, step: _Step) -> None:
        state = self.state
        end = state.now + step.seconds
        if state.other is None:
            state.compute += step.seconds
        else:
            key = ("kernels", STREAM)
            self._count(key, Use(times=1, busy_s=step.seconds))
            self._spend(key, state.now, end)
        self._draw("compute" if state.other is None else STREAM, state.now, end, step.instruction.name)
        state.now = end

    def _spend(self, key: tuple[str, str], begin: float, end: float) -> None:
        """Counts waiting time of this stream. On another stream the waiting stream counts it."""
        if self.state.other is None:
            self._count(key, Use(exposed_s=end - begin))
        else:
            self.state.other = _Transfer(key, begin, end, self.state.other)

    def _beside(self, site: Site, arguments: dict[int, _Handle]) -> _Handle:
        """Executes a computation on a separate stream that starts now."""
        now, other = self.state.now, self.state.other
        self.state.other = _Transfer(("kernels", STREAM), now, now)
        self.run(site, arguments)
        state = self.state
        handle, state.other, state.now = state.other, other, now
        state.in_flight += [handle] if handle else []
        return handle

    def _transfer(self, step: _Step) -> _Transfer:
        """Enqueues a collective on its stream and on the levels that it uses, or a copy on the link to the host."""
        if not step.collective:
            return self._enqueue(("offload", HOST), step.seconds, [HOST])
        seconds = self._network.level_seconds(step.collective)
        level = max(LEVELS, key=lambda level: seconds[level])
        queues = [*(level for level in LEVELS if seconds[level]), *filter(None, [step.stream])]
        return self._enqueue((step.collective.label or step.collective.kind, level), seconds[level], queues)

    def _enqueue(self, key: tuple[str, str], seconds: float, queues: Sequence[str]) -> _Transfer:
        """Appends a transfer to its queues."""
        state = self.state
        ahead = max(
            (state.newest[queue] for queue in queues if queue in state.newest),
            key=lambda transfer: transfer.end,
            default=None,
        )
        ahead = ahead if ahead and ahead.end > state.now else None
        start = ahead.end if ahead else state.now
        transfer = _Transfer(key, start, start + seconds, ahead)
        if state.other is None:
            state.in_flight = [one for one in state.in_flight if one.end > state.now]
        state.in_flight.append(transfer)
        self._count(transfer.key, Use(times=1, busy_s=seconds))
        state.newest |= dict.fromkeys(queues, transfer)
        for level in (queue for queue in queues if queue in LEVELS):
            self._draw(level, transfer.start, transfer.end, transfer.key[0])
        return transfer

    def _loop(self, loop: Instruction, site: Site, handle: _Handle) -> _Handle:
        trips = trip_count(loop, site, self._program)
        inside = self._inside(loop, site, loop.computation("body"))
        last: list[float] = []
        for n in range(trips):
            before = self.state.copy()
            handle = self.run(inside, {0: handle})
            took = self.state.now + self.state.skipped - before.now - before.skipped
            this = [took, *self._left(handle)]
            if _same(last, this, took) and self.state.other is None:  # another stream has no separate clock
                self._repeat(before, trips - n - 1)
                if n + 1 < trips:
                    self._draw(REPEATED, before.now, self.state.now, f"x {trips - n}")
                break
            last = this
        return handle

    def _left(self, handle: _Handle) -> list[float]:
        """Returns the remaining seconds of each transfer in flight, and of each that a value depends on."""
        under_way = [*self.state.in_flight, *self.state.newest.values()]
        handles, ends = [handle], [transfer.end for transfer in under_way]
        while handles:
            one = handles.pop()
            if isinstance(one, tuple):
                handles += one
            elif one:
                ends.append(one.end)
        return [end - self.state.now for end in ends if end > self.state.now]

    def _repeat(self, before: _State, times: int) -> None:
        """Adds the counts since `before`, `times` times."""
        state = self.state
        state.skipped += times * (state.now + state.skipped - before.now - before.skipped)
        state.compute += times * (state.compute - before.compute)
        for key, use in state.uses.items():
            old = before.uses.get(key, Use())
            state.uses[key] = Use(
                use.times + times * (use.times - old.times),
                use.busy_s + times * (use.busy_s - old.busy_s),
                use.exposed_s + times * (use.exposed_s - old.exposed_s),
            )

    def _longest(self, instruction: Instruction, site: Site, arguments: Sequence[_Handle]) -> _Handle:
        """Executes every branch of a conditional, and keeps the slowest."""
        before, drawn = self.state, len(self.intervals)
        kept, kept_intervals, kept_handle = before, [], None
        for n, name in enumerate(instruction.calls):
            self.state = before.copy()
            handle = self.run(self._inside(instruction, site, name), {0: arguments[n]} if n < len(arguments) else {})
            if kept is before or self.state.now + self.state.skipped > kept.now + kept.skipped:
                kept, kept_intervals, kept_handle = self.state, self.intervals[drawn:], handle
            del self.intervals[drawn:]
        self.state = kept
        self.intervals += kept_intervals
        return kept_handle

    # ------------------------------------------------------------------------------------- helpers

    def _inside(self, caller: Instruction, site: Site, name: str) -> Site:
        return Site(computation=self._program.called(name, caller), caller=caller, outer=site)

    def _count(self, key: tuple[str, str], use: Use) -> None:
        self.state.uses[key] = self.state.uses.get(key, Use()) + use

    def _draw(self, lane: str, start: float, end: float, name: str) -> None:
        if end > start and len(self.intervals) < MAX_INTERVALS:
            self.intervals.append(Bar(lane, start, end, name))

    def _steps_of(self, computation: Computation) -> list[_Step]:
        if computation.name not in self._steps:
            steps = [self._step(instruction, computation) for instruction in computation.instructions]
            self._steps[computation.name] = [step for step in steps if step]
        return self._steps[computation.name]

    def _started(self, instruction: Instruction) -> Collective | None:
        """Returns the collective of an async-start whose computation contains nothing else."""
        if instruction.opcode != "async-start":
            return None
        called = self._program.called(instruction.calls[0], instruction)
        kernels = [inside for inside in called.instructions if inside.opcode not in FREE]
        found = [collective_of(inside, called, self._program, self._shape) for inside in kernels]
        return found[0] if len(found) == 1 else None

    def _is_prefetch(self, instruction: Instruction, computation: Computation) -> bool:
        """Whether an instruction starts or awaits a copy, which another engine of the device makes."""
        if instruction.opcode in ("async-update", "async-done"):
            start = computation.by_name.get(instruction.operands[0])
            return start is not None and self._is_prefetch(start, computation)
        is_copy = instruction.opcode == "async-start" and self._started(instruction) is None
        return is_copy or instruction.opcode in ("copy-start", "copy-done")

    def _step(self, instruction: Instruction, computation: Computation) -> _Step | None:
        """Returns the step of an instruction, or None if it does nothing."""
        opcode = instruction.opcode
        fused = fused_collective(instruction, self._program)
        part = fused.part if fused else ""
        if part == CARRIED:
            seconds = kernel_s(instruction, computation, self._program, self._device)
            return _Step(instruction, "carrier", seconds)
        if part == DONE:
            return _Step(instruction, "done")
        if opcode in ("recv", "send-done"):
            return None  # a send starts the transfer, and recv-done waits for it
        if opcode == "recv-done":
            send = send_of(instruction, computation)
            return _Step(replace(instruction, operands=(send.name,) if send else instruction.operands), "done")
        if start := _host_copy(instruction, computation):
            copied = min(array.num_bytes for array in tensors(start.result) if array.dims)  # the others are stacks
            what = "start" if start is instruction else "done"
            return _Step(instruction, what, copied / self._device.copy_bandwidth)
        collective = collective_of(instruction, computation, self._program, self._shape) or self._started(instruction)
        if opcode == "send" and not collective:
            raise ValueError(f"{instruction} cannot be replayed: it sends to one device")
        if self._device.prefetches and self._is_prefetch(instruction, computation):
            return None
        if collective:
            what = "start" if opcode.endswith("-start") or opcode == "send" or part == START else "collective"
            return _Step(instruction, what, collective=collective, stream=_stream(instruction))
        if opcode.endswith("-start") and opcode.removesuffix("-start") in ASYNCHRONOUS:
            return _Step(instruction, "call-start")
        if opcode.endswith("-done") and opcode.removesuffix("-done") in (*KINDS, *ASYNCHRONOUS):
            return _Step(instruction, "done")
        if opcode in ("while", "conditional", "call", "tuple", "parameter"):
            return _Step(instruction, opcode)
        seconds = kernel_s(instruction, computation, self._program, self._device)
        if seconds:
            return _Step(instruction, "kernel", seconds)
        return _Step(instruction, "passed") if opcode in _PASSED else None


def _host_copy(instruction: Instruction, computation: Computation) -> Instruction | None:
    """Returns the start of an asynchronous copy between the memories of device and host, if it is one or its end."""
    if instruction.opcode in ("async-done", "copy-done"):
        start = computation.by_name.get(instruction.operands[0])
        return start and _host_copy(start, computation)
    return instruction if instruction.is_on_host and instruction.opcode in ("async-start", "copy-start") else None


def _stream(instruction: Instruction) -> str:
    """Returns the communication stream of a started collective, or "" if the program names none."""
    found = re.search(r'"operation_queue_id":"(\d+)"', instruction.attributes.get("backend_config", ""))
    return f"stream {found[1]}" if found and instruction.opcode.endswith("-start") else ""


def _same(a: Sequence[float], b: Sequence[float], took: float) -> bool:
    return len(a) == len(b) and all(isclose(x, y, rel_tol=0.0, abs_tol=1e-9 * took) for x, y in zip(a, b))
