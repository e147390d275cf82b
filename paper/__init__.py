"""Compares the papers' published numbers with ours: `python -m paper` writes docs/paper_tables.md from the records."""
