"""Every pair of features: either its rule refuses it in one line, or its step can be built."""

import re
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

import jax
import pytest
from support.examples import example_methods  # noqa: F401 (fixture)
from support.four_nodes import BASE, config, of_kind
from support.running import ROOT

from configs.schema import DecoderConfig, flat, may_change
from configs.schema.codecs import CODED
from configs.schema.combinations import FEATURES, RULES, Facts, table
from configs.schema.model import REMAT
from configs.schema.own import OWN
from models import Decoder, chunked_loss
from training.experiment import make_experiment
from training.gradient_units import GradientUnits
from training.round_units import RoundUnits

pytestmark = pytest.mark.usefixtures("example_methods")  # they have features that no built-in choice has

STRATEGY = {"sharding.partition_size": 0, "sharding.strategy": "zero3"}
ZERO1 = {"sharding.partition_size": 0, "sharding.strategy": "zero1"}
ONE_BIT_ADAM = {"compression.all_reduce": "one_bit_adam", "compression.warmup_steps": 1}
LOCAL = {"local_sgd.inner_steps": 5}
SPLIT = {"mesh.tensor": 2, "mesh.devices_per_node": 4, "sharding.partition_size": 4, "sharding.strategy": "mics"}
# a config that has the feature; its values take precedence over values that a choice also needs
EXAMPLES: dict[str, dict[str, Any]] = {
    "independent": {"sharding.replicas": "independent"} | STRATEGY,
    "early stopping": {"eval.patience": 2},
    "no validation": {"eval.every": 0},
    "shares": {"sharding.shares": 2},
    "one world": {"sharding.replicas": "one_world"},
    "float16": {"model.compute_dtype": "float16"},
    "batch norm": {"model.norm": "batch", "model.norm_rows": 2, "model.kind": "resnet"},
    "residuals": {"compression.all_reduce": "int8", "compression.error_feedback": True},
    "no feedback": {"compression.error_feedback": False},
    "keeping method": ONE_BIT_ADAM,
    "other payload": {"compression.all_reduce": "statistical"},
    "several replicas": {"sharding.partition_size": 2, "sharding.strategy": "mics"},
    "stages": {"mesh.stages": 2},
    "context": {"mesh.context": 2},
    "tensor": SPLIT,
    "auto": {"ablation.partitioner": "auto"},
    "overlap": {"sharding.overlap": "on"},
    "one hop": {"ablation.two_hop": False},
    "flat": {"ablation.hierarchical": False},
    "float32 sums": {"sharding.reduce_dtype": "float32"},
    "experts": {"sharding.experts": "node", "model.kind": "moe"},
    "dropless": {"model.kind": "moe", "model.capacity_factor": 0.0},
    "other gather": {"sharding.gather": "step"},
    "node gather": {"sharding.gather": "node"},
    "whole gather": {"sharding.gather": "micro_step"},
    "layer gather": {"sharding.gather": "layer"},
    "no remat": {"model.remat": "none"},
    "unroll": {"model.unroll": True, "model.remat": "dots"},
    "packing": {"data.packing": "documents"},
    "cudnn": {"model.attention": "cudnn", "model.compute_dtype": "bfloat16"},
    "pallas": {"model.attention": "pallas", "model.num_heads": 2, "model.num_kv_heads": 2},
    "splash": {"model.attention": "splash", "data.seq_len": 128, "model.max_len": 128},
    "sinks": {"model.attention_sinks": True},
    "attention dropout": {"model.attention_dropout": 0.5},
    "sample": {"sample.length": 4},
    "delayed": {"compression.delayed": True},
    "local SGD": LOCAL,
    "no local SGD": {"local_sgd.inner_steps": 0},
    "streaming": LOCAL | {"local_sgd.streaming": True},
    "chosen interval": LOCAL | {"local_sgd.interval": "utilisation"},
    "quorum": LOCAL | STRATEGY | {"sharding.replicas": "independent", "local_sgd.quorum": 2},
    "no quorum": {"local_sgd.quorum": 0},
    "grace window": {"local_sgd.grace_s": 2.0},
    "clipping": {"optimizer.clip_norm": 1.0},
    "warm-up": ONE_BIT_ADAM,
    "no user of a warm-up": {"compression.all_reduce": "int8"},
    "no warm-up": {"compression.warmup_steps": 0},
    "one_bit_adam": ONE_BIT_ADAM,
    "outer step's rate": LOCAL | {"local_sgd.outer_learning_rate": 0.5},
    "outer step's momentum": LOCAL | {"local_sgd.outer_momentum": 0.5},
    "replacing method": ONE_BIT_ADAM,
    "whole method": {"compression.all_reduce": "power_sgd"},
    "other optimizer": {"optimizer.name": "lamb"},
    "compressed": {"compression.all_reduce": "int8"},
    "shared rows": {"mesh.context": 2, "sharding.partition_size": 1},
    "whole experts": {"sharding.experts": "none"},
    "several scopes": ZERO1,
    "wider optimizer": ZERO1,
    "undivided model": {"model.kind": "resnet"},
    "no experts": {"model.kind": "decoder"},
    "no pieces": {"model.kind": "moe"},
    "all_gather_inter": {"compression.all_gather_inter": "int8", "sharding.partition_size": 4},
    "all_gather_intra": {"compression.all_gather_intra": "int8"},
    "reduce_scatter_inter": {"compression.reduce_scatter_inter": "int8", "sharding.partition_size": 4},
    "reduce_scatter_intra": {"compression.reduce_scatter_intra": "int8"},
    "one scope": {"sharding.partition_size": 0, "sharding.strategy": "hsdp"},
    "weight_differences_inter": {"compression.weight_differences_inter": "int8"} | ZERO1,
    "weight_differences_intra": {"compression.weight_differences_intra": "int8"} | ZERO1,
    "experts_inter": {"compression.experts_inter": "int8", "model.kind": "moe", "sharding.experts": "all"} | STRATEGY,
    "experts_intra": {"compression.experts_intra": "int8", "model.kind": "moe", "sharding.experts": "node"},
}


