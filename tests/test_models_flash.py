"""Attention as one kernel: equal to XLA's own, alone and in the train step of every strategy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.suite import SLOW
from support.tables import check_rows, every_row
from support.three_steps import OTHERS, SMALL, STEPS, TENSOR, assert_equal_steps, three_steps
from support.workload import FLAGS

from configs import base, quickstart
from models.flash import flash_attention
from models.remat import CUDNN, rematerialise
from training.experiment import make_experiment

ENDS = [[40, 128], [70, 71]]  # of each row's first two documents

PLAIN = [(causal, 0, 0.0, documents, n) for causal in (False, True) for documents in (False, True) for n in (16, 128)]
QUICK = [(False, 0, 0.0, False, 16), (True, 64, 0.5, True, 192, np.array([0.5, -1.0, 2.0, 0.0]))]
SCORES = [
    (True, 1, 0.0, False, 128),
    (True, 64, 0.5, True, 192),
    (True, 70, 0.0, False, 192),
    (True, 5, 0.5, False, 16),
]


@pytest.mark.parametrize("rows", [QUICK, pytest.param([*PLAIN, *SCORES], marks=SLOW)], ids=["few", "all"])
def test_values_and_gradients_are_those_of_xla(rows: list[Any]) -> None:
    """In one block and in several; two heads of the queries share each of the keys'."""
    check_rows(rows, check_equal_to_xla)


def check_equal_to_xla(causal: bool, window: int, cap: float, documents: bool, length: int, sinks: Any = None) -> None:
    """A sink is a column of scores without values."""
    q, k, v, weights = (
        jax.random.normal(key, (2, length, heads, 16))
        for key, heads in zip(jax.random.split(jax.random.key(0), 4), (4, 2, 2, 4), strict=True)
    )
    segments = (jnp.arange(length)[None, None] >= jnp.array(ENDS)[:, :, None]).sum(1).astype(jnp.float32)
    distance = np.subtract.outer(np.arange(length), np.arange(length))
    seen = np.ones((2, 1, length, length), bool) & (distance >= 0 if causal else True)
    seen &= distance < window if window else True
    seen &= np.equal(segments[:, :, None], segments[:, None])[:, None] if documents else True

    def xla(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
        scores = cap * jnp.tanh(scores / cap) if cap else scores
        scores = jnp.where(seen, scores, -np.inf)
        if sinks is not None:
            columns = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, columns], axis=-1)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores)[..., :length], v)
        return (out * weights).sum(), out

    def ours(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        within = jnp.float32(window) if window else None
        out = flash_attention(q, k, v, segments if documents else None, within, sinks, causal, cap)
        return (out * weights).sum(), out

    gradients = (jax.jit(jax.grad(f, (0, 1, 2, 3), has_aux=True)) for f in (xla, ours))
    wanted, found = (f(q, k, v, None if sinks is None else jnp.float32(sinks)) for f in gradients)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, wanted)


def test_the_factor_of_a_sink_is_not_rounded() -> None:
    """In bfloat16, where XLA multiplies in float32 too: all scores are equal, so that the factor is `T / (T + e^s)`."""
    sinks, zero = jnp.asarray([0.5, -1.0, 2.0, 0.0]), jnp.zeros((2, 16, 4, 16), "bfloat16")
    v = jax.random.normal(jax.random.key(0), zero.shape, "bfloat16")
    attend = jax.jit(lambda sinks: flash_attention(zero, zero, v, sinks_N=sinks, causal=False))
    wanted = attend(None).astype(jnp.float32) * (16 / (16 + jnp.exp(sinks)))[None, None, :, None]
    np.testing.assert_array_equal(attend(sinks), wanted.astype("bfloat16"))


GEMMA = {f"model.{name}": value for name, value in FLAGS.items()} | {"model.head_dim": 16}
GEMMA |= {"model.attention_sinks": True}
GEMMA |= {"model.num_layers": 4}  # two in a stage: the interpreter of the kernel wants a window that is one everywhere


