"""Starts train.py on real clusters, and again when it stops: Ray, SLURM, Kubernetes."""
