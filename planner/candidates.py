"""`Candidate`: one way to train a config on a cluster, and all of those that a search looks at."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import Config
from planner.replay import NAMES
from sharding.scopes import GATHER_POLICIES, STRATEGIES

SCOPES = ("parameters", "gradients", "optimizer")
WIDTHS = {"none": "no devices", "node": "a node", "all": "all devices"}
CODED = ("hop_two", "hop_one_inter", "hop_one_intra", "gather_inter", "gather_intra", "experts_inter", "experts_intra")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What of a config a search changes, and its codecs; all else is the config's."""

    strategy: str
    partition_size: int = 0  # of mics
    gather: str
    micro_size: int
    extras: str = ""  # codecs, and the scopes of custom: `hop_two=int8+gather_inter=int8`

    @property
    def name(self) -> str:
        """The strategy as it is written: `mics(8)`, `mics(8)+hop_two=int8`."""
        name = f"{self.strategy}({self.partition_size})" if self.strategy == "mics" else self.strategy
        return f"{name}+{self.extras}" if self.extras else name

    @property
    def words(self) -> str:
        """The strategy as a legend shows it: `mics(8), hop two in int8`."""
        return ", ".join([self.name.partition("+")[0], *(_in_words(*pair) for pair in _pairs(self.extras).items())])

    def __str__(self) -> str:
        return f"{self.name}, micro-batch {self.micro_size}, gather {self.gather}"

    def overrides(self) -> dict[str, Any]:
        """Returns the keys of a config that make it this candidate, with their values."""
        keys: dict[str, Any] = {"sharding.gather": self.gather, "batch.micro_size": self.micro_size}
        keys |= {"sharding.strategy": self.strategy, "sharding.partition_size": self.partition_size}
        if self.strategy != "custom":  # the scopes that it does not name are the config's
            keys |= {f"sharding.{name}": "" for name in SCOPES}
        for key, value in (dict.fromkeys(CODED, "none") | _pairs(self.extras)).items():
            section = "sharding" if key in SCOPES else "compression"
            keys[f"{section}.{key}"] = int(value) if value.isdecimal() else value
        return keys

    def applied(self, config: Config) -> Config:
        """Returns the config with the candidate in it. ValueError if the two do not go together."""
        changes: dict[str, dict[str, Any]] = {"sharding": {}, "batch": {}, "compression": {}}
        for key, value in self.overrides().items():
            section, _, name = key.partition(".")
            changes[section][name] = value
        return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in changes.items()})


def _pairs(extras: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in extras.split("+") if word)


def _in_words(key: str, value: str) -> str:
    """Returns a codec or a scope of custom in words."""
    if key in SCOPES:
        return f"{key} over {WIDTHS.get(value, f'{value} devices')}"
    where = {"_inter": " between nodes", "_intra": " inside nodes"}.get(key[-6:], "")
    return f"{NAMES[key.removesuffix(key[-6:]) if where else key]}{where} in {value}"


def of_config(config: Config) -> Candidate:
    """Returns the candidate that a config is."""
    sharding, codecs = config.sharding, {key: getattr(config.compression, key) for key in CODED}
    return Candidate(
        strategy=sharding.strategy,
        partition_size=sharding.partition_size,
        gather=sharding.gather,
        micro_size=config.batch.micro_size,
        extras=_joined(codecs),
    )


def _joined(extras: Mapping[str, str]) -> str:
    """Returns codecs and scopes as a name has them: without those that code nothing."""
    return "+".join(f"{key}={value}" for key, value in extras.items() if key in SCOPES or value != "none")


def of_strategies(words: Sequence[str], config: Config) -> list[Candidate]:
    """Returns a candidate for each of `mics(8)`, `zero3+gather_inter=int8`, ...; the rest is the config's.

    After a plus come keys of `compression`, and scopes of `custom`. ValueError for another word.
    """
    own, found = of_config(config), []
    for whole in words:
        word, _, extras = whole.partition("+")
        for extra in filter(None, extras.split("+")):
            key, _, value = extra.partition("=")
            if key not in (*CODED, *(SCOPES if word == "custom" else ())) or not value:
                raise ValueError(
                    f"--strategy={whole}: {extra} is not KEY=VALUE of {', '.join(CODED)}, or of custom's "
                    f"{', '.join(SCOPES)}; such as mics(8)+hop_two=int8 or "
                    "custom+parameters=node+gradients=node+optimizer=all"
                )
        names = {*STRATEGIES, "custom"} if extras else {*STRATEGIES}
        match = re.fullmatch(r"(\w+?)(?:\((\d+)\))?", word)
        if not match or match[1] not in {*names, "mics"} or (match[1] == "mics") != bool(match[2]):
            raise ValueError(
                f"--strategy={word} is not a strategy; there are {', '.join(STRATEGIES)}, mics(P), such as mics(8), "
                "and custom with its scopes: custom+optimizer=all"
            )
        merged = _joined(_pairs(own.extras) | _pairs(extras))
        found.append(replace(own, strategy=match[1], partition_size=int(match[2] or 0), extras=merged))
    return found


def all_candidates(config: Config, nodes: int, devices_per_node: int) -> Iterator[Candidate]:
    """Yields strategies, group sizes, micro-batches and gather policies of a config, each program once.

    Codecs, local steps, rematerialisation and tensor parallelism stay those of the config.
    """
    data_devices = nodes * devices_per_node // config.mesh.tensor
    rows = -(-config.batch.global_size // data_devices)
    gathers = ["layer"] if config.sharding.partitioner == "auto" else [*GATHER_POLICIES]
    for strategy, partition_size in _strategies(nodes, devices_per_node, config.mesh.tensor):
        spans_nodes = strategy == "zero3" or partition_size > devices_per_node
        for gather in gathers:
            if gather != "layer" and strategy in ("ddp", "zero1", "zero2"):  # nothing is gathered
                continue
            if gather == "node" and not (spans_nodes and nodes > 1 and config.sharding.two_hop):
                continue  # the same as layer
            for micro_size in (size for size in range(1, rows + 1) if rows % size == 0):
                if gather == "step" and micro_size == rows:
                    continue  # the same as micro_step
                chosen = {"strategy": strategy, "partition_size": partition_size, "gather": gather}
                yield replace(of_config(config), **chosen, micro_size=micro_size)


def _strategies(nodes: int, devices_per_node: int, tensor: int) -> Iterator[tuple[str, int]]:
    """Yields strategies with their group size; mics over one device is ddp, over all zero3, and hsdp is mics."""
    yield from ((strategy, 0) for strategy in ("ddp", "zero1", "zero2", "zero3"))
    sizes = [size for size in legal_groups(nodes, devices_per_node) if size % tensor == 0]
    yield from (("mics", size) for size in sizes if tensor < size < nodes * devices_per_node)


def legal_groups(nodes: int, devices_per_node: int) -> list[int]:
    """Returns the devices of every partition group there can be: a divisor of a node, or whole nodes."""
    inside = [p for p in range(1, devices_per_node + 1) if devices_per_node % p == 0]
    across = [devices_per_node * n for n in range(2, nodes + 1) if nodes % n == 0]
    return [*inside, *across]
