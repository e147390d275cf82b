"""Rows that devices share: every strategy trains them as one device does, and heads travel by the formula."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import running, suite, workload
from support.config_files import values_of
from support.suite import sampled
from support.tables import every_row
from support.workload import GEMMA, LORA, PACKED

from configs.schema import Config, flat, nested
from sharding.hlo import read_collectives
from sharding.scopes import make_layout

ALL = dict(strategy="zero3")
TWO = dict(context=2)
FOUR = dict(context=4, nodes=2, per_node=4)
GROUP = dict(strategy="mics", partition_size=4)
QUICK = {"zero3 windows packed": (GEMMA + PACKED, TWO | ALL)}
# without rotary positions: the encoder, whose rows of one document take their positions from a slice
SLOW = {
    "mics4 packed": ("encoder" + PACKED, dict(context=2, nodes=1, per_node=8, **GROUP)),
    "zero3 packed overlap": ("decoder" + PACKED, dict(overlap=True, **TWO, **ALL)),
    "hsdp": ("encoder", dict(strategy="hsdp", **FOUR)),
    "zero3": ("decoder", TWO | ALL),
    "ddp packed": ("decoder" + PACKED, dict(strategy="ddp", **TWO)),
    "zero2 packed": ("decoder" + PACKED, dict(strategy="zero2", **TWO)),
    "one hop packed": ("decoder" + PACKED, dict(two_hop=False, **TWO, **ALL)),
    "micro_step packed": ("decoder" + PACKED, dict(gather="micro_step", **TWO, **ALL)),
    "mics4 node overlap": ("decoder", dict(gather="node", overlap=True, **TWO, **GROUP)),
    "auto packed": ("decoder" + PACKED, dict(partitioner="auto", **TWO, **ALL)),
    "lora overlap": (LORA + "nf4", dict(overlap=True, **FOUR, **ALL)),
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(pytest.param(*case, id=name) for name, case in QUICK.items()),
        *(
            pytest.param(*case, id=name, marks=suite.SLOW if name == "mics4 packed" else pytest.mark.slow)
            for name, case in SLOW.items()
        ),
    ],
)
def test_losses_equal_a_single_device(kind: str, how: dict[str, Any]) -> None:
    found = workload.losses(kind, workload.plan(kind, **how))
    np.testing.assert_allclose(found, workload.single_device_losses(kind), rtol=1e-5)


@pytest.mark.parametrize("kind", ["decoder", pytest.param("encoder", marks=suite.SLOW)])
def test_heads_send_the_formula(kind: str) -> None:
    """Of docs/concepts.md, in the compiled program: `2 (N + K) H (c-1)/c` values a position of a layer, three times."""
    accumulation, shape = 2, dict(context=2, nodes=2, per_node=2)
    sh = workload.plan(kind, strategy="hsdp", **shape)
    step, _, _ = workload.compiled_step(kind, sh, accumulation=accumulation)
    model = workload.model(kind).config
    key_value_heads = model.num_kv_heads if kind == "decoder" else model.num_heads
    positions = workload.ROWS * workload.SEQ_LEN // 4  # of a device in a step
    values = 2 * (model.num_heads + key_value_heads) * model.head_size // 2
    sent = Counter()
    for c in read_collectives(step.as_text(), sh.layout.shape):
        if c.label == "context":
            assert c.axes == ("context",) and not c.inter_bytes
            sent[c.kind] += c.intra_bytes * c.times
    assert sent == {"all-to-all": 4 * 3 * model.num_layers * positions * values}


@every_row(
    ("changes", "words"),
    [
        ({"data.seq_len": 500}, "mesh.context=8 must divide data.seq_len=500 and model.num_kv_heads=8: "),
        ({"model.num_kv_heads": 4}, "and in attention the heads; set it to a divisor of 4"),
        ({"mesh.context": 3}, "mesh.context=3 must divide"),
    ],
)
def test_heads_or_positions_that_cannot_be_divided_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as found:
        Config.from_dict(nested(flat(values_of("configs/long_context.py:tiny")) | changes))
    assert "\n" not in str(found.value)


@every_row(
    ("how", "words"),
    [
        (dict(context=4, **ALL), "mesh.context=4 does not divide the 2 devices of a node; 1, 2 do"),
        (
            dict(context=4, strategy="mics", partition_size=2, per_node=8),
            "mesh.context=4 does not divide a scope of 2 devices; set mesh.context to one of 1, 2, or choose a larger",
        ),
        (
            dict(context=4, experts="2", per_node=8, **ALL),
            "mesh.context=4 does not divide a scope of 2 devices; set mesh.context to one of 1, 2, or choose a larger",
        ),
    ],
)
def test_a_context_that_does_not_fit_the_devices_is_refused(how: dict[str, Any], words: str) -> None:
    how = {"nodes": 4, "per_node": 2} | how
    sizes = dict(num_nodes=how.pop("nodes"), devices_per_node=how.pop("per_node"), context=how.pop("context"))
    with pytest.raises(ValueError, match=re.escape(words)):
        make_layout(*workload.strategy(**how), **sizes)


@pytest.mark.slow
@running.IGNORED
@pytest.mark.parametrize(("context", "devices"), sampled([(2, 2), (4, 2)], (4, 2)))
def test_processes_of_a_node_train_as_one(tmp_path: Path, context: int, devices: int) -> None:
    """Rows are shared inside a process, in two of one node; or by both, which then read the same rows."""
    how = dict(num_steps=2, sharding__strategy="zero3", sharding__partition_size=0, mesh__devices_per_node=0)
    how |= dict(model__num_heads=4, model__num_kv_heads=4, checkpoint__every=2)
    two = running.start_together(running.arguments(tmp_path / "two", **how, mesh__context=context), 2, devices)
    assert running.run_here(*running.arguments(tmp_path / "one", **how)) == 0
    finished = running.finish(*two)
    assert [code for code, *_ in finished] == [0, 0], finished
    np.testing.assert_allclose(running.losses(tmp_path / "two"), running.losses(tmp_path / "one"), rtol=1e-5)


@pytest.mark.slow
@running.IGNORED
def test_a_run_goes_on_with_another_context(tmp_path: Path) -> None:
    """From checkpoints; validation is that of one device too, and rows that fill up count nowhere."""
    how = dict(sharding__strategy="zero3", sharding__partition_size=0, mesh__devices_per_node=0, batch__global_size=15)
    how |= dict(model__num_heads=4, model__num_kv_heads=4, eval__every=2)
    process = running.start(running.arguments(tmp_path / "one", **how, mesh__num_cpu_devices=1))
    for context, step in ((4, 3), (2, 6), (1, 10)):
        hooks = [running.stop_after(step)] if step < 10 else []
        args = running.arguments(tmp_path / "shared", **how, mesh__context=context)
        assert running.run_here(*args, hooks=hooks) == (75 if hooks else 0)
    ((code, _, err),) = running.finish(process)
    assert code == 0, err
    of = [
        [row[key] for row in running.rows(tmp_path / run) for key in ("loss", "validation_loss") if key in row]
        for run in ("one", "shared")
    ]
    assert len(of[0]) == 15
    np.testing.assert_allclose(*of, rtol=1e-5)


@running.IGNORED
@pytest.mark.release
def test_an_independent_replica_may_have_a_context(tmp_path: Path) -> None:
    """Its losses are those of a replica whose devices have whole rows."""
    changes = {
        "sharding__replicas": "independent",
        "sharding__strategy": "zero3",
        "sharding__partition_size": 0,
        "sharding__shares": 2,
        "mesh__num_cpu_devices": 4,
        "mesh__devices_per_node": 4,
    }
    found = []
    for context in (1, 2):
        args = running.arguments(tmp_path / str(context), mesh__context=context, **changes)
        ((code, _, error),) = running.finish(running.start([*args, "--group=0"]))
        assert code == 0, error
        found.append(running.losses(tmp_path / str(context) / "replicas" / "0"))
    np.testing.assert_allclose(*found, rtol=1e-5)
