"""How processes join a run and agree, and how they detect a request to stop or the loss of a process."""
