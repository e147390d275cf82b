"""What the tests of checkpoints and snapshots share: a small state, comparisons, a disk without room."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.schema import CheckpointConfig
from state import Checkpointer

KEEP_ALL = CheckpointConfig(every=1, keep_last=1000)


def abstract(state: Any) -> Any:
    """Returns the shapes of a state, with its shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def small_state(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.arange(64.0) + step, "b": jnp.full((3,), step, jnp.int32)}


def save_small(checkpointer: Checkpointer, *steps: int, losses: dict[int, float] | None = None) -> None:
    for step in steps:
        metrics = {"validation_loss": losses[step]} if losses and step in losses else None
        checkpointer.save(step, small_state(step), data={"step": step}, config={"seed": 1}, metrics=metrics)


def check_restores(checkpointer: Checkpointer, step: int) -> None:
    """Checks that a restore gives what `save_small` saved as that step."""
    restored = checkpointer.restore(abstract(small_state(0)))
    assert restored is not None and restored.step == step and restored.data == {"step": step}
    check_equal(restored.state, small_state(step))


def check_equal(found: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    assert all(np.array_equal(np.asarray(found[name]), np.asarray(expected[name])) for name in expected)


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """Makes every write beyond `num_bytes` of a file fail in this process, as on a disk without room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
