"""Searches the ways to train a config on a cluster: many are discarded unseen, a few are compiled, the best come first.

Nothing is proposed that does not fit. What is discarded before it is compiled: what is not legal, what needs more
memory than there is (a bound, and what was learned from programs that did not fit), and what the bound on its time
says is slower than the best so far. The rest is compiled in the order of an estimate of its time, what is estimated to
fit before what is not; one program of a strategy at a time, because what it needs corrects the estimates of the others.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from configs.schema import Config
from metrics.units import format_bytes, format_seconds
from planner.bounds import SLACK, Bounds, bounds
from planner.candidates import Candidate, all_candidates, legal_groups, of_config
from planner.memory import Memory
from planner.predict import Machine, Prediction, Step, compiled_step
from planner.table import table_rows
from training.experiment import Experiment, make_experiment
from training.memory import state_bytes

AT_ONCE = 2  # programs that are compiled, each in a process of its own that is busy with one core and takes 1 GB


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What became of the candidates of a search."""

    candidates: int
    illegal: int  # or refused by XLA
    too_large: int  # by the bound on their memory, or because a smaller one did not fit
    too_slow: int  # by the bound on their time
    compiled: int
    from_cache: int  # of those
    did_not_fit: int  # of those
    not_looked_at: int  # because enough were compiled


@dataclass(frozen=True, kw_only=True)
class Found:
    """The candidates that fit, the fastest first."""

    steps: tuple[tuple[Prediction, Step], ...]
    too_large: tuple[str, ...]  # of those that were compiled: a line for each that does not fit
    refused: tuple[str, ...]  # a line for each that is not legal, or that XLA refuses
    counts: Counts


@dataclass(frozen=True, kw_only=True)
class _Option:
    candidate: Candidate
    experiment: Experiment
    bounds: Bounds


