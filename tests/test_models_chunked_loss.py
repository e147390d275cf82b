"""The loss in pieces of positions: equal to that of all logits, in the train step of strategies and of experts."""

import numpy as np
import pytest
from three_steps import STEPS, losses

from models import chunked_loss
from models.chunked_loss import piece_length


def test_a_piece_is_the_largest_divisor_that_has_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "MOST_LOGITS", 1000)
    found = [piece_length(2, length, 100) for length in (5, 6, 7, 10, 15)]
    assert found == [5, 3, 1, 5, 5]


@pytest.mark.parametrize("strategy", STEPS)
def test_steps_have_the_losses_and_gradients_of_all_logits(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = losses(STEPS[strategy])
    monkeypatch.setattr(chunked_loss, "MOST_LOGITS", 16 * 256)  # four pieces of a row of 64
    np.testing.assert_allclose(losses(STEPS[strategy]), wanted, rtol=1e-6)
