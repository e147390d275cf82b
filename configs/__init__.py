"""Experiments: one small Python file each, with `get_config(arg="")`; nothing of ours is imported, and no jax."""
