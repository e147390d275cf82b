"""Compares the papers' published numbers with ours: `python -m lab.paper` fills their pages' tables from records."""
