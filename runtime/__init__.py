"""Joins the processes of a run, lets them agree, and detects a stop request or the loss of a process."""
