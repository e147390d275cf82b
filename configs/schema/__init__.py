"""The config of a run: one frozen dataclass per section, with each key's default, meaning and limits.

    config = Config.from_dict(values)       # validates all keys, except for checks that need devices or data
    config.optimizer.learning_rate
    config.to_dict()                        # as in `config.json` and in checkpoints

The larger sections are in files of their names; `python -m configs.schema` prints docs/config.md. Imports the standard
library only.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import gcd
from typing import Any

from configs.schema.combinations import refuse
from configs.schema.data import DataConfig
from configs.schema.keys import Key, Section, abbreviates, flat, key, keys_of, nearest, nested  # noqa: F401
from configs.schema.mixture import SPLIT, parse_sets
from configs.schema.model import (  # noqa: F401
    GATED,
    MODELS,
    DecoderConfig,
    EncoderConfig,
    ImageConfig,
    ModelConfig,
    MoeConfig,
    ResNetConfig,
    TransformerConfig,
    ViTConfig,
    model_sections,
)
from configs.schema.sections import (
    LEAST_INTERVAL,
    AblationConfig,
    BatchConfig,
    CheckpointConfig,
    CompressionConfig,
    ElasticConfig,
    EvalConfig,
    LocalSGDConfig,
    MeshConfig,
    OptimizerConfig,
    ProfileConfig,
    SampleConfig,
    ShardingConfig,
)
from runtime.files.json_objects import JsonMapping

UTILISATION = "local_sgd.target_utilisation"  # is `local_sgd.interval=utilisation` today
# keys of older versions that were settings; a config file that registers the method gives it its settings
SETTINGS = (
    *(f"compression.{name}" for name in ("threshold", "sampled", "rank", "sparsity", "feedback_decay")),
    UTILISATION,
)

# keys of older versions with the values that runs have today
GONE = {"compression.rounding": "nearest", "optimizer.decay_mask": "matrices"}

RENAMED = {  # keys of older versions, and their names today
    "compression.hop_two": "compression.all_reduce",
    **{f"compression.hop_one_{level}": f"compression.reduce_scatter_{level}" for level in ("inter", "intra")},
    **{f"compression.gather_{level}": f"compression.all_gather_{level}" for level in ("inter", "intra")},
    **{f"sharding.{name}": f"ablation.{name}" for name in ("hierarchical", "two_hop", "partitioner")},
}

BEFORE = {"data.add_bos": "never"}  # behaviour of versions without these keys, where it differs from the default


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """The whole config: top-level keys and sections."""

    seed: int = key(0, "seed of parameters, order of examples and random draws", least=0, most=2**63 - 1)
    num_steps: int = key(
        100,
        "optimizer steps of the run and its schedule; --extend raises it",
        least=1,
        most=2**31 - 1,  # the step in the state is an int32
        unit="steps",
    )
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    mesh: MeshConfig
    sharding: ShardingConfig
    compression: CompressionConfig
    local_sgd: LocalSGDConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    elastic: ElasticConfig
    eval: EvalConfig
    sample: SampleConfig
    profile: ProfileConfig
    ablation: AblationConfig
    log_every: int = key(
        1,
        "steps between lines of metrics.jsonl, after an attempt's first; with local_sgd each at the next sync",
        least=1,
        unit="steps",
        resumable=True,
    )
    sink: str = key("none", "where metrics go as well; offline", choices=("none", "wandb"), resumable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        model, data = self.model, self.data
        if data.objective != model.OBJECTIVE:
            raise ValueError(
                f"data.objective={data.objective} does not fit model.kind={model.kind}; it must be {model.OBJECTIVE}"
            )
        self.validation_data()
        if isinstance(model, TransformerConfig):
            self._check_length(model)
        if isinstance(model, ImageConfig) and data.channels != model.channels:
            raise ValueError(f"data.channels={data.channels} differs from model.channels={model.channels}")
        if isinstance(model, ViTConfig) and data.image_size != model.image_size:
            raise ValueError(f"data.image_size={data.image_size} differs from model.image_size={model.image_size}")
        if (micro_size := self.batch.micro_size) % (rows := self.rows_together):
            raise ValueError(
                f"model.norm_rows={rows} must divide batch.micro_size={micro_size}, because rows that are normalised "
                f"together are on one device; set batch.micro_size to a multiple of {rows}"
            )
        if self.optimizer.warmup_steps > self.num_steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} is more than num_steps={self.num_steps}; "
                f"set optimizer.warmup_steps={self.num_steps} at most"
            )
        local, warmup_steps = self.local_sgd, self.compression.warmup_steps
        inner_steps = local.inner_steps
        if warmup_steps >= (meetings := -(-self.num_steps // (inner_steps or 1))):
            most = f"num_steps={self.num_steps}"
            if inner_steps:  # the longest interval, if they are chosen
                most = f"{meetings}, the meetings in {most} with one every {inner_steps} steps"
            raise ValueError(
                f"compression.warmup_steps={warmup_steps} must be less than {most}: the warm-up of "
                f"compression.all_reduce={self.compression.all_reduce} would never end"
            )
        is_chosen = local.interval != "fixed"
        if is_chosen and 0 < inner_steps <= LEAST_INTERVAL:
            raise ValueError(
                f"local_sgd.interval={local.interval} chooses intervals from {LEAST_INTERVAL} to "
                f"local_sgd.inner_steps, which is {inner_steps}; set it to the longest that the loss allows"
            )
        if is_chosen and self.num_steps < LEAST_INTERVAL:
            raise ValueError(
                f"num_steps={self.num_steps} ends before the first meeting of local_sgd.interval={local.interval}; set "
                f"it to {LEAST_INTERVAL} at least"
            )
        if inner_steps and not (local.streaming or is_chosen) and self.num_steps % inner_steps:
            raise ValueError(
                f"num_steps={self.num_steps} must be a multiple of local_sgd.inner_steps={inner_steps}, or the updates "
                "of the last steps would be lost"
            )
        if local.streaming and self.num_steps <= inner_steps:
            raise ValueError(
                f"num_steps={self.num_steps} must be above local_sgd.inner_steps={inner_steps}, or with "
                "local_sgd.streaming=True some parts of the tensors would never be exchanged"
            )
        every, eval_every = self.checkpoint.every, self.eval.every
        if self.checkpoint.keep_best and (not every or not eval_every or every % eval_every):
            fix = f"set eval.every={every} or a divisor of it" if every else "set both above 0"
            raise ValueError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs a validation at every checkpoint, but "
                f"eval.every={eval_every} and checkpoint.every={every}; {fix}, or checkpoint.keep_best=0"
            )
        refuse(self.values)

    def validation_data(self) -> dict[str, DataConfig]:
        """Returns the section `data` of each set of `eval.data` by name, and the run's own for `split`."""
        found = {}
        for name, component in parse_sets(self.eval.data).items():
            try:
                found[name] = self.data if name == SPLIT else self.data.alone(component)
            except ValueError as error:
                raise ValueError(f"eval.data, set {name}: {error}") from error
        return found

    def _check_length(self, model: TransformerConfig) -> None:
        context, length = self.mesh.context, self.data.seq_len
        if model.attention == "pallas" and not model.takes_flash(length):
            raise ValueError(f"data.seq_len={length}: model.attention=pallas needs 16, 32 or a multiple of 64")
        if model.attention == "pallas" and not model.takes_flash(length, self.mesh.tensor):
            raise ValueError(
                f"mesh.tensor={self.mesh.tensor} does not divide the heads, as model.attention=pallas needs; set "
                "model.attention=xla"
            )
        if model.attention == "splash" and not model.takes_splash(length, self.mesh.tensor):
            raise ValueError(
                f"data.seq_len={length} and mesh.tensor={self.mesh.tensor}: model.attention=splash needs a multiple of "
                "128 positions, and whole heads on each device; set model.attention=xla"
            )
        if length > model.max_len:
            raise ValueError(
                f"data.seq_len={length} is longer than model.max_len={model.max_len}; raise model.max_len, "
                f"or set data.seq_len to {model.max_len} at most"
            )
        name = "num_kv_heads" if isinstance(model, DecoderConfig) else "num_heads"
        common = gcd(length, heads := getattr(model, name))
        if common % context:
            raise ValueError(
                f"mesh.context={context} must divide data.seq_len={length} and model.{name}={heads}: devices that "
                f"share rows divide the positions, and in attention the heads; set it to a divisor of {common}"
            )

    @property
    def rows_together(self) -> int:
        """Number of consecutive rows of the batch on one device, which are normalised together."""
        model = self.model
        return model.norm_rows if isinstance(model, ResNetConfig) and model.norm == "batch" else 1

    @property
    def values(self) -> dict[str, Any]:
        """The value of every key, by its full name."""
        return flat(asdict(self))

    @classmethod
    def from_dict(cls, values: JsonMapping) -> "Config":
        """Returns the config that nested dicts describe.

        ValueError for an unknown or missing key and for values that are not allowed.
        """
        kind = check_names(values)
        own = {name: values[name] for name in keys_of(cls)}
        parts: dict[str, Any] = {name: section(**values[name]) for name, section in sections(kind).items()}
        return cls(**own, **parts)

    def to_dict(self) -> dict[str, object]:
        """Returns the config as nested dicts for JSON: tuples become lists."""
        return json.loads(json.dumps(asdict(self)))


