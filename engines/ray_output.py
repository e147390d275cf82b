"""The engine's messages."""

import sys
import time


def say(text: str) -> None:
    """Prints a message with the time."""
    now_s = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now_s))
    print(f"{clock}.{int(now_s * 10) % 10} {text}", file=sys.stderr, flush=True)
