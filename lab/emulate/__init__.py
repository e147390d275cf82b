"""The laboratory: emulated nodes (`python -m lab.emulate`), the probe of any cluster's links, chaos."""
