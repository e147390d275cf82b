"""What a run writes and shows: writers, progress, throughput, environment, wire bytes, summary and report.

Imports the standard library, numpy, rich and tensorboardX only: no jax and nothing of ours. Process 0 alone calls it.
"""
