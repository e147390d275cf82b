"""`Candidate`: one way to train a config on a cluster, and all of those that a search looks at."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import Config
from planner.timeline import NAMES as TRAFFIC
from sharding.scopes import GATHER_POLICIES, STRATEGIES

NAMES = (*STRATEGIES, "mics(P)")
SCOPES = ("parameters", "gradients", "optimizer")
WIDTHS = {"none": "no devices", "node": "a node", "all": "all devices"}
# what a strategy's word may change besides: the section of each key
CODED = ("hop_two", "hop_one_inter", "hop_one_intra", "gather_inter", "gather_intra", "experts_inter", "experts_intra")
EXTRAS: dict[str, str] = {**dict.fromkeys(CODED, "compression"), **dict.fromkeys(SCOPES, "sharding")}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What of a config a search changes; all else is the config's."""

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
        name, *extras = self.name.split("+")
        return ", ".join([name, *map(_in_words, extras)])

    def __str__(self) -> str:
        return f"{self.name}, micro-batch {self.micro_size}, gather {self.gather}"

    def overrides(self) -> dict[str, Any]:
        """Returns the keys of a config that make it this candidate, with their values."""
        keys = {"sharding.gather": self.gather, "batch.micro_size": self.micro_size}
        extras = dict(word.split("=", 1) for word in self.extras.split("+") if word)
        keys |= {f"{EXTRAS[key]}.{key}": int(value) if value.isdecimal() else value for key, value in extras.items()}
        keys |= {"sharding.strategy": self.strategy, "sharding.partition_size": self.partition_size}
        if self.strategy == "custom":  # the scopes that it does not name are the config's
            return keys
        return keys | {f"sharding.{name}": "" for name in SCOPES}

    def applied(self, config: Config) -> Config:
        """Returns the config with the candidate in it. ValueError if the two do not go together."""
        changes: dict[str, dict[str, Any]] = {"sharding": {}, "batch": {}, "compression": {}}
        for key, value in self.overrides().items():
            section, _, name = key.partition(".")
            changes[section][name] = value
        return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in changes.items()})


def _in_words(extra: str) -> str:
    """Returns a codec or a scope of custom in words."""
    key, _, value = extra.partition("=")
    if key in SCOPES:
        return f"{key} over {WIDTHS.get(value, f'{value} devices')}"
    for suffix, where in {"_inter": " between nodes", "_intra": " inside nodes", "": ""}.items():
        traffic = key.removesuffix(suffix)
        if key.endswith(suffix) and traffic in TRAFFIC:
            return f"{TRAFFIC[traffic]}{where} in {value}"
    raise AssertionError(f"{extra} is neither")


def of_config(config: Config) -> Candidate:
    """Returns the candidate that a config is."""
    sharding = config.sharding
    return Candidate(
        strategy=sharding.strategy,
        partition_size=sharding.partition_size,
        gather=sharding.gather,
        micro_size=config.batch.micro_size,
    )


def of_strategies(words: Sequence[str], config: Config) -> list[Candidate]:
    """Returns a candidate for each of `mics(8)`, `zero3+gather_inter=int8`, ...; the rest is the config's.

    After a plus come keys of `compression`, and scopes of `custom`. ValueError for another word.
    """
    found = []
    for whole in words:
        word, _, extras = whole.partition("+")
        for extra in filter(None, extras.split("+")):
            key, _, value = extra.partition("=")
            if EXTRAS.get(key) not in ("compression", *(["sharding"] if word == "custom" else [])) or not value:
                raise ValueError(
                    f"--strategy={whole}: {extra} is not KEY=VALUE of {', '.join(CODED)}, or of custom's "
                    f"{', '.join(SCOPES)}; such as mics(8)+hop_two=int8 or "
                    "custom+parameters=node+gradients=node+optimizer=all"
                )
        names = {*STRATEGIES, "custom"} if extras else {*STRATEGIES}
        match = re.fullmatch(r"(\w+?)(?:\((\d+)\))?", word)
        known = match and ((match[1] in names and not match[2]) or (match[1] == "mics" and match[2]))
        if not match or not known:
            raise ValueError(
                f"--strategy={word} is not a strategy; there are {', '.join(NAMES)}, such as mics(8), and custom with "
                "its scopes: custom+optimizer=all"
            )
        partition_size = int(match[2] or 0)
        found.append(replace(of_config(config), strategy=match[1], partition_size=partition_size, extras=extras))
    return found


def all_candidates(config: Config, nodes: int, devices_per_node: int) -> Iterator[Candidate]:
    """Yields strategies, group sizes, micro-batches and gather policies of a config, each program once.

    Codecs, local steps, rematerialisation and tensor parallelism stay those of the config.
    """
    data_devices = nodes * devices_per_node // config.mesh.tensor
    rows = -(-config.batch.global_size // data_devices)
    micro_sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    gathers = ["layer"] if config.sharding.partitioner == "auto" else [*GATHER_POLICIES]
    for strategy, partition_size in _strategies(nodes, devices_per_node, config.mesh.tensor):
        spans_nodes = strategy == "zero3" or partition_size > devices_per_node
        for gather in gathers:
            if gather != "layer" and strategy in ("ddp", "zero1", "zero2"):  # nothing is gathered
                continue
            if gather == "node" and not (spans_nodes and nodes > 1 and config.sharding.two_hop):
                continue  # the same as layer
            for micro_size in micro_sizes:
                if gather == "step" and micro_size == rows:
                    continue  # the same as micro_step
                yield Candidate(strategy=strategy, partition_size=partition_size, gather=gather, micro_size=micro_size)


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
