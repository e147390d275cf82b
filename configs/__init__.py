"""Experiments, one small Python file each with `get_config(arg="")`. Imports neither our other packages nor jax."""
