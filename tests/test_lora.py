"""Adapters on a frozen base: every strategy trains them like one device, and nothing else is updated or sent."""

import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import workload
from support.hugging_face_reference import FOLDER
from support.suite import SLOW, sampled
from support.tables import every_row
from support.workload import LORA

import models
from compression.codecs import Blockwise
from configs import fine_tune
from configs.schema import MODELS, Config, DecoderConfig
from models import chunked_loss
from sharding.coded import Codec, LevelCodecs
from sharding.frozen import part_frozen
from sharding.hlo import read_collectives
from sharding.spec import is_spec
from training.loss_scale import with_loss_scale

INT8 = Blockwise(bits=8, block=16)
ALL = dict(strategy="zero3")
GROUP = dict(strategy="mics", partition_size=4)
CASES = {
    "ddp": ("compute", dict(strategy="ddp")),
    "zero2": ("nf4", dict(strategy="zero2")),
    "zero3": ("int8", ALL),
    "zero3 overlap": ("nf4", dict(overlap=True, **ALL)),
    "mics4": ("nf4", GROUP),
    "mics4 overlap": ("compute", dict(overlap=True, **GROUP)),
    "mics4 node overlap": ("int8", dict(overlap=True, gather="node", **GROUP)),
    "mics4 step": ("int8", dict(gather="step", **GROUP)),
    "mics4 one hop": ("compute", dict(two_hop=False, **GROUP)),
    "hsdp tensor": ("nf4", dict(strategy="hsdp", tensor=2)),
    "zero3 auto": ("int8", dict(partitioner="auto", **ALL)),
    "stages": ("nf4", dict(strategy="hsdp", stages=2)),
    "scopes": ("compute", dict(parameters="node", gradients="node", optimizer="all")),
}


@pytest.mark.slow
@pytest.mark.parametrize(("base", "how"), sampled(CASES, "ddp", "zero3", "mics4 overlap"))
def test_losses_of_every_strategy_equal_a_single_device(base: str, how: dict) -> None:
    check_losses(base, how)


def check_losses(base: str, how: dict) -> None:
    """Trains adapters on a base, and compares the losses with one device's."""
    kind = LORA + base
    step, state, data = workload.compiled_step(kind, workload.plan(kind, **how))
    frozen = jax.tree.map(np.asarray, state.frozen)
    losses, state, _ = workload.run_steps(step, state, data, workload.NUM_STEPS)
    np.testing.assert_allclose(losses, workload.single_device_losses(kind), rtol=1e-5)
    assert losses[-1] < losses[0] - 0.01
    assert set(state.params) == {"layers"}
    jax.tree.map(np.testing.assert_array_equal, frozen, state.frozen)


@pytest.mark.parametrize(
    ("base", "codec"), [pytest.param("compute", None, marks=pytest.mark.slow), pytest.param("nf4", INT8, marks=SLOW)]
)
def test_adapters_alone_cross_nodes_and_the_base_travels_as_it_is_stored(base: str, codec: Codec | None) -> None:
    """Groups of a node: of formulas and of docs/concepts.md, in the compiled program; the rest are a few scalars.

    A codec of gathers encodes the adapters alone: a byte a value, and 4 for a block of 16.
    """
    kind, accumulation = LORA + base, 2
    sh = workload.plan(kind, strategy="hsdp", gather_codecs=LevelCodecs(intra=codec))
    step, _, _ = workload.compiled_step(kind, sh, accumulation=accumulation)
    payload, inter = Counter(), Counter()
    for c in read_collectives(step.as_text(), sh.layout.shape):
        payload[c.label, c.kind] += c.payload_bytes * c.times
        inter[c.label] += c.inter_bytes * c.times
    stored = {name: stored_bytes(group) for name, group in workload.specs(kind).items()}
    adapters = stored_bytes(part_frozen(workload.specs(kind)["layers"])[0])
    saved = adapters - adapters // 4 * (16 + 4) // 16 if codec else 0
    gathered = accumulation * (2 * (stored["layers"] - saved) + stored["embed"] + stored["head"])
    assert payload.pop(("gather", "all-gather")) == gathered
    assert payload.pop(("group_reduce_scatter", "reduce-scatter")) == accumulation * adapters
    assert payload.pop(("replica_all_reduce", "all-reduce")) == adapters // 2
    assert inter.pop("replica_all_reduce") == adapters // 2 * 2 * 3 / 4  # 2 (M / p) (R - 1) / R
    assert sum(payload.values()) < 500 and sum(inter.values()) < 500


