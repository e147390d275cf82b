"""Starts train.py: on Ray, SLURM and Kubernetes, for each setting of a sweep, and on an emulated cluster."""
