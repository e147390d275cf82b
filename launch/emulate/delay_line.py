"""A delay line: returns each frame that a TAP device gets from the kernel to the kernel after a latency.

It is started by path, in the network of the switch, and imports no module of ours (delays.py connects the device).
Frames are up to 64 KiB long, because the kernel leaves TCP's data uncut (IFF_VNET_HDR): 200 Mbit/s are about 1,000
frames per second. Frames keep their order. The queue is limited in bytes; excess frames are dropped.
"""

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_PACKET_INFORMATION, VNET_HEADER = 0x0002, 0x1000, 0x4000
UNCUT_TCP = 0x1 | 0x2 | 0x4 | 0x8  # frames without checksums; TCP segments of IPv4 and IPv6, also with ECN
FRAME_BYTES = 65536 + 64  # with the headers of Ethernet and of the device
MAX_QUEUE_BYTES = 32 * 1024 * 1024  # 200 Mbit/s for 1.3 s


class DelayQueue:
    """The frames on their way. `latency_s` and `jitter_s` are in seconds, `loss` is the fraction that is dropped."""

    def __init__(self, latency_s: float, jitter_s: float, loss: float, max_bytes: int = MAX_QUEUE_BYTES) -> None:
        self._latency_s, self._jitter_s, self._loss, self._free_bytes = latency_s, jitter_s, loss, max_bytes
        self._frames: deque[tuple[float, bytes]] = deque()  # each with the time when it leaves
        self._random = random.Random(0)

    def put(self, frame: bytes, now_s: float) -> None:
        """Adds a frame, or drops it: a lost frame, or a frame for which the queue has no space."""
        if self._random.random() < self._loss or len(frame) > self._free_bytes:
            return
        leaves_s = now_s + self._latency_s + self._random.uniform(-self._jitter_s, self._jitter_s)
        if self._frames:
            leaves_s = max(leaves_s, self._frames[-1][0])
        self._frames.append((leaves_s, frame))
        self._free_bytes -= len(frame)

    def pop_due(self, now_s: float) -> Iterator[bytes]:
        """Yields and removes the frames whose latency is over, in their order."""
        while self._frames and self._frames[0][0] <= now_s:
            frame = self._frames.popleft()[1]
            self._free_bytes += len(frame)
            yield frame

    def wait_s(self, now_s: float) -> float | None:
        """Returns the seconds until the next frame leaves, None if the queue is empty."""
        return max(0.0, self._frames[0][0] - now_s) if self._frames else None


def open_tap(name: str) -> int:
    """Returns the file of a new TAP device, which exists until the file is closed."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_PACKET_INFORMATION | VNET_HEADER))
    fcntl.ioctl(tap, TUNSETOFFLOAD, UNCUT_TCP)
    return tap


def relay(tap: int, queue: DelayQueue) -> None:
    """Delays the frames of a device indefinitely."""
    while True:
        if select.select([tap], [], [], queue.wait_s(time.monotonic()))[0]:
            queue.put(os.read(tap, FRAME_BYTES), time.monotonic())
        for frame in queue.pop_due(time.monotonic()):
            os.write(tap, frame)


if __name__ == "__main__":
    try:
        device = open_tap(sys.argv[1])
    except OSError as error:
        sys.exit(print(error))
    print("ready", flush=True)
    latency, jitter, lost = map(float, sys.argv[2:])
    relay(device, DelayQueue(latency, jitter, lost))
