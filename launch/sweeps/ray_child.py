"""Runs a program until it ends or stdin is closed: `python -m launch.sweeps.ray_child PROGRAM [ARGUMENT...]`.

The actor that started it (launch/sweeps/ray_runs.py) holds the other end of stdin. If the actor has died, the sweep
starts the run again in the same directory, so this process and its children are killed at once.
"""

import os
import runpy
import signal
import sys
import threading


def main(program: str) -> None:
    """Runs the program as `python PROGRAM` would."""
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    sys.argv = sys.argv[1:]
    sys.orig_argv = [sys.executable, *sys.argv]  # a run records it as its command
    threading.Thread(target=_end_with_actor, name="actor", daemon=True).start()
    runpy.run_path(program, run_name="__main__")


def _end_with_actor() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)  # `start_here` gave it a separate session, and so a separate group


if __name__ == "__main__":
    main(sys.argv[1])
