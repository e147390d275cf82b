"""Searches for the best way to train a config on a cluster: bounds discard most candidates, the rest is compiled.

The search proposes only candidates that fit. Candidates that the user names are priced if the whole device could hold
them. A candidate is discarded before compilation if it is illegal, if it needs too much memory (by a bound, or because
a smaller program did not fit), or if the bound on its time is above the best step so far. The others are compiled in
the order of their estimated times, those estimated to fit first. A strategy has one program in compilation at a time,
because its memory corrects the estimates of the next ones. Programs for GPUs are quick ones (planner.compile.QUICK),
whose steps are 1 to 2 % too long unless XLA had to rematerialise. Therefore the two best that have the config's result
are compiled again with all kernels if their memory is nearly full.

Candidates that change the result of a step form a second list: int8 between nodes with the two best strategies first,
then each other change with its fastest strategy, unless a milder change is as fast. Another optimizer is last. A change
with records (configs/losses.py) is compared by the estimated time to the loss of the config's own run.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf

from configs.schema import Config
from planner.bounds import SLACK
from planner.candidates import (
    INT8,
    Candidate,
    Change,
    canonical,
    legal_groups,
    of_config,
)
from planner.options import Option, PlanOptions, Strategy
from planner.predict import Machine, Prediction, ReplayableStep, compiled_step
from planner.table import table_rows
from sharding.mesh import Device
from training.experiment import Experiment
from training.memory import Memory
from training.metrics.units import format_bytes, format_seconds

AT_ONCE = 2  # concurrent compilations, each in a separate process with one core and 1 GB
WHY = ("too_large", "too_slow", "no_gain", "from_cache")
GAIN = 0.95  # a change of the result must take at most this fraction of a step's estimate
NUM_EXACT = 2  # best candidates with the config's result that are compiled with all kernels if they are tight
TIGHT = 0.85  # fraction of the capacity above which XLA may have rematerialised a quick program
NUM_INT8 = 2  # number of strategies compiled with int8, regardless of its estimated gain


@dataclass(frozen=True, kw_only=True)
class CandidateCounts:
    """Outcomes of the candidates of a search."""

    candidates: int
    illegal: int  # or refused by XLA
    too_large: int  # by the bound on their memory, or because a smaller one did not fit
    too_slow: int  # by the bound on their time
    compiled: int
    from_cache: int  # number of compiled candidates
    did_not_fit: int  # number of compiled candidates
    not_looked_at: int  # enough were compiled
    no_gain: int = 0  # changes of the result whose estimated time is not below a milder change's


@dataclass(frozen=True, kw_only=True)
class FittingCandidates:
    """The candidates that fit, fastest first, then candidates named by the user that may fit."""

    steps: tuple[tuple[Prediction, ReplayableStep], ...]
    changed: tuple[tuple[Prediction, ReplayableStep], ...]  # steps with another result
    too_large: tuple[str, ...]  # a line for each compiled candidate that does not fit, or may not
    refused: tuple[str, ...]  # a line for each illegal candidate, or one refused by XLA
    counts: CandidateCounts


def search(
    config: Config,
    machine: Machine,
    devices: Sequence[Device],
    *,
    most: int,
    candidates: Sequence[Candidate] = (),
    compile_one: Callable[[Candidate, Experiment, Machine], ReplayableStep] = compiled_step,
    say: Callable[[str], None] = lambda line: None,
    count: Callable[[int, int], None] = lambda done, most: None,
) -> FittingCandidates:
    """Returns the best candidates that fit. Candidates named by the user are included if they may fit.

    At most `most` programs are examined, the config's own first. Cached programs count, so that the answer does not
    depend on the cache. Named candidates are all examined. `count` is called with the number done. ValueError if none
    fits, with a config that would fit.
    """
    options = PlanOptions(config, machine, devices)
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def begin(option: Option) -> Future[ReplayableStep]:
            return pool.submit(compile_one, option.candidate, option.experiment, machine)

        here = machine.nodes, machine.cluster.devices_per_node
        mine = of_config(config) if candidates else canonical(of_config(config), *here, config.mesh)
        own = [] if candidates else options.made([mine])
        # during the next lowering
        begun = {option.candidate: begin(option) for option in own if option.bounds.least_bytes <= machine.capacity}
        made = options.check(options.made(candidates) if candidates else options.of_search(mine, own))
        found = _Search(
            machine,
            made,
            own=mine,
            most=len(made) if candidates else most,
            is_search=not candidates,
        )
        found.refused += options.refused
        count(0, found.most)
        running: deque[tuple[Option, Future[ReplayableStep]]] = deque()
        while True:
            while len(running) < AT_ONCE and (chosen := found.chosen([option for option, _ in running])):
                running.append((chosen, begun.pop(chosen.candidate, None) or begin(chosen)))
            if not running:
                break
            option, done = running.popleft()  # the oldest, so that the choice does not depend on speed
            if isinstance(error := done.exception(), ValueError):
                say(found.refuse(option, error))
            else:
                say(found.add(option, done.result()))
            count(found.compiled, found.most)
        exactly = replace(machine, is_quick=False)
        while machine.is_quick and (chosen := found.best_quick()):
            again = [(o, pool.submit(compile_one, o.candidate, o.experiment, exactly)) for o in chosen]
            for option, done in again:
                found.exchange(option, done.result())
    return found.result(options.num_candidates)


class _Search:
    """The options that wait, and facts learned from compiled ones. Without `is_search` everything is compiled."""

    def __init__(
        self, machine: Machine, options: Sequence[Option], *, own: Candidate, most: int, is_search: bool
    ) -> None:
        self.refused: list[str] = []
        self.compiled, self.most = 0, most
        self._machine, self._own, self._is_search = machine, own, is_search
        self._options, self._waiting = options, [*options]
        self._steps: list[tuple[Option, Prediction, ReplayableStep]] = []  # options that fit, or may fit
        self._failed: list[tuple[Option, Memory]] = []
        self._errors: list[ValueError] = []  # of programs refused by XLA
        self._more: dict[str, float] = {}  # largest ratio of a strategy's needed to its estimated memory
        self._slower: dict[Strategy, float] = {}  # largest ratio of a step's time to its estimate
        self._seen: dict[str, int] = dict.fromkeys(WHY, 0)
        if is_search:
            self._discard("too_large", [o for o in options if o.bounds.least_bytes > machine.capacity])
            self._discard("no_gain", self._without_gain())

    def chosen(self, running: Sequence[Option]) -> Option | None:
        """Returns the next program to compile, if any, and discards options that need not be compiled."""
        best_s = min((prediction.step_s for option, prediction, _ in self._steps if option.is_exact), default=inf)
        if self._is_search:
            slow = [o for o in self._waiting if o.bounds.least_s * (o.steps or 1.0) > SLACK * best_s]
            large = [o for o in self._waiting if _cannot_fit(o.candidate, self._failed, self._machine.capacity)]
            self._discard("too_large", large)
            self._discard("too_slow", [option for option in slow if option not in large])
            fit = [option for option, *_ in self._steps]
            if sum(option.change == INT8 for option in [*fit, *running]) >= NUM_INT8:
                self._discard("no_gain", [option for option in self._waiting if option.change == INT8])
        # one program per strategy at a time: its memory corrects the others' estimates
        names = {option.candidate.name for option in running}
        free = [option for option in self._waiting if option.candidate.name not in names]
        if not free or self.compiled + len(running) >= self.most:
            return None
        option = min(free, key=self._order(running))
        self._waiting.remove(option)
        return option

    def add(self, option: Option, step: ReplayableStep) -> str:
        """Takes a compiled program; returns the line to print."""
        memory, name = step.memory(), option.candidate.name
        self.compiled += 1
        self._seen["from_cache"] += step.compiled.from_cache
        self._more[name] = max(self._more.get(name, 1.0), memory.total / option.bounds.estimate_bytes)
        if not memory.fits:
            self._failed.append((option, memory))
            if self._is_search or memory.total > self._machine.device_bytes:
                return _too_large(option.candidate, memory, self._machine)
        prediction = step.prediction()
        self._steps.append((option, prediction, step))
        if option.is_exact:
            slower = prediction.step_s / option.bounds.estimate_s
            self._slower[option.strategy] = max(self._slower.get(option.strategy, 1.0), slower)
        return f"{option.candidate}: {format_seconds(prediction.step_s)}"

    def best_quick(self) -> list[Option]:
        """Returns the options among the best NUM_EXACT whose programs are quick ones and tight."""
        exact = sorted((entry for entry in self._steps if entry[0].is_exact), key=lambda entry: _by_speed(entry[1:]))
        tight = TIGHT * self._machine.capacity
        return [o for o, p, step in exact[:NUM_EXACT] if step.machine.is_quick and p.memory.total > tight]

    def exchange(self, option: Option, step: ReplayableStep) -> None:
        """Takes the program of an option with all kernels, in the place of its quick one."""
        self._steps = [entry for entry in self._steps if entry[0] is not option]
        if step.memory().fits:
            self._steps.append((option, step.prediction(), step))
        else:
            self._failed.append((option, step.memory()))

    def _tried(self) -> list[Option]:
        return [option for option, *_ in (*self._steps, *self._failed)]

    def refuse(self, option: Option, error: ValueError) -> str:
        """Takes a program that XLA refuses; returns the line to print."""
        self._errors.append(error)
        self.refused.append(f"{option.candidate}: {error}")
        return self.refused[-1]

    def result(self, num_candidates: int) -> FittingCandidates:
        """Returns the result. ValueError if no candidate with the config's result fits."""
        exact, changed = (
            sorted([(p, step) for o, p, step in self._steps if o.is_exact is wanted], key=_by_speed)
            for wanted in (True, False)
        )
        if not exact:
            if self._errors and not self._failed:
                raise self._errors[0]
            options = [option for option in self._options if option.is_exact]
            failed = [pair for pair in self._failed if pair[0].is_exact]
            raise ValueError(_nothing_fits(self._machine, options, failed, self._is_search))
        counts = CandidateCounts(
            candidates=num_candidates,
            illegal=len(self.refused),
            compiled=self.compiled,
            did_not_fit=len(self._failed),
            not_looked_at=len(self._waiting),
            **self._seen,
        )
        return FittingCandidates(
            steps=tuple(exact),
            changed=tuple(changed),
            too_large=tuple(_too_large(option.candidate, memory, self._machine) for option, memory in self._failed),
            refused=tuple(self.refused),
            counts=counts,
        )

    def _discard(self, why: str, options: Sequence[Option]) -> None:
        self._seen[why] += len(options)
        self._waiting = [option for option in self._waiting if option not in options]

    def _order(self, running: Sequence[Option]) -> Callable[[Option], tuple[float, ...]]:
        """Returns a sort key: the config, exact candidates for half of all programs, changes, other exact candidates.

        The best with the config's rematerialisation is first, then the best of all, the best MiCS and the best of the
        config's strategy, so that none is judged by the config's micro-batch. Among changes int8 comes first, with the
        strategy that is estimated to be fastest, corrected by the time of this strategy without int8, if known. Then
        come changes that reach the config's loss in records (its optimizer before others), then changes with a recorded
        cost, then changes of one kind. Ties: lowest estimated time, fewest extras, smallest memory.
        """
        tried = [*self._tried(), *running]
        enough = sum(option.is_exact for option in tried) >= self.most - self.most // 2
        favoured: list[Option] = []
        same_remat = lambda one: "remat" not in one.pairs  # estimates hide traffic that other policies expose
        for is_one in (same_remat, lambda one: True, lambda one: one.is_mics, lambda one: one.name == self._own.name):
            group = [o for o in self._waiting if o.is_exact and is_one(o.candidate) and self._should_fit(o)]
            if not any(o.is_exact and is_one(o.candidate) and o.candidate != self._own for o in tried) and group:
                favoured.append(min(group, key=lambda option: option.speed))

        def key(option: Option) -> tuple[float, ...]:
            if option.candidate == self._own:
                return (0, 0, 0, *option.speed)
            fits, rank = self._should_fit(option), (*favoured, option).index(option)
            if option.is_exact:
                return (3 if enough else 1, not fits, rank, *option.speed)
            if option.change == INT8:
                estimate_s, *others = option.speed
                return (2, not fits, 0, estimate_s * self._slower.get(option.strategy, 1.0), *others)
            unsure = not option.is_recorded, not option.change.is_pure
            return (2, not fits, 1, not option.steps, option.candidate.has_other_optimizer, *unsure, *option.speed)

        return key

    def _should_fit(self, option: Option) -> bool:
        return option.bounds.estimate_bytes * self._more.get(option.candidate.name, 1.0) <= self._machine.capacity

    def _without_gain(self) -> list[Option]:
        """Returns the options whose change is not worth it: it is faster elsewhere, or a milder change is as fast.

        A change that reaches the loss is compared only with milder ones that reach it, too. int8 stays with each
        strategy, because estimates count traffic as hidden that the programs of some strategies expose.
        """
        fit = [option for option in self._waiting if self._should_fit(option)]
        exact_s = min((option.bounds.estimate_s for option in fit if option.is_exact), default=inf)
        gains = [option for option in fit if option.is_exact or option.speed[0] < GAIN * exact_s]
        best: dict[Change, Option] = {}
        for option in sorted(gains, key=lambda option: (not option.is_recorded, option.speed)):
            best.setdefault(option.change, option)
        kept: list[Change] = []
        for change in sorted(best, key=lambda change: (change.codec + change.timing, change.codec)):
            one, milder = best[change], [best[other] for other in kept if other.is_milder(change)]
            if all(one.speed[0] < GAIN * other.speed[0] for other in milder if other.steps or not one.steps):
                kept.append(change)
        int8: dict[Strategy, Option] = {}
        for option in sorted((o for o in fit if o.change == INT8), key=lambda o: (not o.is_recorded, o.speed)):
            int8.setdefault(option.strategy, option)
        stay = [*int8.values(), *(best[change] for change in kept if change != INT8)]
        return [option for option in self._waiting if not option.is_exact and option not in stay]