def check_names(values: Mapping[str, object]) -> str:
    """Returns the model kind of a config. ValueError for an unknown or missing key."""
    given = flat(values)
    if "model.kind" not in given:  # the other keys depend on it
        raise ValueError(f"model.kind is missing from the config; its default is {ModelConfig.kind!r}")
    kind = str(given["model.kind"])
    known, own = known_keys(kind), _of_model(given)
    for other in model_sections():
        if kind in model_sections() and own != _of_model(known) and own == _of_model(known_keys(other)):
            raise ValueError(
                f"the model section has model.kind={kind} and the keys of model.kind={other}; a config file chooses "
                f"the kind, by config.model = base.model({kind!r})"
            )
    for name in given:
        if name not in known:
            raise ValueError(unknown_key(name, kind))
    for name, declared in known.items():
        if name not in given:
            raise ValueError(f"{name} is missing from the config; its default is {declared.default!r}")
    return kind


def _of_model(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith("model.")}


def unknown_key(name: str, kind: str) -> str:
    """Returns the message for an unknown key: its new name, the model kinds that have it, or the nearest key."""
    if name in RENAMED:
        return f"{name} is not a key any more; it is {RENAMED[name]} now"
    if name in GONE:
        return f"{name} is not a key any more; every run is as with {name}={GONE[name]}"
    if name in SETTINGS:
        return (
            f"{name} is not a key any more; the config file that registers the method sets it, such as "
            "examples/methods/config.py"
        )
    others = [other for other in model_sections() if name in known_keys(other)]
    if kind not in model_sections() or not others:
        return f"{name} is not a key; the nearest is {nearest(name, [*known_keys(kind)])}"
    return (
        f"{name} is not a key of model.kind={kind}, but of {', '.join(others)}; a config file chooses the kind, "
        f"by config.model = base.model({others[0]!r})"
    )