def search(
    config: Config,
    machine: Machine,
    devices: Sequence[Any],
    *,
    most: int,
    candidates: Sequence[Candidate] = (),
    compile_one: Callable[[Candidate, Experiment, Machine], Step] = compiled_step,
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """Returns the candidates that fit: the best of all, or those given.

    At most `most` programs are looked at, the config's own first. Those in the cache count, so that the answer does not
    depend on it; those given are all looked at. ValueError if none fits, with what would.
    """
    own, is_search = of_config(config), not candidates  # the first to compare with
    every = all_candidates(config, machine.nodes, machine.cluster.devices_per_node)
    wanted = list(candidates) or [own, *(candidate for candidate in every if candidate != own)]
    options, refused = _options(wanted, config, machine, devices)
    seen = dict.fromkeys(("too_large", "too_slow", "compiled", "from_cache", "not_looked_at"), 0)
    waiting, most = options, most if is_search else len(options)
    if is_search:
        waiting = [option for option in options if option.bounds.least_bytes <= machine.capacity]
        seen["too_large"] = len(options) - len(waiting)
    steps: list[tuple[Prediction, Step]] = []
    failed: list[tuple[_Option, Memory]] = []
    more: dict[str, float] = {}  # than was estimated the programs of a strategy needed, at the most
    errors: list[ValueError] = []  # of programs that XLA refuses

    def order(option: _Option) -> tuple[bool, bool, float, float]:
        """The config's own, what should fit, the fastest, the smallest first."""
        needs = option.bounds.estimate_bytes * more.get(option.candidate.name, 1.0)
        bounds = option.bounds
        return option.candidate != own, needs > machine.capacity, bounds.estimate_s, bounds.least_bytes

    while waiting:
        best_s = min((prediction.step_s for prediction, _ in steps), default=inf)
        chosen: dict[str, _Option] = {}  # of one strategy one at a time: what it needs tells about the others
        later: list[_Option] = []
        for option in sorted(waiting, key=order):
            if len(chosen) == AT_ONCE or option.candidate.name in chosen:
                later.append(option)
            elif is_search and _cannot_fit(option.candidate, failed, machine.capacity):
                seen["too_large"] += 1
            elif is_search and option.bounds.least_s > SLACK * best_s:
                seen["too_slow"] += 1
            elif seen["compiled"] + len(chosen) >= most:
                seen["not_looked_at"] += 1
            else:
                chosen[option.candidate.name] = option
        waiting = later
        with ThreadPoolExecutor(AT_ONCE) as pool:
            running = [(o, pool.submit(compile_one, o.candidate, o.experiment, machine)) for o in chosen.values()]
        for option, done in running:
            candidate = option.candidate
            if isinstance(error := done.exception(), ValueError):
                errors.append(error)
                refused.append(f"{candidate}: {error}")
                say(refused[-1])
                continue
            step = done.result()
            seen["compiled"] += 1
            seen["from_cache"] += step.compiled.from_cache
            memory = step.memory()
            more[candidate.name] = max(more.get(candidate.name, 1.0), memory.total / option.bounds.estimate_bytes)
            if memory.fits:
                steps.append((step.prediction(), step))
                say(f"{candidate}: {format_seconds(steps[-1][0].step_s)}")
            else:
                failed.append((option, memory))
                say(_too_large(candidate, memory))
    if not steps:
        raise errors[0] if errors and not failed else ValueError(_nothing_fits(machine, options, failed, is_search))
    return Found(
        steps=tuple(sorted(steps, key=lambda pair: pair[0].step_s)),
        too_large=tuple(_too_large(option.candidate, memory) for option, memory in failed),
        refused=tuple(refused),
        counts=Counts(candidates=len(wanted), illegal=len(refused), did_not_fit=len(failed), **seen),
    )


def _too_large(candidate: Candidate, memory: Memory) -> str:
    return f"{candidate}: does not fit, {format_bytes(memory.total)} of {format_bytes(memory.capacity)}"


def _options(
    candidates: Sequence[Candidate], config: Config, machine: Machine, devices: Sequence[Any]
) -> tuple[list[_Option], list[str]]:
    """Returns the legal ones with their bounds, and why the others are not legal; ValueError if none is."""
    options: list[_Option] = []
    refused: list[str] = []
    states: dict[str, tuple[int, int, int]] = {}  # the same for every gather policy and micro-batch
    mesh = replace(config.mesh, num_cpu_devices=0, devices_per_node=machine.cluster.devices_per_node)
    for candidate in candidates:
        try:
            if candidate.strategy == "mics" and not candidate.partition_size:
                legal = legal_groups(machine.nodes, machine.cluster.devices_per_node)
                sizes = ", ".join(str(size) for size in legal if size % mesh.tensor == 0)
                raise ValueError(
                    f"--strategy={candidate.name}: groups have a device or more; sizes that divide: {sizes}"
                )
            experiment = make_experiment(replace(candidate.applied(config), mesh=mesh), devices)
            key = candidate.name
            states[key] = states.get(key) or state_bytes(experiment)
            found = bounds(experiment, machine.cluster, states[key])
        except ValueError as error:
            refused.append(f"{candidate.name}: {error}")
            continue
        options.append(_Option(candidate=candidate, experiment=experiment, bounds=found))
    if not options:
        first = refused[0]
        raise ValueError(first.partition(": ")[2] if len(candidates) == 1 else f"no candidate is legal; {first}")
    return options, refused


def _cannot_fit(candidate: Candidate, failed: Sequence[tuple[_Option, Memory]], capacity: float) -> bool:
    """Whether what did not fit says that a candidate does not: the same with fewer rows, or a line through two such.

    Memory grows no faster with few rows than with many, so that the line is no more than what is needed.
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
    machine: Machine, options: Sequence[_Option], failed: Sequence[tuple[_Option, Memory]], is_search: bool
) -> str:
    """Returns the error of a config that fits nowhere: what it needs, what there is, and what would help."""
    needs = [(memory.total, "", option) for option, memory in failed]
    needs = needs or [(option.bounds.least_bytes, "at least ", option) for option in options]
    need, about, least = min(needs, key=lambda entry: entry[0])
    candidate, model = least.candidate, least.experiment.model.config
    per_node, here = machine.cluster.devices_per_node, machine.num_devices
    whole = sum(sum(row.whole_bytes) for row in table_rows(least.experiment))
    rest = need - least.bounds.state_bytes  # what a smaller share of the state leaves as it is
    fixes = []
    if rest < machine.capacity:
        shards = -(-whole // (machine.capacity - rest))
        legal = [devices for devices in legal_groups(machine.nodes, per_node) if devices >= shards]
        if legal and whole / here < least.bounds.state_bytes:
            fixes.append(f"sharding.strategy=mics with partition_size={min(legal)}")
        elif shards > here and not machine.cluster.device.is_shared:
            fixes.append(f"--nodes={-(-int(shards) // per_node)} with sharding.strategy=zero3")
    if model.remat != "full":
        fixes.append("model.remat=full")
    if candidate.micro_size > 1:
        fixes.append(f"a smaller batch.micro_size{'' if is_search else ' (--search looks for one)'}")
    if candidate.gather in ("micro_step", "step"):
        fixes.append("sharding.gather=layer")
    nodes = f"{machine.nodes} node{'s' if machine.nodes > 1 else ''} of {machine.cluster.name}"
    needed = f"{about}{format_bytes(need)} a device, of {format_bytes(machine.capacity)}"
    help_ = ", ".join(fixes) or "devices with more memory, or a smaller model"
    return f"nothing fits {nodes}: {candidate}, the smallest, needs {needed}; what would help: {help_}"
