"""Where every part of a run's state lies and what each device holds, before anything is started or compiled."""