def sections(kind: str) -> dict[str, type[Section]]:
    """Returns the sections by name, with the model section of `kind` (for an unknown kind: the decoder's)."""
    found = {f.name: f.type for f in fields(Config) if isinstance(f.type, type) and issubclass(f.type, Section)}
    return found | {"model": model_sections().get(kind, DecoderConfig)}


def known_keys(kind: str) -> Mapping[str, Key]:
    """Returns all keys of a config with a model of this kind, by full name, in order of declaration."""
    return _known_keys(sections(kind)["model"])


@functools.cache
def _known_keys(model: type[Section]) -> Mapping[str, Key]:
    own, parts = keys_of(Config), sections("") | {"model": model}
    return flat({f.name: own.get(f.name) or keys_of(parts[f.name]) for f in fields(Config)})


def defaults(kind: str = "decoder") -> dict[str, Any]:
    """Returns the default of every key, as nested dicts. They lack a partition size."""
    return nested({name: declared.default for name, declared in known_keys(kind).items()} | {"model.kind": kind})


def with_defaults(saved: JsonMapping) -> dict[str, Any]:
    """Returns a saved config, nested, in today's keys; missing keys are as in BEFORE, or have their defaults.

    ValueError if it is not a config.
    """
    values = flat(saved)
    kept = {RENAMED.get(name, name): value for name, value in values.items() if name not in (*SETTINGS, *GONE)}
    if values.get(UTILISATION):
        kept["local_sgd.interval"] = "utilisation"
    try:
        return nested(flat(defaults(str(saved["model"]["kind"]))) | BEFORE | kept)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the saved config is not one of ours: it lacks model.kind, or a section ({error})") from error


def may_change(name: str) -> bool:
    """Whether a resumed run may change a key, because it does not affect what is learned (docs/training.md).

    Unknown keys, from another version, may change if all of their section may.
    """
    section = sections("").get(name.partition(".")[0])
    if section is not None and section.RESUMABLE:
        return True
    return any(name in (known := known_keys(kind)) and known[name].resumable for kind in model_sections())
