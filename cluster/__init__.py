"""The laboratory: emulated nodes (`python -m cluster.emulate`), the probe of any cluster's links, chaos."""
