"""The parts of the step that are shaped for TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharding.gradients import scan_micro_steps


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
