"""Several nodes: emulated on one machine (`python -m cluster.emulate`), or real ones."""
