"""Replicas that are worlds of their own: the gradients of a step as sums over one tree, whoever computes which part."""
