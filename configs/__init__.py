"""Experiments: one small Python file each, with `get_config(arg="")`; imports nothing of ours but configs, and no jax."""
