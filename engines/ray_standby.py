"""A process that has imported a Python program and waits for its arguments: `python engines/ray_standby.py PROGRAM`.

They are one line of JSON on stdin; then the program runs as if it had been started with them, without the seconds
that its imports take. When stdin ends, whoever started this process is gone, and it must not stay behind.
"""

import json
import os
import runpy
import signal
import sys
import threading
import time

SAVE_S = 60.0  # for the program to end in good order


def main(program: str) -> None:
    """Imports what the program imports, waits, and runs it."""
    sys.path[0] = os.path.dirname(os.path.abspath(program))  # as `python PROGRAM` has it
    sys.argv = [program]
    runpy.run_path(program, run_name="standby")  # anything but __main__: it defines its functions, and runs none
    line = sys.stdin.buffer.raw.readline()  # pyright: ignore[reportAttributeAccessIssue]  # unbuffered: the rest is _watch's
    if line:
        sys.argv = [program, *json.loads(line)]
        sys.orig_argv = [sys.executable, *sys.argv]  # what a run notes down as its command
        threading.Thread(target=_end_with_supervisor, name="supervisor", daemon=True).start()
        runpy.run_path(program, run_name="__main__")


def _end_with_supervisor() -> None:
    while os.read(0, 1):
        pass
    print("the supervisor of this process is gone: it stops", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
