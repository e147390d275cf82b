"""The parts of the step that are shaped for TPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from planner.compile import TARGETS, compile_step, is_installed
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


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(TARGETS["v5e"]), reason="XLA for TPUs is not installed: make .venv/tpu/installed")
def test_the_program_of_one_micro_step_has_one_forward_and_one_backward_loop() -> None:
    """A slice of 4 v5e: two loops over layers, attention as a kernel, and no layer packed into a vector."""
    words = ("batch.global_size=4", "batch.micro_size=1", "sharding.strategy=zero3", "model.attention=splash")
    sizes = ("model.num_layers=4", "model.compute_dtype=bfloat16", "data.seq_len=128", "mesh.num_cpu_devices=0")
    config = ["--config=configs/gpu_decoder.py:tiny", *(f"--config.{word}" for word in (*words, *sizes))]
    text = compile_step([*config, "--config.model.max_len=128"], nodes=1, devices_per_node=4, target="v5e").text
    assert len(re.findall(r" while\(", text)) == 2
    assert "splash_mha_fwd" in text and "splash_mha_dkv" in text
    assert not re.search(r"= u16\[4,1,\d+\]\S* all-gather\(", text)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(TARGETS["v5e"]), reason="XLA for TPUs is not installed: make .venv/tpu/installed")
@pytest.mark.parametrize(("target", "slices", "chips"), [("v5e", 2, 4), ("v6e", 4, 4)])
def test_int8_crosses_between_slices_as_bytes(target: str, slices: int, chips: int) -> None:
    words = ("batch.micro_size=1", "sharding.strategy=hsdp", "model.attention=splash", "compression.all_reduce=int8")
    sizes = ("model.compute_dtype=bfloat16", "data.seq_len=128", "model.max_len=128", "mesh.num_cpu_devices=0")
    config = ["--config=configs/gpu_decoder.py:tiny", *(f"--config.{word}" for word in (*words, *sizes))]
    config.append(f"--config.batch.global_size={slices * chips}")
    text = compile_step(config, nodes=slices, devices_per_node=chips, target=target).text
    kinds = re.findall(r'= \((\w+)\[[\d,]+\]\S* .* send\(.*?transfer_type="(\w+)"', text)
    assert ("u8", "ALL_TO_ALL") in kinds and not any(dtype == "bf16" for dtype, _ in kinds)
