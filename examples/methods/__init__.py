"""Methods and intervals of exchanges that are not part of the core (docs/compression.md); config.py registers them."""
