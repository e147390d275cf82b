"""`WireCounter`: the bytes that crossed this host's network interfaces, from the kernel's counters."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class WireBytes:
    """Bytes sent and received by this host since the previous reading."""

    tx_bytes: int
    rx_bytes: int


class WireCounter:
    """Counts the bytes of all programs on all interfaces except loopback.

    A packet that passes two of them counts twice.
    """

    def __init__(self, root: str | Path = "/sys/class/net") -> None:
        self._root = Path(root)
        self._last = self._read()

    def delta(self) -> WireBytes | None:
        """Returns the bytes since the previous call (at first, since construction), or None if they are unknown.

        Interfaces that appeared or disappeared meanwhile are ignored. A counter that went backwards gives None.
        """
        last, self._last = self._last, self._read()
        both = last.keys() & self._last.keys()
        differences = [(self._last[i][0] - last[i][0], self._last[i][1] - last[i][1]) for i in both]
        if not differences or min(map(min, differences)) < 0:
            return None
        return WireBytes(tx_bytes=sum(tx for tx, _ in differences), rx_bytes=sum(rx for _, rx in differences))

    def _read(self) -> dict[str, tuple[int, int]]:
        """Returns (sent, received) of each readable interface."""
        try:
            names = sorted(entry.name for entry in self._root.iterdir() if entry.name != "lo")
        except OSError:
            return {}
        counters = {}
        for name in names:
            statistics = self._root / name / "statistics"
            try:
                counters[name] = (
                    int((statistics / "tx_bytes").read_text()),
                    int((statistics / "rx_bytes").read_text()),
                )
            except (OSError, ValueError):  # not an interface (`bonding_masters`), or not readable
                continue
        return counters
