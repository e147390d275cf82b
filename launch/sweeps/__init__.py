"""The parts of `sweep.py`: planning the runs, running them, and reporting their results."""
