"""The options of a search: legal candidates with bounds of their memory and time, not yet compiled."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import models
from configs.losses import checked_optimizer, rows_of, steps_to_loss
from configs.schema import Config
from planner.bounds import Bounds, bounds
from planner.candidates import NO_CHANGE, Candidate, Change, all_candidates, changes, exact_variants, legal_groups
from planner.predict import Machine
from sharding.mesh import Device
from training import idle
from training.batches import batches_of
from training.experiment import Experiment, make_experiment
from training.memory import state_bytes

Strategy = tuple[str, int]  # name, and devices of a partition group


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A legal candidate with its experiment and bounds."""

    candidate: Candidate
    experiment: Experiment
    bounds: Bounds
    change: Change
    is_recorded: bool = True  # whether a record has the change's cost in loss
    steps: float | None = 1.0  # steps to the loss of the config's run, divided by its steps; None: unknown, or never

    @property
    def strategy(self) -> Strategy:
        """The strategy without codecs, micro-batch and gather policy."""
        return self.candidate.strategy, self.candidate.partition_size

    @property
    def is_exact(self) -> bool:
        """Whether a step has the config's result."""
        return self.change == NO_CHANGE

    @property
    def speed(self) -> tuple[float, int, float]:
        """A sort key: estimated time to the loss of the config's run, number of extras, memory."""
        return self.bounds.estimate_s * (self.steps or 1.0), len(self.candidate.pairs), self.bounds.least_bytes


def recorded_optimizer(config: Config, machine: Machine) -> str:
    """Returns the optimizer of the dense runs whose records hold for a config on a machine; "" without such records."""
    parameters = models.build(config.model).num_params
    return checked_optimizer(config.to_dict(), parameters=parameters, nodes=machine.nodes)


class PlanOptions:
    """Turns candidates into options and counts them; `refused` has the reasons of illegal ones."""

    def __init__(self, config: Config, machine: Machine, devices: Sequence[Device]) -> None:
        self.num_candidates, self.refused = 0, list[str]()
        self._config, self._machine, self._devices = config, machine, devices
        self._optimizer = recorded_optimizer(config, machine)
        self._states: dict[str, tuple[int, int, int]] = {}  # the same for every gather policy, micro-batch and remat
        self._experiments: dict[tuple[str, str], Experiment] = {}  # without the micro-batch

    def made(self, candidates: Iterable[Candidate], change: Change = NO_CHANGE) -> list[Option]:
        """Returns the legal candidates with their bounds."""
        options: list[Option] = []
        for candidate in candidates:
            self.num_candidates += 1
            try:
                experiment = self._experiment(candidate)
                if change != NO_CHANGE and (lines := idle.described(experiment.config, experiment.plan.layout)):
                    raise ValueError(lines[0])
                key = candidate.with_extras({"remat": ""}).name
                self._states[key] = self._states.get(key) or state_bytes(experiment)
                found = bounds(experiment, self._machine.cluster, self._states[key])
            except ValueError as error:
                self.refused.append(f"{candidate.name}: {error}")
                continue
            option = Option(candidate=candidate, experiment=experiment, bounds=found, change=change)
            if change != NO_CHANGE:
                recorded = rows_of(candidate.change, self._optimizer)
                option = replace(option, is_recorded=bool(recorded), steps=steps_to_loss(recorded))
            options.append(option)
        return options

    def of_search(self, mine: Candidate, own: Sequence[Option]) -> list[Option]:
        """Returns the config's own (`mine`), every strategy, and variants and changes of each one's best policy."""
        config, machine = self._config, self._machine
        every = all_candidates(config, machine.nodes, machine.cluster.devices_per_node)
        options = [*own, *self.made(candidate for candidate in every if candidate != mine)]
        by_name: dict[str, list[Option]] = {}
        for option in options:
            by_name.setdefault(option.candidate.name, []).append(option)
        more: list[Option] = []
        for alike in by_name.values():
            fit = {option: option.bounds.estimate_bytes <= machine.capacity for option in alike}
            best = min(alike, key=lambda option: (not fit[option], *option.speed))
            for option in alike:
                if option.candidate.gather == best.candidate.gather:
                    more += self.made(exact_variants(option.candidate, config, fits=fit[option]))
            for change, candidate in changes(best.candidate, config, self._optimizer) if machine.nodes > 1 else ():
                more += self.made([candidate], change)
        return options + more

    def check(self, options: list[Option]) -> list[Option]:
        """Returns the options. ValueError if the list is empty."""
        if not options:
            first = self.refused[0]
            raise ValueError(
                first.partition(": ")[2] if self.num_candidates == 1 else f"no candidate is legal; {first}"
            )
        return options

    def _experiment(self, candidate: Candidate) -> Experiment:
        """Returns the experiment of a candidate. ValueError if it is not legal."""
        key, per_node = (candidate.name, candidate.gather), self._machine.cluster.devices_per_node
        mesh = replace(self._config.mesh, num_cpu_devices=0, devices_per_node=per_node)
        if candidate.strategy == "mics" and not candidate.partition_size:
            legal = ", ".join(map(str, legal_groups(self._machine.nodes, per_node, mesh)))
            raise ValueError(f"--strategy={candidate.name}: groups have a device or more; sizes that divide: {legal}")
        config = replace(candidate.applied(self._config), mesh=mesh)
        if key not in self._experiments:
            self._experiments[key] = make_experiment(config, self._devices, [*self._experiments.values()])
        one = self._experiments[key]
        batches, num_shares = batches_of(config, one.plan)
        return replace(one, config=config, batches=batches, num_shares=num_shares)
