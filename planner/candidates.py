"""`Candidate`: one way to train a config on a cluster. Also all candidates of a search."""

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from configs.losses import OUTER_STEP, settings_to_loss
from configs.schema import Config, LocalSGDConfig, MeshConfig, TransformerConfig
from configs.schema.codecs import CODED, COLLECTIVES, LEVELS
from configs.schema.sections import ALL_REDUCE, CODECS, METHODS
from sharding.scopes import GATHER_POLICIES, STRATEGIES

SCOPES = ("parameters", "gradients", "optimizer")
WIDTHS = {"none": "no devices", "node": "a node", "all": "all devices"}
# Keys that an extra changes, by their last word. Without an extra, codecs are none, and KEPT keys keep the config's
# value.
KEPT = {"delayed": "compression.delayed", "inner_steps": "local_sgd.inner_steps", "remat": "model.remat"}
KEPT |= {key.partition(".")[2]: key for key in OUTER_STEP} | {"optimizer.name": "optimizer.name"}
ENCODED = ("all_reduce", *CODED)
# the outer step of local SGD, unless an extra sets another one: DiLoCo's has a higher loss
AVERAGES = {"outer_learning_rate": "1.0", "outer_momentum": "0.0"}
REMAT = ("full", "attention", "dots")  # the choices that need nothing else of the config
# ordered by their effect on the result, as CODECS are; configs/losses.csv has measured losses of some
TIMINGS: tuple[dict[str, str], ...] = ({}, {"inner_steps": "10"}, {"delayed": "True"}, {"inner_steps": "50"})
# traffic that a codec encodes: the replica all-reduce, gathers and scatters of large groups, or both
BETWEEN_NODES = (
    ("all_reduce",),
    ("all_gather_inter", "reduce_scatter_inter"),
    ("all_reduce", "all_gather_inter", "reduce_scatter_inter"),
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The parts of a config that a search changes, including its codecs. All other settings are the config's."""

    strategy: str
    partition_size: int = 0  # devices per partition group of mics
    gather: str
    micro_size: int
    extras: str = ""  # codecs, keys of KEPT, scopes of custom, mics' wider optimizer: `all_reduce=int8+optimizer=all`

    @property
    def name(self) -> str:
        """The strategy as it is written: `mics(8)`, `mics(8)+all_reduce=int8`."""
        name = f"{self.strategy}({self.partition_size})" if self.strategy == "mics" else self.strategy
        return f"{name}+{self.extras}" if self.extras else name

    @property
    def pairs(self) -> dict[str, str]:
        """The extras, by key."""
        return _pairs(self.extras)

    @property
    def change(self) -> dict[str, str]:
        """The keys that change the result of a step: codecs, delayed exchanges, another optimizer."""
        extras = {extra: value for extra, value in self.pairs.items() if extra not in (*SCOPES, "remat")}
        if extras.get("inner_steps", "0") != "0":
            extras = AVERAGES | extras
        return {_key(extra): value for extra, value in extras.items()}

    @property
    def has_other_optimizer(self) -> bool:
        """Whether it trains with another optimizer than the config."""
        return "optimizer.name" in self.pairs

    @property
    def is_mics(self) -> bool:
        """Whether its partition groups are smaller than the cluster."""
        return self.strategy in ("mics", "hsdp")

    def with_extras(self, extras: Mapping[str, str]) -> "Candidate":
        """Returns the candidate with additional or replaced extras."""
        return replace(self, extras=_joined({**self.pairs, **extras}))

    @property
    def words(self) -> str:
        """The strategy as a legend shows it: `mics(8), the replica all-reduce in int8`."""
        return ", ".join([self.name.partition("+")[0], *(_in_words(*pair) for pair in self.pairs.items())])

    def __str__(self) -> str:
        return f"{self.name}, micro-batch {self.micro_size}, gather {self.gather}"

    def overrides(self) -> dict[str, Any]:
        """Returns the keys and values that turn a config into this candidate."""
        keys: dict[str, Any] = {"sharding.gather": self.gather, "batch.micro_size": self.micro_size}
        keys |= {"sharding.strategy": self.strategy, "sharding.partition_size": self.partition_size}
        extras = dict.fromkeys(ENCODED, "none") | self.pairs
        if self.strategy == "mics" and "optimizer" in extras:
            keys |= {"sharding.strategy": "custom", "sharding.partition_size": 0}
            extras |= dict.fromkeys(SCOPES[:2], str(self.partition_size))
        elif self.strategy != "custom":  # the config sets the scopes that `custom` does not name
            keys |= {f"sharding.{name}": "" for name in SCOPES}
        # The warm-up belongs to the config's method, and the candidate's may be another one. Registered methods may
        # read it.
        if extras["all_reduce"] not in METHODS and {extras[key] for key in ENCODED} <= {*ALL_REDUCE}:
            keys["compression.warmup_steps"] = 0
        if extras.get("inner_steps") == "0":
            keys |= {f"local_sgd.{key}": value for key, value in vars(LocalSGDConfig()).items()}
        texts = {_key(extra): value for extra, value in extras.items()} | self.change
        return keys | {key: _value(text) for key, text in texts.items()}

    def applied(self, config: Config) -> Config:
        """Returns the config with the candidate applied. ValueError if they are incompatible."""
        changes: dict[str, dict[str, Any]] = {}
        for key, value in self.overrides().items():
            section, _, name = key.partition(".")
            changes.setdefault(section, {})[name] = value
        return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in changes.items()})


