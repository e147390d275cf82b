"""The parts of `sweep.py`: what to run, how to start it, what came out."""