RULED = {(rule.one, other): rule for rule in RULES for other in rule.others}
ALL = EXAMPLES | {"adapters": {"model.lora_rank": 2}}  # which no rule names
ALIKE = {
    *(key for key in CODED if key.endswith("_intra")),
    "clipping",
    "flat",
    "float32 sums",
    "sample",
    "cudnn",
    "layer gather",
}
ALIKE |= {"warm-up", "outer step's rate", "outer step's momentum", "grace window"}
DISTINCT = {
    str(sorted(changes.items())): name
    for name, changes in ALL.items()
    if name not in ALIKE and not name.startswith("no ")
}
PAIRS = [
    pair
    for pair in combinations(DISTINCT.values(), 2)
    if all(ALL[pair[0]].get(key, value) == value for key, value in ALL[pair[1]].items())
]

SIZES = (
    "must lie within the scope",
    "does not divide the 1 node",
    "images are not documents",
)  # keys that examples made for other pairs lack


def error_of(changes: dict[str, Any]) -> str:
    """The error that refuses a config, as a config or when its experiment is built; "" if it is valid."""
    try:
        make_experiment(config(changes))
    except ValueError as error:
        return str(error)
    return ""


def test_every_feature_has_an_example() -> None:
    assert EXAMPLES.keys() == FEATURES.keys()
    assert {name for pair in RULED for name in pair} == FEATURES.keys()
    assert len(RULED) == len({frozenset(pair) for pair in RULED})


def together(one: str, other: str) -> dict[str, Any]:
    """A config that has both features of a rule; a feature that is the lack of something wins."""
    lacks = one in ("no local SGD", "whole experts", "one scope")
    return EXAMPLES[other] | EXAMPLES[one] if lacks else EXAMPLES[one] | EXAMPLES[other]


def problem_of(one: str, other: str) -> str:
    """What is wrong with the error of the two examples of a rule; "" for nothing."""
    rule, changes = RULED[one, other], together(one, other)
    error = error_of(changes)
    if f": {rule.why}; " not in error or "\n" in error or "{" in error:
        return f"not its line: {error!r}"
    for feature in (FEATURES[one], FEATURES[other]):
        key = feature.keys[0]
        for part in (feature.said or f"{key}={config_value(key, changes)}", feature.instead.partition("{")[0]):
            if part not in error:
                return f"{part!r} is not in {error!r}"
    return ""


