"""Candidates of a plan: strategies by name, keys of the config, and what is known of each before it is compiled."""

from typing import Any

import pytest
from support.examples import example_methods  # noqa: F401 (fixture)
from support.planning import experiment, machine, own_cache, small  # noqa: F401 (fixture)
from support.running import IGNORED
from support.suite import sampled
from support.tables import every_row

from planner import clusters
from planner.bounds import SLACK, bounds, traffic, traffic_by_use
from planner.candidates import all_candidates, of_config, of_strategies
from planner.predict import compiled_step
from training.experiment import make_experiment

pytestmark = [IGNORED, pytest.mark.usefixtures("example_methods")]


def test_strategies_by_name() -> None:
    config = small()
    assert [c.name for c in of_strategies(["mics(4)", "zero3", "hsdp"], config)] == ["mics(4)", "zero3", "hsdp"]
    coded = (
        "zero3+reduce_scatter_inter=int8+all_gather_intra=bf16",
        "mics(4)+all_reduce=int8",
        "custom+gradients=16+optimizer=all",
    )
    assert [c.words for c in of_strategies(coded, config)] == [
        "zero3, group reduce-scatter between nodes in int8, gathers inside nodes in bf16",
        "mics(4), replica all-reduce in int8",
        "custom, gradients over 16 devices, optimizer over all devices",
    ]
    coded = small(compression__all_reduce="int8", compression__all_gather_intra="bf16")
    names = [
        "zero3+all_reduce=int8+all_gather_intra=bf16",
        "ddp+all_reduce=int4+all_gather_intra=bf16",
        "hsdp+all_gather_intra=bf16",
    ]
    assert [c.name for c in of_strategies(["zero3", "ddp+all_reduce=int4", "hsdp+all_reduce=none"], coded)] == names
    assert all(of_config(one).applied(one) == one for one in (config, coded))
    for wrong in ("mics", "zero3(4)", "fsdp", "mics(x)"):
        with pytest.raises(ValueError, match=f"strategy={wrong}".replace("(", r"\(").replace(")", r"\)")):
            of_strategies([wrong], config)


@every_row("name", ["mics(2)+optimizer=all", "mics(2)+delayed=True", "mics(2)+inner_steps=10", "zero3+remat=dots"])
def test_extras_are_keys_of_the_config(name: str) -> None:
    (candidate,) = of_strategies([name], small())
    config = candidate.applied(small())
    assert candidate.name == name and experiment(candidate).config == config
    scopes = [getattr(config.sharding, scope) for scope in ("parameters", "gradients", "optimizer")]
    found = {
        "mics(2)+optimizer=all": config.sharding.strategy == "custom" and [*map(str, scopes)] == ["2", "2", "all"],
        "mics(2)+delayed=True": config.compression.delayed,
        "mics(2)+inner_steps=10": config.local_sgd.inner_steps == 10 and config.local_sgd.outer_momentum == 0,
        "zero3+remat=dots": config.model.remat == "dots",
    }
    assert [one for one, holds in found.items() if holds] == [name]


@every_row(
    ("keys", "extra", "key", "value"),
    [
        ({"all_reduce": "power_sgd", "warmup_steps": 5}, "all_reduce=int8", "compression.warmup_steps", 0),
        ({}, "inner_steps=0", "local_sgd.outer_learning_rate", 0.7),
        ({}, "inner_steps=0", "local_sgd.outer_momentum", 0.9),
        ({}, "inner_steps=0", "local_sgd.streaming", False),
    ],
)
def test_a_candidate_leaves_out_what_only_the_configs_own_method_uses(
    keys: dict[str, Any], extra: str, key: str, value: Any
) -> None:
    """Such keys would be refused beside another method, or without local SGD."""
    local = {"inner_steps": 5, "outer_learning_rate": 0.5, "outer_momentum": 0.6, "streaming": True}
    local = {} if keys else {f"local_sgd__{name}": own for name, own in local.items()}
    config = small(**local, **{f"compression__{name}": own for name, own in keys.items()})
    (candidate,) = of_strategies([f"mics(2)+{extra}"], config)
    assert candidate.applied(config).values[key] == value


def test_every_program_is_a_candidate_once() -> None:
    found = [*all_candidates(small(), 4, 2)]
    assert len(set(found)) == len(found)
    assert {c.name for c in found} == {"ddp", "zero1", "zero2", "zero3", "mics(2)", "mics(4)"}
    assert {c.micro_size for c in found} == {1, 2}  # 16 rows on 8 devices
    assert {c.name for c in found if c.gather == "node"} == {"zero3", "mics(4)"}
    for candidate in found:
        experiment(candidate)  # all of these are legal


def test_heads_of_shared_rows_are_traffic_inside_a_node() -> None:
    """By docs/concepts.md; 4 layers, 4 heads and 2 key-value heads of 8 float32 values."""
    heads = dict(model__num_heads=4, model__num_kv_heads=2, model__hidden=32)
    config = small(mesh__context=2, data__seq_len=32, batch__global_size=8, batch__micro_size=1, **heads)
    here = make_experiment(config)
    assert here.batches.accumulation == 2  # of 4 rows, one for each two of 8 devices
    assert traffic_by_use(here)["context"] == {"inter": 0, "intra": 3 * 4 * 2 * (32 / 2) * 2 * (4 + 2) * 8 / 2 * 4}


def test_bounds_are_of_the_rows_that_a_device_has() -> None:
    """36 rows on 8 devices are two micro-steps of 3."""
    most, same = (make_experiment(small(batch__global_size=36, batch__micro_size=size)) for size in (4, 3))
    assert bounds(most, clusters.EMULATED) == bounds(same, clusters.EMULATED)


@every_row(("mesh", "sizes"), [({}, {2, 4}), ({"mesh__context": 4}, {4}), ({"mesh__context": 2}, {2, 4})])
def test_groups_have_all_devices_of_a_row(mesh: dict[str, Any], sizes: Any) -> None:
    config = small(model__num_heads=4, model__num_kv_heads=4, **mesh)
    assert {c.partition_size for c in all_candidates(config, 2, 4) if c.strategy == "mics"} == sizes


BOUNDED = ["ddp", "zero1", "zero2", "zero3", "mics(2)", "mics(4)", "mics(2)+all_reduce=int8", "mics(2)+delayed=True"]
BOUNDED += ["zero3+all_gather_inter=int4+reduce_scatter_inter=int4", "mics(2)+inner_steps=10", "mics(2)+optimizer=all"]
BOUNDED += ["zero3+remat=dots", "zero1+weight_differences_inter=int4", "zero2+weight_differences_intra=int8"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(BOUNDED, "ddp", "zero3", "mics(2)"))
def test_bounds_are_bounds(name: str) -> None:
    """Against the compiled program: what is sent, what is kept and how long a step takes."""
    (candidate,) = of_strategies([name], small())
    here = experiment(candidate)
    least = bounds(here, clusters.EMULATED)
    compiled = compiled_step(candidate, here, machine())
    prediction = compiled.prediction()
    assert least.least_s <= SLACK * prediction.step_s
    assert least.least_bytes <= prediction.memory.total
    sent = traffic(here)
    for level, real in (("inter", prediction.inter_bytes), ("intra", prediction.intra_bytes)):
        assert candidate.change or 0.6 * real <= sent[level], level
        assert sent[level] <= SLACK * real, level
    assert prediction.memory.total == compiled.compiled.peak_bytes
