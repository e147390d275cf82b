"""Compares the papers' published numbers with ours: `python -m paper` fills the tables of their pages from records."""