def _too_large(candidate: Candidate, memory: Memory, machine: Machine) -> str:
    sizes = f"{format_bytes(memory.total)} of {format_bytes(memory.capacity)}"
    if memory.total > machine.device_bytes:
        return f"{candidate}: does not fit, {sizes}"
    return f"{candidate}: may not fit, {sizes}; the device has {format_bytes(machine.device_bytes)}"


def _by_speed(found: tuple[Prediction, ReplayableStep]) -> tuple[bool, bool, float]:
    """Returns a sort key: fitting first, another optimizer last, then the seconds of a step."""
    return not found[0].memory.fits, found[0].candidate.has_other_optimizer, found[0].step_s


def _cannot_fit(candidate: Candidate, failed: Sequence[tuple[Option, Memory]], capacity: float) -> bool:
    """Whether failed programs show that a candidate does not fit: the same with fewer rows, or a line through two.

    Memory does not grow faster with few rows than with many, so the line is a lower bound.
    """
    alike = [pair for pair in failed if replace(pair[0].candidate, micro_size=candidate.micro_size) == candidate]
    points = sorted((option.candidate.micro_size, memory.total) for option, memory in alike)
    if not points or candidate.micro_size >= points[0][0]:
        return bool(points)
    if len(points) < 2:
        return False
    (fewer, low), (more, high) = points[:2]
    return low - (high - low) / (more - fewer) * (fewer - candidate.micro_size) > capacity


