"""Measures the links of a cluster: `python -m lab.probe`."""
