"""The features of a run, and the refused pairs of features, as data.

    refuse(values)  # ValueError in one line for the first pair of features in RULES that a config has

A feature is read from keys of the config, and from facts about devices, model and method of the replica all-reduce.
Without these facts `Config` refuses the pairs that its keys show; `training.experiment.make_plan` refuses the rest.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from configs.schema.codecs import CODED, LEVELS
from configs.schema.keys import Section, keys_of
from configs.schema.model import REMAT_OF_ATTENTION, MoeConfig, remat_other_than
from configs.schema.own import OWN
from configs.schema.sections import (
    CODECS,
    METHODS,
    AblationConfig,
    BatchConfig,
    CompressionConfig,
    EvalConfig,
    LocalSGDConfig,
    MeshConfig,
    OptimizerConfig,
    SampleConfig,
    ShardingConfig,
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about devices, model and method of the replica all-reduce, by the names that features read."""

    has_replicas: bool  # the replica all-reduce has several gradients to average
    replicas_share_rows: bool  # devices that share rows are replicas of each other
    parameters_are_cut: bool
    in_one_scope: bool  # parameters, gradients and optimizer state
    optimizer_like_gradients: bool  # those two in one scope
    takes_over: str | None  # the optimizer that the method of the replica all-reduce replaces
    goes_by_group: bool  # the method needs no more than the gradients of one layer, or a piece of them
    model_splits: bool  # the model names dims for mesh.tensor
    model_has_experts: bool
    model_has_pieces: bool  # its loss is all that it minimises, in pieces around a stack of equal layers


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A property that a config has or lacks."""

    keys: tuple[str, ...]  # full names of keys, and of facts
    has: Callable[..., bool]  # of their values
    shown: str  # in the documentation
    said: str = ""  # in errors; "": the first key and its value
    instead: str = ""  # what does without it

    def is_in(self, values: Mapping[str, object]) -> bool:
        """Whether a config has the feature; False if a fact is not known."""
        return all(key in values for key in self.keys) and self.has(*(values[key] for key in self.keys))

    def in_words(self, values: Mapping[str, object]) -> str:
        """Returns the name of the feature in an error."""
        return self.said or f"{self.keys[0]}={values[self.keys[0]]}"


def _of(key: str, value: object, off: object) -> Feature:
    """Returns the feature of a key that has one value, and does without it by another."""
    return Feature(keys=(key,), has=lambda v: v == value, shown=f"`{key}={value}`", instead=f"set {key}={off}")


def _other_than(key: str, value: object, shown: str = "") -> Feature:
    """Returns the feature of a key that has another value."""
    shown = shown or f"`{key}` other than `{value}`"
    return Feature(keys=(key,), has=lambda v: v != value, shown=shown, instead=f"set {key}={value}")


def _changed(section: type[Section], name: str) -> Feature:
    """Returns the feature of a key that does not have its default."""
    return _other_than(f"{section.SECTION}.{name}", getattr(section, name))


def _all_reduce(shown: str, has: Callable[..., bool], instead: str, *facts: str) -> Feature:
    """Returns the feature of some methods of the replica all-reduce, by their names and facts."""
    return Feature(
        keys=("compression.all_reduce", *facts), has=has, shown=shown, instead=f"set compression.all_reduce={instead}"
    )


def _where(fact: str, value: object, said: str, instead: str, shown: str = "") -> Feature:
    """Returns the feature of a fact that has one value."""
    return Feature(keys=(fact,), has=lambda v: v == value, shown=shown or said, said=said, instead=instead)


# the sections whose keys remedies name
SECTIONS = {
    section.SECTION: section
    for section in (
        AblationConfig,
        BatchConfig,
        CompressionConfig,
        EvalConfig,
        LocalSGDConfig,
        MeshConfig,
        MoeConfig,
        OptimizerConfig,
        SampleConfig,
        ShardingConfig,
    )
}
CODED_SCATTERS, DIFFERENCES = (
    tuple(f"{collective}_{level}" for level in LEVELS) for collective in ("reduce_scatter", "weight_differences")
)
ONE_SCOPE = "ddp", "zero3", "hsdp", "mics"  # strategies that shard parameters and optimizer state alike
FEATURES: dict[str, Feature] = {
    "independent": _of("sharding.replicas", "independent", "one_world"),
    "early stopping": _other_than("eval.patience", 0, "`eval.patience` above 0"),
    "no validation": _of("eval.every", 0, "a number above 0"),
    "shares": _other_than("sharding.shares", 0, "`sharding.shares` above 0"),
    "one world": _of("sharding.replicas", "one_world", "independent"),
    "float16": _of("model.compute_dtype", "float16", "float32 or bfloat16"),
    "batch norm": _of("model.norm", "batch", "group"),
    "residuals": Feature(
        keys=("compression.all_reduce", "compression.error_feedback"),
        has=lambda name, keeps: keeps and name not in ("none", *METHODS),
        shown="`compression.error_feedback` of a codec of the replica all-reduce",
        said="compression.error_feedback=True (the default)",
        instead="set compression.error_feedback=False",
    ),
    "no feedback": _of("compression.error_feedback", False, True),
    "keeping method": _all_reduce("`one_bit_adam`", lambda name: name in METHODS, "none or a codec"),
    "other payload": _all_reduce(
        f"a replica all-reduce by another method than `{'`, `'.join(CODECS[:-1])}` and `{CODECS[-1]}`",
        lambda name: name not in CODECS,
        f"{', '.join(CODECS[:-1])} or {CODECS[-1]}",
    ),
    "several replicas": _where(
        "has_replicas", True, "several partition groups in one process", "set sharding.strategy=zero3"
    ),
    "stages": _other_than("mesh.stages", 1, "`mesh.stages` above 1"),
    "context": _other_than("mesh.context", 1, "`mesh.context` above 1"),
    "tensor": _other_than("mesh.tensor", 1, "`mesh.tensor` above 1"),
    "auto": _of("ablation.partitioner", "auto", "manual"),
    "overlap": _of("sharding.overlap", "on", "auto"),
    "one hop": _of("ablation.two_hop", False, True),
    "flat": _of("ablation.hierarchical", False, True),
    "float32 sums": _of("sharding.reduce_dtype", "float32", "compute"),
    "experts": _other_than("sharding.experts", "none"),
    "dropless": _of("model.capacity_factor", 0, "a number above 0"),
    "whole experts": _of("sharding.experts", "none", "node, all or a number of devices"),
    "other gather": _other_than("sharding.gather", "layer"),
    "node gather": _of("sharding.gather", "node", "layer"),
    "whole gather": Feature(
        keys=("sharding.gather",),
        has=lambda gather: gather in ("micro_step", "step"),
        shown="`sharding.gather=micro_step` or `step`",
        instead="set sharding.gather=layer or node",
    ),
    "layer gather": Feature(
        keys=("sharding.gather", "parameters_are_cut"),
        has=lambda gather, cut: gather in ("layer", "node") and cut,
        shown="`sharding.gather=layer` or `node` of parameters that are cut",
        instead="set sharding.gather=micro_step",
    ),
    "no remat": _of(
        "model.remat", "none", f"{remat_other_than('none')} (not for ResNets: {', '.join(REMAT_OF_ATTENTION)})"
    ),
    "unroll": _of("model.unroll", True, False),
    "packing": _other_than("data.packing", "stream"),
    "cudnn": _of("model.attention", "cudnn", "xla or auto"),
    "pallas": _of("model.attention", "pallas", "xla or auto"),
    "splash": _of("model.attention", "splash", "xla or auto"),
    "sinks": _of("model.attention_sinks", True, False),
    "attention dropout": _other_than("model.attention_dropout", 0, "`model.attention_dropout` above 0"),
    "sample": _other_than("sample.length", 0, "`sample.length` above 0"),
    "delayed": _of("compression.delayed", True, False),
    "local SGD": _other_than("local_sgd.inner_steps", 0, "`local_sgd`"),
    "no local SGD": _of("local_sgd.inner_steps", 0, "a number above 0"),
    "streaming": _of("local_sgd.streaming", True, False),
    "chosen interval": _other_than("local_sgd.interval", "fixed"),
    "quorum": _other_than("local_sgd.quorum", 0, "`local_sgd.quorum` above 0"),
    "no quorum": _of("local_sgd.quorum", 0, "a number above 0"),
    "grace window": _changed(LocalSGDConfig, "grace_s"),
    "clipping": _other_than("optimizer.clip_norm", 0, "`optimizer.clip_norm` above 0"),
    "warm-up": _other_than("compression.warmup_steps", 0, "`compression.warmup_steps` above 0"),
    "no warm-up": _of("compression.warmup_steps", 0, "15 to 20 % of num_steps"),
    "no user of a warm-up": Feature(
        keys=("compression.all_reduce", *(f"compression.{key}" for key in CODED)),
        has=lambda *chosen: chosen[0] not in METHODS and {*chosen}.isdisjoint({*OWN["codec"], *OWN["all_reduce"]}),
        shown="a replica all-reduce by another method than `one_bit_adam`",
        instead="set compression.all_reduce=one_bit_adam",
    ),
    "one_bit_adam": _of("compression.all_reduce", "one_bit_adam", "none"),
    "outer step's rate": _changed(LocalSGDConfig, "outer_learning_rate"),
    "outer step's momentum": _changed(LocalSGDConfig, "outer_momentum"),
    "replacing method": _all_reduce(
        "`one_bit_adam`, or a registered method that replaces the optimizer",
        lambda _, optimizer: optimizer is not None,
        "none or a codec",
        "takes_over",
    ),
    "whole method": _all_reduce(
        "`one_bit_adam`, or a registered method that needs all gradients at once",
        lambda _, by_group: not by_group,
        "none or a codec",
        "goes_by_group",
    ),
    "other optimizer": Feature(
        keys=("optimizer.name", "takes_over"),
        has=lambda name, replaced: replaced not in (None, name),
        shown="`optimizer.name` other than the optimizer that the method replaces",
        instead="set optimizer.name={takes_over}",
    ),
    "compressed": _other_than("compression.all_reduce", "none"),
    "shared rows": _where(
        "replicas_share_rows",
        True,
        "replicas that share rows",
        "set sharding.strategy=hsdp, or set mesh.context=1",
        "partition groups smaller than `mesh.context`",
    ),
    "one scope": Feature(
        keys=("sharding.strategy",),
        has=lambda strategy: strategy in ONE_SCOPE,
        shown=f"`sharding.strategy={'`, `'.join(ONE_SCOPE[:-1])}` or `{ONE_SCOPE[-1]}`",
        instead="set sharding.strategy=zero1, zero2 or custom",
    ),
    "several scopes": _where(
        "in_one_scope",
        False,
        "parameters, gradients and optimizer state in different scopes",
        "set sharding.strategy=ddp, hsdp or mics",
        "different scopes (`zero1`, node/node/all)",
    ),
    "wider optimizer": _where(
        "optimizer_like_gradients",
        False,
        "an optimizer state in another scope than the gradients",
        "set sharding.strategy=ddp, hsdp or mics",
    ),
    "undivided model": _where("model_splits", False, "a model without dims to split", "", "`model.kind=resnet`"),
    "no experts": _where("model_has_experts", False, "a model without experts", "", "another `model.kind` than `moe`"),
    "no pieces": _where(
        "model_has_pieces",
        False,
        "a model whose objective is more than a loss in pieces around a stack of equal layers",
        "",
        "`model.kind=resnet`, `vit` or `moe`",
    ),
}
for _key in CODED:
    _payload = "weight differences" if _key in DIFFERENCES else "gathers, of the group reduce-scatter or of tokens"
    FEATURES[_key] = _other_than(f"compression.{_key}", "none", f"a codec of {_payload}")


@dataclass(frozen=True)
class Rule:
    """A feature, the features that a run cannot combine with it, and the reason."""

    one: str
    others: tuple[str, ...]
    why: str

    @property
    def pairs(self) -> list[tuple[Feature, Feature]]:
        """Pairs of the feature and each other feature."""
        return [(FEATURES[self.one], FEATURES[other]) for other in self.others]

    def complaint(self, values: Mapping[str, object]) -> str:
        """Returns the error line if a config has the first feature and any of the others, else ""."""
        for pair in self.pairs:
            if all(feature.is_in(values) for feature in pair):
                one, other = (feature.in_words(values) for feature in pair)
                fixes = [feature.instead.format_map(values) for feature in pair if feature.instead]
                return f"{one} does not go with {other}: {self.why}; {', or '.join(_resumable_first(fixes))}"
        return ""


def _resumable_first(fixes: Sequence[str]) -> list[str]:
    """Returns remedies; marks the remedies that a resumed run refuses, if another remedy exists."""
    for_all = [fix for fix in fixes if _may_change(fix)]
    return for_all + [f"in a new run {fix}" if for_all else fix for fix in fixes if fix not in for_all]


def _may_change(fix: str) -> bool:
    """Whether a resumed run may change all keys that a remedy names."""
    keys = re.findall(r"\b([a-z_]+)\.([a-z_]+)", fix)
    return all(section in SECTIONS and keys_of(SECTIONS[section])[key].resumable for section, key in keys)


RULES: tuple[Rule, ...] = (
    Rule("independent", ("stages",), "each replica is a program of its own"),
    Rule("independent", ("tensor",), "jax takes callbacks only in programs without automatic axes"),
    Rule("independent", ("one hop",), "the replica all-reduce is not in the program"),
    Rule("independent", ("streaming",), "replicas meet between their programs"),
    Rule("independent", ("chosen interval",), "each replica would choose an interval by its own step times"),
    Rule("independent", ("early stopping",), "replicas agree on their last step before they validate"),
    Rule("early stopping", ("no validation",), "it counts the validations during a run"),
    Rule("independent", ("float16",), "its scale would depend on what the others found"),
    Rule("independent", ("other payload",), "a step's bits may not depend on who takes part"),
    Rule("independent", ("residuals",), "a lost replica's residual would be lost with it"),
    Rule("independent", ("several scopes",), "a replica is one partition group"),
    Rule("independent", ("several replicas",), "a process is one replica, or a part of one"),
    Rule("shares", ("one world",), "its step is one program"),
    Rule("quorum", ("one world",), "its replicas meet in one program"),
    Rule("grace window", ("no quorum",), "then a round waits for all workers"),
    Rule("float16", ("batch norm",), "the loss scale would follow the running averages, not the gradients"),
    Rule(
        "auto",
        (
            *("independent", "stages", "overlap", "experts", "flat", "one hop", "other gather", "float32 sums"),
            *(
                "compressed",
                "delayed",
                "local SGD",
                *(f"all_gather_{level}" for level in LEVELS),
                *CODED_SCATTERS,
                *DIFFERENCES,
            ),
        ),
        "XLA chooses the collectives",
    ),
    Rule("auto", ("pallas", "splash", "dropless"), "XLA cannot cut a kernel, and would gather all rows"),
    Rule("one hop", ("compressed", "delayed", "local SGD"), "there is no replica all-reduce once a step"),
    Rule("one hop", CODED_SCATTERS, "gradients are all-reduced, not reduce-scattered"),
    Rule("one hop", ("node gather",), "it leaves no group reduce-scatter to split into two levels"),
    Rule("layer gather", ("no remat",), "the backward pass would keep every gathered layer"),
    Rule("overlap", ("stages",), "the stages' loops over layers are not pipelined"),
    Rule("overlap", ("whole gather",), "all layers are gathered together"),
    Rule("overlap", ("unroll",), "layers that are written out are in no loop"),
    Rule("stages", ("one hop",), "every tick of the pipeline would all-reduce, idle ones too"),
    Rule("stages", ("delayed",), "the replica all-reduce begins when the pipeline is empty"),
    Rule("stages", ("streaming",), "no micro-step of one layer after the other is there for a part to travel next to"),
    Rule("stages", ("sample",), "sampling runs all layers on every device"),
    Rule("stages", ("no pieces",), "stages train the loss alone, and cut that stack"),
    Rule("context", ("tensor",), "XLA would gather all heads before it divides them"),
    Rule("context", ("sample",), "a sample begins with whole rows"),
    Rule("context", ("no pieces",), "between positions there is only the attention of that stack"),
    Rule("packing", ("cudnn",), "its kernel takes documents only as a mask of seq_len x seq_len values"),
    Rule("sinks", ("splash",), "models/splash.py passes no sinks to the kernel"),
    Rule("sinks", ("context",), "each device attends with a part of the heads but holds the sinks of all"),
    Rule("attention dropout", ("cudnn", "pallas", "splash"), "its kernel drops no weights"),
    Rule("tensor", ("undivided model",), "there is nothing to split"),
    Rule("tensor", ("dropless",), "XLA cannot cut the kernel of experts without a capacity"),
    Rule("experts", ("no experts",), "there is nothing to divide"),
    Rule("whole experts", tuple(f"experts_{level}" for level in LEVELS), "then no token is sent to an expert"),
    Rule("local SGD", ("shared rows",), "the devices of one row would drift apart"),
    Rule("local SGD", ("delayed", "replacing method"), "each replica has an optimizer of its own"),
    Rule("one scope", DIFFERENCES, "devices keep no more of the parameters than they update"),
    Rule("local SGD", DIFFERENCES, "each replica has all of its optimizer"),
    Rule("local SGD", ("several scopes",), "it needs a whole optimizer in each replica"),
    Rule(
        "no local SGD",
        ("streaming", "chosen interval", "quorum", "outer step's rate", "outer step's momentum"),
        "then nothing uses it",
    ),
    Rule("chosen interval", ("streaming",), "a part is exchanged in each step"),
    Rule("streaming", ("tensor",), "it cuts tensors into parts, and they are cut already"),
    Rule("streaming", ("whole method",), "it exchanges parts of tensors, and this method needs them whole"),
    Rule("replacing method", ("other optimizer",), "the method takes the place of one optimizer"),
    Rule("one_bit_adam", ("no warm-up",), "it needs its variances from a warm-up"),
    Rule("one_bit_adam", ("clipping",), "it averages momenta instead of gradients, so it cannot clip those"),
    Rule("one_bit_adam", ("wider optimizer",), "it needs them in the same scope"),
    Rule("warm-up", ("no user of a warm-up",), "then nothing uses it"),
    Rule("no feedback", ("keeping method",), "the method is built on what it has not sent yet"),
)


def complaint(values: Mapping[str, object]) -> str:
    """Returns the line of the first rule that a config breaks, its values and facts by name; "" if it breaks none."""
    return next((line for line in (rule.complaint(values) for rule in RULES) if line), "")


def refuse(values: Mapping[str, object]) -> None:
    """Raises ValueError for a config, its values and facts by name, that breaks a rule."""
    if line := complaint(values):
        raise ValueError(line)


def table() -> str:
    """Returns the rules as a Markdown table: a line for each first feature."""
    found: dict[str, dict[str, None]] = {}
    for one, other in (pair for rule in RULES for pair in rule.pairs):
        found.setdefault(one.shown, {})[other.shown] = None
    rows = [f"| {one} | {'; '.join(others)} |" for one, others in found.items()]
    return "\n".join(["| | does not go with |", "|---|---|", *rows])