def _key(extra: str) -> str:
    """Returns the config key that an extra sets, such as `compression.all_reduce` for `all_reduce`."""
    return KEPT.get(extra, f"{'sharding' if extra in SCOPES else 'compression'}.{extra}")


def _value(text: str) -> object:
    """Returns the value of an extra, for the config."""
    with suppress(SyntaxError, ValueError):
        return literal_eval(text)
    return text


def _pairs(extras: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in extras.split("+") if word)


def _in_words(key: str, value: str) -> str:
    """Returns an extra in words."""
    if key in SCOPES:
        return f"{key} over {WIDTHS.get(value, f'{value} devices')}"
    if key in KEPT:
        words = {"delayed": "replica all-reduce delayed", "inner_steps": f"averaged every {value} steps"}
        return words.get(key, f"{key.rpartition('.')[0] or key.replace('_', ' ')} {value}")
    collective, _, level = key.rpartition("_")
    return f"{f'{COLLECTIVES[collective]} {LEVELS[level]}' if key in CODED else 'replica all-reduce'} in {value}"


def of_config(config: Config) -> Candidate:
    """Returns the candidate that a config describes."""
    sharding, codecs = config.sharding, {key: getattr(config.compression, key) for key in ENCODED}
    return Candidate(
        strategy=sharding.strategy,
        partition_size=sharding.partition_size,
        gather=sharding.gather,
        micro_size=config.batch.micro_size,
        extras=_joined(codecs),
    )


def _joined(extras: Mapping[str, str]) -> str:
    """Returns extras as text for a name, without codecs `none`."""
    return "+".join(f"{key}={value}" for key, value in extras.items() if key not in ENCODED or value != "none")


