"""What to do when the world changes: so far, how a run notices that it is asked to stop."""
