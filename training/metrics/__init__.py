"""Output of a run: metrics, progress, throughput, environment, wire bytes, summary and report.

Only process 0 writes and prints. Nothing here imports jax.
"""