def _nothing_fits(
    machine: Machine, options: Sequence[Option], failed: Sequence[tuple[Option, Memory]], is_search: bool
) -> str:
    """Returns the error for a config that does not fit: needed memory, available memory, and remedies."""
    needs = [(memory.total, "", option) for option, memory in failed]
    needs = needs or [(option.bounds.least_bytes, "at least ", option) for option in options]
    need, about, least = min(needs, key=lambda entry: entry[0])
    candidate, model = least.candidate, least.experiment.model.config
    per_node, here = machine.cluster.devices_per_node, machine.num_devices
    whole = sum(sum(row.whole_bytes) for row in table_rows(least.experiment))
    rest = need - least.bounds.state_bytes  # memory that does not shrink with a smaller share of the state
    fixes = []
    if rest < machine.capacity:
        shards = -(-whole // (machine.capacity - rest))
        mesh = least.experiment.config.mesh
        legal = [devices for devices in legal_groups(machine.nodes, per_node, mesh) if devices >= shards]
        if legal and whole / here < least.bounds.state_bytes:
            fixes.append(f"sharding.strategy=mics with partition_size={min(legal)}")
        elif shards > here and not machine.cluster.device.is_shared:
            fixes.append(f"--nodes={-(-int(shards) // per_node)} with sharding.strategy=zero3")
    if model.remat not in ("full", "offload"):
        fixes.append("model.remat=full")
    if candidate.micro_size > 1:
        fixes.append(f"a smaller batch.micro_size{'' if is_search else ' (--search looks for one)'}")
    if candidate.gather in ("micro_step", "step"):
        fixes.append("sharding.gather=layer")
    nodes = f"{machine.nodes} node{'s' if machine.nodes > 1 else ''} of {machine.cluster.name}"
    needed = f"{about}{format_bytes(need)} a device, of {format_bytes(machine.capacity)}"
    help_ = ", ".join(fixes) or "devices with more memory, or a smaller model"
    return f"nothing fits {nodes}: {candidate}, the smallest, needs {needed}; what would help: {help_}"
