"""The laboratory: emulated nodes, the probe of real links, chaos, benchmarks, the papers' tables."""
