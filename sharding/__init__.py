"""Mesh, scopes, specs, collectives and the training step; knows no model, no flax and no optax."""
