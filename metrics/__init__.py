"""What a run writes and shows: metrics, progress, throughput, environment, wire bytes, summary and report.

Only process 0 writes and prints. Nothing here imports jax.
"""
