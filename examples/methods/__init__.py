"""Methods of the replica all-reduce that others beat in our records (docs/compression.md); config.py registers them."""
