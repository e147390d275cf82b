"""The parts of the step that are shaped for XLA: a single micro-step without a loop, and the order of the last one."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharding.gradients import run_last, scan_micro_steps

Values = tuple[jax.Array, jax.Array]


def test_a_single_micro_step_is_not_in_a_loop() -> None:
    def step(carry: jax.Array, item: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return carry + jnp.tanh(item), {"loss": carry * item}

    start = jnp.arange(3.0)
    for accumulation in (1, 3):
        items = jax.random.normal(jax.random.key(0), (accumulation, 3))
        ours, reference = (jax.jit(f, static_argnums=0) for f in (scan_micro_steps, lax.scan))
        jax.tree.map(np.testing.assert_array_equal, ours(step, start, items), reference(step, start, items))
        has_loop = "while" in ours.lower(step, start, items).as_text()
        assert has_loop == (accumulation > 1)


def test_the_last_micro_step_begins_after_the_gradients_of_the_others() -> None:
    """Otherwise two micro-steps, neither of which is in a loop, hold their values at the same time."""

    def micro_step(carry: Values, item: Values) -> tuple[Values, dict[str, jax.Array]]:
        sums, value = carry
        number, row = item
        return (sums + row, value + number), {"loss": value}

    carry, items = (jnp.arange(3.0), jnp.ones(())), (jnp.arange(2.0), jnp.ones((2, 3)))
    run = jax.jit(partial(run_last, micro_step))
    (sums, value), aux = run(carry, items, {"loss": jnp.zeros(1)})
    assert sums.tolist() == [1, 2, 3] and value == 2 and aux["loss"].tolist() == [0, 1]
    (barrier,) = re.findall(r"optimization_barrier (.*) :", run.lower(carry, items, {"loss": jnp.zeros(1)}).as_text())
    assert len(barrier.split(", ")) == 4  # the number and the row, and the sums and the loss before them
