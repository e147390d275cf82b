"""Attention as one kernel: equal to XLA's own, alone and in the train step of strategies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from three_steps import SMALL, STEPS, losses

from configs import base, quickstart
from models.flash import flash_attention
from training.experiment import make_experiment

ENDS = [[40, 128], [70, 71]]  # of each row's first two documents


@pytest.mark.parametrize("length", [16, 128])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_are_those_of_xla(causal: bool, documents: bool, length: int) -> None:
    """In one block and in several; two heads of the queries share each of the keys'."""
    q, k, v, weights = (
        jax.random.normal(key, (2, length, heads, 16))
        for key, heads in zip(jax.random.split(jax.random.key(0), 4), (4, 2, 2, 4), strict=True)
    )
    segments = (jnp.arange(length)[None, None] >= jnp.array(ENDS)[:, :, None]).sum(1).astype(jnp.float32)
    same = (segments[:, :, None] == segments[:, None])[:, None] if documents else None

    def xla(q: Any, k: Any, v: Any) -> Any:
        out = jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=causal, implementation="xla")
        return (out * weights).sum(), out

    def ours(q: Any, k: Any, v: Any) -> Any:
        out = flash_attention(q, k, v, segments if documents else None, causal)
        return (out * weights).sum(), out

    wanted, found = (jax.grad(f, (0, 1, 2), has_aux=True)(q, k, v) for f in (xla, ours))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STEPS)
def test_steps_have_the_losses_of_xla(strategy: str) -> None:
    wanted, found = (losses(STEPS[strategy] | {"model.attention": name}) for name in ("xla", "pallas"))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


PACKED = {"data.packing": "documents", "data.source": "stdlib_text"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "cudnn"),
        (PACKED, "pallas"),
        (PACKED | {"data.seq_len": 96}, "xla"),  # no rows that it takes
        ({"model.compute_dtype": "float32"}, "xla"),
    ],
)
def test_auto_is_a_fused_kernel_on_gpus(
    changes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quickstart.get_config()
    config.update_from_flattened_dict(SMALL | {"model.compute_dtype": "bfloat16"} | changes)
    assert make_experiment(base.typed(config)).model.config.attention == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert make_experiment(base.typed(config)).model.config.attention == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.seq_len": 96}, "data.seq_len=96: model.attention=pallas needs 16, 32 or a multiple of 64"),
        ({"model.hidden": 96}, "model.hidden / num_heads = 24: attention = 'pallas' needs a power of two from 16 on"),
    ],
)
def test_sizes_that_the_kernel_cannot_have_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        losses(changes | {"model.attention": "pallas"})
    assert str(caught.value) == message