@pytest.mark.slow
def test_float16_beside_what_else_a_decoder_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, capped scores, additional norms, a base in blocks: float32's losses within two of float16's roundings.

    As in tests/test_loss_scale.py; float32's losses are a single device's. The scale does not overflow. At the
    usual rate the loss rises again and any rounding grows.
    """
    monkeypatch.setitem(workload.SGD, "learning_rate", 0.1)
    gemma, found = workload.model(workload.GEMMA).config, {}
    section = dict(lora_rank=4, lora_base="nf4", hidden=64, intermediate=128, num_heads=8, num_kv_heads=8)
    for dtype in ("float16", "float32"):
        kind, built = LORA + dtype, models.build(replace(gemma, compute_dtype=dtype, **section))
        monkeypatch.setattr(workload, "model", lambda kind, num_layers=2, built=built: built)
        plan = workload.plan(kind, dtype=np.dtype(dtype), **GROUP)
        timing = with_loss_scale(workload.after_micro_steps(plan), 2.0**10)
        step = workload.compiled_step(kind, plan, timing=timing)
        found[dtype], _, metrics = workload.run_steps(*step, workload.NUM_STEPS)
        assert not int(metrics["skipped_steps"])
    np.testing.assert_allclose(found["float32"], workload.single_device_losses(kind), rtol=1e-5)
    np.testing.assert_allclose(found["float16"], found["float32"], rtol=2 * 2.0**-11)
    assert found["float32"][-1] < found["float32"][0] - 0.01 and np.any(found["float16"] != found["float32"])


@pytest.mark.slow
def test_a_loss_in_pieces_uses_what_was_gathered_for_the_micro_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "MOST_LOGITS", 200)
    check_losses("nf4", dict(gather="micro_step", **GROUP))


def stored_bytes(specs: Any) -> int:
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(specs, is_leaf=is_spec))


@every_row(
    ("changes", "words"),
    [
        (dict(lora_base="nf4"), "model.lora_rank = 0: model.lora_base needs a rank from 1 on"),
        (dict(lora_rank=2, lora_targets="query gates"), "one of query key value out gate up down has adapters, not"),
        (dict(lora_rank=2, lora_targets=""), "model.lora_targets = '': one of query key value out gate up down has"),
        (dict(lora_rank=2, lora_targets="gate", kind="encoder"), "one of query key value out up down has adapters"),
        (dict(lora_rank=-1), "model.lora_rank=-1 must be at least 0"),
    ],
)
def test_a_mistake_in_the_config_is_one_line(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as found:
        MODELS[changes.get("kind", "decoder")](**changes)
    assert "\n" not in str(found.value)


def test_configs_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a config with adapters may train all parameters
    config = fine_tune.get_config("llama_8b")
    config.model.lora_rank = 0
    found = Config.from_dict(config.to_dict()).model
    assert isinstance(found, DecoderConfig) and found.lora_alpha == 32

    # a folder may be named like a plan
    shutil.copytree(FOLDER / "llama", tmp_path / "llama_8b")
    monkeypatch.chdir(tmp_path)
    assert fine_tune.get_config("llama_8b").model.weights == "llama_8b"

    # a matrix that no blocks divide is refused
    narrow = models.build(DecoderConfig(lora_rank=2, lora_base="nf4", hidden=96, num_heads=4))
    with pytest.raises(ValueError, match="stores blocks of 64 columns, but "):
        narrow.param_specs()
