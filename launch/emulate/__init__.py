"""Emulates several nodes on one machine: `python -m launch.emulate`."""