PACKED = {"data.packing": "documents", "data.source": "stdlib_text"}
RUN = [("mics(2)", {}), ("stages", GEMMA), ("tensor", PACKED)]
RARELY = [("zero3", {}), ("stages", {}), ("tensor", {}), ("mics(2)", GEMMA), ("tensor", GEMMA)]
RARELY += [(name, {}) for name in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "flags"), [*RUN, *(pytest.param(*case, marks=pytest.mark.release) for case in RARELY)]
)
def test_steps_have_the_losses_and_gradients_of_xla(strategy: str, flags: dict[str, Any]) -> None:
    changes = (STEPS | OTHERS)[strategy] | flags
    wanted, found = (three_steps(changes | {"model.attention": name}) for name in ("xla", "pallas"))
    assert_equal_steps(found, wanted, 1e-5)


def test_attention_of_cudnn_is_computed_again_with_full_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none of it here, but jax traces it once it no longer asks for its version."""
    for name in ("check_cudnn_version", "check_compute_capability"):
        where = f"jax._src.cudnn.fused_attention_stablehlo.{name}"
        monkeypatch.setattr(where, lambda *args, **how: 91000, raising=False)

    def layer(x: Any) -> Any:
        q = x.reshape(2, 64, 2, 32)
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn", is_causal=True).reshape(x.shape)

    counts = {}
    for remat in ("full", "dots", "none"):
        run = rematerialise(layer, remat)
        jaxpr = jax.make_jaxpr(jax.grad(lambda x, run=run: run(x).astype(float).sum()))(
            jnp.ones((2, 64, 64), "bfloat16")
        )
        counts[remat] = str(jaxpr).count(f"{CUDNN}_wrapper[")
    assert counts == {"full": 2, "dots": 1, "none": 1}


@every_row(
    ("changes", "expected"),
    [
        ({}, "cudnn"),
        (PACKED, "pallas"),
        (PACKED | {"data.seq_len": 96}, "xla"),  # no rows that it takes
        (PACKED | TENSOR, "pallas"),
        (PACKED | TENSOR | {"model.num_kv_heads": 1}, "xla"),  # no head for each device
        (PACKED | {"ablation.partitioner": "auto"}, "xla"),  # which cannot cut it
        ({"model.window": 16}, "pallas"),
        ({"model.head_dim": 256}, "pallas"),  # too large for cuDNN before Hopper
        ({"model.head_dim": 100}, "xla"),  # no multiple of 8
        ({"model.attention_cap": 5.0, "model.head_dim": 24}, "xla"),  # no heads that it takes
        ({"model.compute_dtype": "float32"}, "xla"),
        ({"model.compute_dtype": "float16"}, "xla"),  # for GPUs without such kernels
    ],
)
def test_auto_is_a_fused_kernel_on_gpus(
    changes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quickstart.get_config()
    config.update_from_flattened_dict(SMALL | {"model.compute_dtype": "bfloat16"} | changes)
    assert make_experiment(base.typed(config)).model.config.attention == "xla"
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(jax, "default_backend", lambda: "gpu")
        assert make_experiment(base.typed(config)).model.config.attention == expected


@every_row(("sinks", "expected"), [(False, "splash"), (True, "xla")])
def test_auto_is_splash_on_tpus_without_sinks(sinks: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = quickstart.get_config()
    sizes = {"model.max_len": 128, "data.seq_len": 128, "model.attention_sinks": sinks}
    config.update_from_flattened_dict(SMALL | {"model.compute_dtype": "bfloat16"} | sizes)
    with monkeypatch.context() as on_tpu:
        on_tpu.setattr(jax, "default_backend", lambda: "tpu")
        assert make_experiment(base.typed(config)).model.config.attention == expected


@every_row(
    ("changes", "message"),
    [
        ({"data.seq_len": 96}, "data.seq_len=96: model.attention=pallas needs 16, 32 or a multiple of 64"),
        (
            TENSOR | {"model.num_kv_heads": 1},
            "mesh.tensor=2 does not divide the heads, as model.attention=pallas needs; set model.attention=xla",
        ),
        ({"model.head_dim": 24}, "model.head_dim = 24: attention = 'pallas' needs a power of two from 16 on"),
        ({"model.hidden": 96}, "model.hidden / num_heads = 24: attention = 'pallas' needs a power of two from 16 on"),
    ],
)
def test_sizes_that_the_kernel_cannot_have_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        three_steps(changes | {"model.attention": "pallas"})
    assert str(caught.value) == message