def of_strategies(words: Sequence[str], config: Config) -> list[Candidate]:
    """Returns a candidate for each of `mics(8)`, `zero3+all_gather_inter=int8`, ... The config sets the rest.

    Extras and scopes of `custom` follow a plus. ValueError for another word.
    """
    own, found = of_config(config), []
    for whole in words:
        word, _, extras = whole.partition("+")
        for extra in filter(None, extras.split("+")):
            key, _, value = extra.partition("=")
            scopes = SCOPES if word == "custom" else ("optimizer",) if word.startswith("mics") else ()
            if key not in (*ENCODED, *KEPT, *scopes) or not value:
                raise ValueError(
                    f"--strategy={whole}: {extra} is not KEY=VALUE of {', '.join((*ENCODED, *KEPT))}, of mics' "
                    f"optimizer or of custom's {', '.join(SCOPES)}; such as mics(8)+all_reduce=int8 or "
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

    All other settings are the config's. `exact_variants` and `changes` vary them.
    """
    data_devices = nodes * devices_per_node // (config.mesh.tensor * config.mesh.context)
    rows = -(-config.batch.global_size // data_devices)
    gathers = ["layer"] if config.ablation.partitioner == "auto" else [*GATHER_POLICIES]
    for strategy, partition_size in _strategies(nodes, devices_per_node, config.mesh):
        spans_nodes = strategy == "zero3" or partition_size > devices_per_node
        for gather in gathers:
            if gather != "layer" and strategy in ("ddp", "zero1", "zero2"):  # nothing is gathered
                continue
            if gather == "node" and not (spans_nodes and nodes > 1 and config.ablation.two_hop):
                continue  # the same as layer
            for micro_size in (size for size in range(1, rows + 1) if rows % size == 0):
                if gather == "step" and micro_size == rows:
                    continue  # the same as micro_step
                chosen = {"strategy": strategy, "partition_size": partition_size, "gather": gather}
                yield replace(of_config(config), **chosen, micro_size=micro_size)


def exact_variants(candidate: Candidate, config: Config, *, fits: bool) -> Iterator[Candidate]:
    """Yields the candidate with each other rematerialisation, and with smaller memory for groups that do not fit.

    The result of a step equals the candidate's, up to rounding.
    """
    if config.model.remat in REMAT:
        kept = REMAT if isinstance(config.model, TransformerConfig) else ("full", "dots")
        yield from (candidate.with_extras({"remat": remat}) for remat in kept if remat != config.model.remat)
    if candidate.strategy == "mics" and not fits:
        yield candidate.with_extras({"optimizer": "all"})


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of traffic between nodes that changes the result, as positions in CODECS and TIMINGS.

    Alternatively the name of another recorded setting that reaches the loss of the dense run.
    """

    codec: int = 0
    timing: int = 0
    recorded: str = ""

    @property
    def is_pure(self) -> bool:
        """Whether it is of one kind."""
        return not (self.codec and self.timing)

    def is_milder(self, other: "Change") -> bool:
        """Whether the other change includes this one and more."""
        is_comparable = self != other and not self.recorded and not other.recorded
        return is_comparable and self.codec <= other.codec and self.timing <= other.timing


NO_CHANGE = Change()
INT8 = Change(codec=CODECS.index("int8"))


def changes(candidate: Candidate, config: Config, optimizer: str) -> Iterator[tuple[Change, Candidate]]:
    """Yields changes of a candidate's result, not all of them legal. The config's own settings stay.

    `optimizer` names the dense runs whose records hold for the config; "" without such records.
    """
    is_coded = bool({*ENCODED} & {*candidate.pairs})
    is_timed = config.compression.delayed or config.local_sgd.inner_steps > 0
    seen = [candidate.change]
    for codec, name in [*enumerate(CODECS)][: 1 if is_coded else None]:
        for timing, later in [*enumerate(TIMINGS)][: 1 if is_timed else None]:
            for keys in BETWEEN_NODES if codec else ((),):
                if codec or timing:
                    changed = candidate.with_extras(dict.fromkeys(keys, name) | later)
                    seen.append(changed.change)
                    yield Change(codec=codec, timing=timing), changed
    for setting in settings_to_loss(optimizer):
        extras = {extra: setting[_key(extra)] for extra in (*ENCODED, *KEPT) if _key(extra) in setting}
        changed = candidate.with_extras({k: value for k, value in extras.items() if AVERAGES.get(k) != value})
        if changed.change == setting and setting not in seen:  # else it has keys without an extra
            yield Change(recorded=_joined(extras)), changed


def _strategies(nodes: int, devices_per_node: int, mesh: MeshConfig) -> Iterator[tuple[str, int]]:
    """Yields strategies with their group size. mics(1) is ddp, mics over all devices is zero3, and hsdp is mics."""
    yield from ((strategy, 0) for strategy in ("ddp", "zero1", "zero2", "zero3"))
    sizes = legal_groups(nodes, devices_per_node, mesh)
    yield from (("mics", size) for size in sizes if mesh.tensor < size < nodes * devices_per_node)


def canonical(candidate: Candidate, nodes: int, devices_per_node: int, mesh: MeshConfig) -> Candidate:
    """Returns the candidate under the name that `all_candidates` gives to its program."""
    size = devices_per_node if candidate.strategy == "hsdp" else candidate.partition_size
    if not candidate.is_mics or size not in legal_groups(nodes, devices_per_node, mesh):
        return candidate
    same = {mesh.tensor: "ddp", nodes * devices_per_node: "zero3"}
    if size in same:
        return replace(candidate, strategy=same[size], partition_size=0)
    return replace(candidate, strategy="mics", partition_size=size)


def legal_groups(nodes: int, devices_per_node: int, mesh: MeshConfig) -> list[int]:
    """Returns the possible numbers of devices in a partition group: a divisor of a node, or whole nodes.

    All devices of a context or tensor group are in the same partition group.
    """
    inside = [p for p in range(1, devices_per_node + 1) if devices_per_node % p == 0]
    across = [devices_per_node * n for n in range(2, nodes + 1) if nodes % n == 0]
    return [p for p in (*inside, *across) if p % (mesh.context * mesh.tensor) == 0]
