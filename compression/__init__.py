"""Hop two as the first transform of an optax chain: what crosses the slow network, and in which form."""
