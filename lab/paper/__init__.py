"""Compares the papers' published numbers with ours: the tables of docs/results/paper_tables.md and docs/papers."""
