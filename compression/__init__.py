"""Reduces communication: the replica all-reduce as an optax transform, codecs for all collectives, local SGD."""
