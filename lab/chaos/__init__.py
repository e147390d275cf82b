"""Injects random faults into a real run on an emulated Ray cluster: `python -m lab.chaos`."""
