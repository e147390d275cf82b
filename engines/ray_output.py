"""What the engine prints."""

import sys
import time


def say(text: str) -> None:
    """Prints what happened, and when."""
    now_s = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now_s))
    print(f"{clock}.{int(now_s * 10) % 10} {text}", file=sys.stderr, flush=True)
