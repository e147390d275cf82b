"""Emulates several nodes on one machine: `python -m lab.emulate`."""
