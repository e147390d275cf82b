"""The loss in pieces of positions: equal to that of all logits, alone and in the train step of every strategy."""

import jax
import jax.numpy as jnp
import pytest
from support.three_steps import OTHERS, STEPS, assert_equal_steps, three_steps

from models import chunked_loss
from models.chunked_loss import Rows, piece_length, sum_of_pieces


def test_a_piece_is_the_largest_divisor_that_has_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "MOST_LOGITS", 1000)
    found = [piece_length(2, length, 100) for length in (5, 6, 7, 10, 15)]
    assert found == [5, 3, 1, 5, 5]


def test_a_gradient_in_float16_is_scaled_before_it_is_rounded() -> None:
    """As a sum over all positions it is beyond float16; as the mean that is differentiated it is not."""
    x_BTD = jnp.full((1, 512, 1), 256, jnp.float16)

    def mean(w: jax.Array) -> jax.Array:
        of_piece = lambda w, x, rows: jnp.sum(
            x.astype(jnp.float32) * w.astype(jnp.float32) * rows["weights"][..., None]
        )
        return sum_of_pieces(of_piece, w, x_BTD, {"weights": jnp.ones((1, 512))}, 64) / 512

    gradient = jax.grad(mean)(jnp.ones((), jnp.float16))
    assert (gradient.dtype, float(gradient)) == (jnp.float16, 256.0)


def test_all_logits_are_never_in_memory() -> None:
    """16 MiB in float32, of which the whole loss has several copies; in 16 pieces, as many of a sixteenth."""
    x_BTD, w_DV, rows = jnp.ones((2, 512, 16)), jnp.ones((16, 4096)), {"target": jnp.zeros((2, 512), jnp.int32)}

    def temporaries(length: int) -> int:
        def of_piece(w_DV: jax.Array, x_BCD: jax.Array, rows: Rows) -> jax.Array:
            return -jnp.take_along_axis(jax.nn.log_softmax(x_BCD @ w_DV), rows["target"][..., None], -1).sum()

        loss = jax.grad(lambda w_DV, x_BTD: sum_of_pieces(of_piece, w_DV, x_BTD, rows, length), (0, 1))
        analysis = jax.jit(loss).lower(w_DV, x_BTD).compile().memory_analysis()
        assert analysis
        return analysis.temp_size_in_bytes

    logits = 4 * 2 * 512 * 4096
    assert temporaries(512) > 2 * logits and temporaries(32) < logits / 3


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*STEPS, *SLOW])
def test_steps_have_the_losses_and_gradients_of_all_logits(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = (STEPS | OTHERS)[strategy]
    wanted = three_steps(changes)
    monkeypatch.setattr(chunked_loss, "MOST_LOGITS", 16 * 256)  # four pieces of a row of 64
    assert_equal_steps(three_steps(changes), wanted, 1e-6)
