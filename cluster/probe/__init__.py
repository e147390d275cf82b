"""Measures the links of a cluster: `python -m cluster.probe`."""
