"""Every test sees 8 virtual CPU devices; warnings and silent rank promotion are errors."""

import os

# LLVM's optimiser is most of the time that a test compiles; the program's collectives do not depend on it.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
