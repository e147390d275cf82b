"""The published numbers of the papers beside ours: `python -m paper` writes docs/paper_tables.md from the records."""