def test_a_pair_that_a_rule_names_is_refused_in_its_line() -> None:
    problems = {pair: problem for pair in RULED if (problem := problem_of(*pair))}
    assert not problems


def test_every_refusal_that_the_page_promises_has_its_rule() -> None:
    """No other check refuses these pairs: without its rule, one would train something else and say nothing."""
    assert table() in (ROOT / "docs" / "config.md").read_text()


def config_value(key: str, changes: dict[str, Any]) -> Any:
    """The value of a key in the config with these changes; None if its kind of model has no such key."""
    kind = changes.get("model.kind", "decoder")
    return changes.get(key, BASE.get(key, flat(of_kind(kind).to_dict()).get(key)))


def begins(pair: tuple[str, str], changes: dict[str, Any]) -> str:
    """How the line of a rule begins for the config with these changes."""
    features = [FEATURES[name] for name in pair]
    one, other = (f.said or f"{f.keys[0]}={config_value(f.keys[0], changes)}" for f in features)
    return f"{one} does not go with {other}: {RULED[pair].why}; "


def build(changes: dict[str, Any]) -> None:
    """Lowers a step: all that runs before XLA compiles it."""
    experiment = make_experiment(config(changes))
    if experiment.config.sharding.replicas == "independent":
        assert (RoundUnits if experiment.config.local_sgd.inner_steps else GradientUnits)(experiment).unit_layout
    elif changes.get("model.attention") == "splash":  # it has no code for CPUs
        traced = jax.jit(experiment.train_step).trace(experiment.state_shapes, experiment.batches.shapes)
        traced.lower(lowering_platforms=("tpu",))
    else:
        experiment.lower_train_step()


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of 16 positions and 256 ids in four pieces."""
    monkeypatch.setattr(chunked_loss, "MOST_LOGITS", 2 * 4 * 256)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", [pytest.param(p, id=" x ".join(p), marks=[pytest.mark.slow] * (i % 20 > 0)) for i, p in enumerate(PAIRS)]
)
@pytest.mark.usefixtures("in_pieces")
def test_a_pair_is_refused_by_its_own_rule_or_its_step_can_be_built(pair: tuple[str, str]) -> None:
    """By this rule, or by an earlier rule about another feature of the examples."""
    changes = ALL[pair[0]] | ALL[pair[1]]
    own = [i for i, ruled in enumerate(RULED) if {*ruled} == {*pair}]
    if error := error_of(changes):
        by = next((i for i, ruled in enumerate(RULED) if error.startswith(begins(ruled, changes))), len(RULED))
        assert by <= own[0] if own else by < len(RULED) or any(words in error for words in SIZES), error
        return
    assert not own
    build(changes)


GROUPS = {"sharding.strategy": "hsdp", "sharding.partition_size": 0}
DIVIDED: dict[str, dict[str, Any]] = {  # the ways to divide a model, and adapters
    "stages": {"mesh.stages": 2} | GROUPS,
    "context": {"mesh.context": 2} | GROUPS,
    "tensor": {"mesh.tensor": 2} | GROUPS,
    "experts": {"model.kind": "moe", "sharding.experts": "node"} | GROUPS,
    "adapters": {"model.lora_rank": 2},
}
REFUSED = {("stages", "experts"), ("context", "tensor"), ("context", "experts"), ("experts", "adapters")}


@pytest.mark.slow
@pytest.mark.usefixtures("in_pieces")
def test_every_pair_of_divisions_can_be_built_with_a_loss_in_pieces() -> None:
    """The closure of a loss in pieces is not traced in a stage, with adapters, and so on."""
    problems = {}
    for pair in combinations(DIVIDED, 2):
        changes = DIVIDED[pair[0]] | DIVIDED[pair[1]]
        if error := error_of(changes):
            problems |= {pair: error} if pair not in REFUSED else {}
            continue
        try:
            build(changes)
        except Exception as error:
            problems[pair] = repr(error)
    assert not problems


def keys_advised(error: str) -> list[str]:
    """The keys of the remedies of an error that are for resumed runs too."""
    remedies = re.split(r"; |, or ", error)[1:]
    return [
        key for remedy in remedies if "in a new run" not in remedy for key in re.findall(r"\b[a-z]+\.[a-z_]+", remedy)
    ]


def test_a_rule_about_devices_advises_only_keys_that_a_resumed_run_may_change() -> None:
    """The config may not change with the number of nodes, and yet breaks no rule on another number of them."""
    facts = {"has_replicas", "replicas_share_rows", "parameters_are_cut", "in_one_scope", "optimizer_like_gradients"}
    assert facts == {field.name for field in fields(Facts) if not field.name.startswith(("model_", "takes", "goes"))}
    refused: dict[str, list[str]] = {}
    for one, other in RULED:
        if facts.isdisjoint((*FEATURES[one].keys, *FEATURES[other].keys)):
            continue
        keys = keys_advised(error_of(together(one, other)))
        if not keys or not all(map(may_change, keys)):
            refused[f"{one} x {other}"] = keys
    assert not refused


@dataclass(frozen=True)
class FakeDevice:
    """A device that is only counted."""

    id: int
    process_index: int = 0
    platform: str = "cpu"


NODES: list[tuple[dict[str, Any], int]] = [  # configs that run on 4 nodes of 2, and the devices on which they do not
    (LOCAL | {"batch.global_size": 8}, 32),
    ({"mesh.stages": 2, "model.num_layers": 2}, 6),
    ({"sharding.partition_size": 4}, 6),
    ({"model.kind": "moe", "sharding.experts": "all"} | STRATEGY, 6),
    ({"sharding.replicas": "independent", "batch.global_size": 20} | STRATEGY, 6),
    ({"mesh.tensor": 2, "mesh.devices_per_node": 4, "sharding.partition_size": 4}, 3),
]


def test_no_error_about_other_devices_advises_a_key_that_a_resumed_run_refuses() -> None:
    problems = []
    for changes, devices in NODES:
        mesh = {} if devices <= 8 else {"mesh.devices_per_node": 1, "sharding.partition_size": 1}
        with pytest.raises(ValueError) as error:
            make_experiment(config(changes | mesh), [FakeDevice(i) for i in range(devices)])
        if not all(map(may_change, keys_advised(str(error.value)))):
            problems.append(str(error.value))
    assert not problems


def test_one_line_names_what_would_do() -> None:
    assert error_of({"compression.delayed": True, "local_sgd.inner_steps": 2}) == (
        "local_sgd.inner_steps=2 does not go with compression.delayed=True: each replica has an optimizer of its own; "
        "set local_sgd.inner_steps=0, or set compression.delayed=False"
    )
    assert error_of(ONE_BIT_ADAM | {"optimizer.name": "sgd"}) == (
        "compression.all_reduce=one_bit_adam does not go with optimizer.name=sgd: the method takes the place of one "
        "optimizer; set compression.all_reduce=none or a codec, or set optimizer.name=adamw"
    )
    assert error_of({"local_sgd.inner_steps": 3, "num_steps": 11}).startswith("num_steps=11 must be a multiple of")
    advised = re.findall(r"model\.remat=(\w+), (\w+), (\w+) or (\w+) \(", error_of({"model.remat": "none"}))[0]
    assert {*advised, "none"} == {*REMAT} and not any(error_of({"model.remat": remat}) for remat in advised)


def test_what_is_registered_may_use_every_key_of_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec gets the section for any collective, and a method of the replica all-reduce too."""
    unused = {"compression.warmup_steps": 1}
    monkeypatch.setitem(OWN["codec"], "mine", None)
    monkeypatch.setitem(OWN["all_reduce"], "my_method", None)
    for keys in (
        {"all_reduce": "mine"},
        {"all_reduce": "my_method"},
        {"all_gather_intra": "mine"},
        {"reduce_scatter_inter": "mine"},
    ):
        assert config(unused | {f"compression.{key}": name for key, name in keys.items()})
    with pytest.raises(ValueError, match="^compression.warmup_steps=1 .*=none: then nothing uses it; "):
        config(unused)


def test_a_model_with_an_objective_of_its_own_has_no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages would train its loss alone, and say nothing."""

    class WithPenalty(Decoder):
        config: DecoderConfig

        def objective(self, params: Any, batch: Any, gather: Any) -> Any:
            return 2 * self.loss(params, batch, gather), {}

    monkeypatch.setitem(OWN["model"], "penalised", WithPenalty)
    assert "stages train the loss alone" in error_of({"mesh.stages": 2, "model.kind": "penalised"})
