"""Loops that use mics.py, and methods that are not part of the core; the product imports none of them."""
