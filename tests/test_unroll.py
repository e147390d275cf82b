"""Layers that the program has one after the other: the same steps as in a loop, and no stacks of what is kept."""

import pytest
from support.three_steps import SMALL, STEPS, assert_equal_steps, three_steps

from configs import base, quickstart
from training.experiment import make_experiment

DDP = {"sharding.strategy": "ddp", "sharding.partition_size": 0}
CASES = {
    "mics(2), dots": {"model.remat": "dots"},
    "ddp, nothing again": DDP | {"model.remat": "none"},
    "stages, dots": STEPS["stages"] | {"model.remat": "dots"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_a_loop(case: str) -> None:
    wanted, found = (three_steps(CASES[case] | {"model.unroll": unroll}) for unroll in (False, True))
    assert_equal_steps(found, wanted, 1e-5)


@pytest.mark.slow
def test_nothing_is_kept_in_stacks() -> None:
    """The MLPs' wide activations are in ones of `[L - 1, B, T, F]` with a loop, and in none without."""
    sizes = {"model.num_layers": 3, "model.remat": "none", "model.intermediate": 48, "data.seq_len": 32}
    found = {}
    for unroll in (False, True):
        config = quickstart.get_config()
        config.update_from_flattened_dict(SMALL | DDP | sizes | {"model.unroll": unroll})
        text = make_experiment(base.typed(config)).lower_train_step().compile().as_text()
        assert text and "f32[3,64,48]" in text  # the weights'
        found[unroll] = "f32[2,1,32,48]" in text or "f32[2,32,48]" in text
    assert found == {False: True, True: False}


def test_layers_that_are_computed_again_stay_in_a_loop() -> None:
    with pytest.raises(ValueError) as caught:
        three_steps({"model.unroll": True})
    fix = "with model.remat = 'full' no loop keeps more than layers' inputs; use attention, dots, none or offload"
    assert str(caught.value) == f"model.unroll = True: {fix}"
