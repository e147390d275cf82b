"""A standby process, which imports a program and waits for its arguments: `python launch/ray_standby.py PROGRAM`.

The arguments are one line of JSON on stdin. The program then runs as if it had been started with them, but without the
seconds that its imports take. When stdin is closed, the agent has ended, and this process ends, too.
"""

import json
import os
import runpy
import signal
import sys
import threading
import time

SAVE_S = 60.0  # for the program to save and end


def main(program: str) -> None:
    """Imports the program, waits for its arguments, and runs it."""
    sys.path[0] = os.path.dirname(os.path.abspath(program))  # as in `python PROGRAM`
    sys.argv = [program]
    runpy.run_path(program, run_name="standby")  # not __main__: only imports and definitions
    line = sys.stdin.buffer.raw.readline()  # pyright: ignore[reportAttributeAccessIssue]  # unbuffered
    if line:
        sys.argv = [program, *json.loads(line)]
        sys.orig_argv = [sys.executable, *sys.argv]  # a run records it as its command
        threading.Thread(target=_end_with_agent, name="agent", daemon=True).start()
        runpy.run_path(program, run_name="__main__")


def _end_with_agent() -> None:
    while os.read(0, 1):
        pass
    print("the agent of this process is gone: it stops", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
