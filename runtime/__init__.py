"""What to do when the world changes: how processes join one run, and how a run notices that it is asked to stop."""
