"""A row of several documents: each is to the model what it is alone, in every style and under every strategy."""

from typing import Any

import jax
import numpy as np
import pytest
from support import workload
from support.numpy_models import STYLES, small
from support.overlapping import losses as losses_overlapped
from support.suite import SLOW, sampled
from support.workload import STRATEGIES

import models

ROWS = [(4, 1, 4), (1, 4, 4), (4, 4, 1)]  # lengths of the documents of each row
CASES = [
    ("decoder", STYLES["gpt2"]),
    ("decoder", STYLES["llama_grouped"]),
    ("decoder", workload.FLAGS),
    ("encoder", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "style"), CASES)
def test_documents_of_a_row_are_as_alone(kind: str, style: dict[str, Any]) -> None:
    """Logits, loss and gradients, against runs of the model on each document by itself."""
    model = small(kind, **style)
    assert isinstance(model, models.Decoder | models.Encoder)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(0.1, 0.4, s.shape).astype(np.float32), model.param_specs())
    tokens, targets = rng.integers(0, 11, (2, 3, 9), dtype=np.int32)
    weights = rng.uniform(0, 2, (3, 9)).astype(np.float32)
    segments = np.stack([np.repeat(np.arange(len(row)), row) for row in ROWS]).astype(np.int32)
    batch: Any = {"tokens": tokens, "targets": targets, "weights": weights, "segments": segments}
    cuts = [(r, slice(sum(row[:d]), sum(row[: d + 1]))) for r, row in enumerate(ROWS) for d in range(len(row))]

    @jax.jit
    def alone(p: Any, rows: Any) -> Any:
        logits = model.logits(p, rows["tokens"], workload.whole)
        return logits, jax.value_and_grad(model.loss)(p, rows, workload.whole)

    @jax.jit
    def together(p: Any) -> Any:
        logits = model.logits(p, tokens, workload.whole, segments)
        return logits, jax.value_and_grad(model.loss)(p, batch, workload.whole)

    packed, found = together(params)
    wanted = jax.tree.map(np.zeros_like, found)
    for r, cut in cuts:
        logits, result = alone(params, {name: x[r, cut][None] for name, x in batch.items() if name != "segments"})
        np.testing.assert_allclose(packed[r, cut], logits[0], rtol=1e-5, atol=1e-5)
        wanted = jax.tree.map(np.add, wanted, result)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, wanted)
    unpacked = jax.jit(lambda p: model.loss(p, {n: x for n, x in batch.items() if n != "segments"}, workload.whole))(
        params
    )
    assert abs(float(unpacked) - float(found[0])) > 1e-2


GROUP = dict(strategy="mics", partition_size=4)
LAYOUTS = [
    pytest.param("decoder", STRATEGIES["hsdp"], marks=SLOW),
    pytest.param("decoder", GROUP | dict(tensor=2), marks=SLOW),
    pytest.param("decoder", STRATEGIES["none-node-4"], marks=SLOW),
    pytest.param("encoder", STRATEGIES["mics4"], marks=SLOW),
    pytest.param(workload.GEMMA, GROUP | dict(tensor=2), marks=SLOW),
    pytest.param("decoder", GROUP | dict(partitioner="auto"), marks=pytest.mark.slow),
    pytest.param(workload.GEMMA, GROUP | dict(partitioner="auto"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "how"), LAYOUTS)
def test_layouts_have_the_losses_of_a_single_device(kind: str, how: dict[str, Any]) -> None:
    got = workload.losses(kind + workload.PACKED, workload.plan(kind + workload.PACKED, **how))
    np.testing.assert_allclose(got, workload.single_device_losses(kind + workload.PACKED), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(["decoder", "encoder", workload.GEMMA], "decoder"))
def test_pipelined_loops_too(kind: str) -> None:
    got = losses_overlapped(kind + workload.PACKED, "mics(2)", 2)
    np.testing.assert_allclose(got, workload.single_device_losses(kind + workload.PACKED), rtol=1e-5)


@pytest.mark.slow
def test_the_oracle_sees_the_documents() -> None:
    one, other = (workload.single_device_losses(f"decoder{suffix}") for suffix in ("", workload.PACKED))
    assert np.abs(one - other).max() > 1e-4
