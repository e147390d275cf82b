"""Every test sees 8 virtual CPU devices; warnings and silent rank promotion are errors."""

import os

import fast_compile

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {fast_compile.FLAGS}"

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
