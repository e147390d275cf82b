"""`Links`: the properties of the links of an emulated cluster, and the `tc` commands that set them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# the units of each option, and examples
UNITS: Mapping[str, tuple[Mapping[str, float], str]] = {
    "rate": ({"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}, "1gbit, 200mbit, 500kbit or none"),
    "latency": (SECONDS, "1ms or 50us"),
    "jitter": (SECONDS, "1ms or 50us"),
    "loss": ({"%": 1}, "0.1%"),
}
LOWEST_RATE = 100_000  # below this rate, one packet takes a second
MTU_BYTES = 9000  # as between cloud instances; with 1500 the headers would take 5 % of the rate
# Data that may pass at once after a pause: two packets of 64 KiB (the kernel splits them late), plus, on fast links,
# the data that would be lost while a late timer fires. A larger burst would let short messages pass unlimited.
BURST_BYTES = 128 * 1024
BURST_S = 0.002
QUEUE_S = 0.1  # length of a link's queue in time; excess packets are dropped
# Limits of TCP's buffers where links have a latency (least, first, most bytes): 200 Mbit/s for 2.6 s
TCP_BUFFERS = {"tcp_rmem": "4096 131072 67108864", "tcp_wmem": "4096 16384 67108864"}
QUEUE_PACKETS = 100_000  # the limit of netem, which only delays packets


@dataclass(frozen=True, kw_only=True)
class Links:
    """The link between a node and the others, symmetric. ValueError names the invalid value."""

    rate: str = "none"  # in tc's notation: "200mbit"; "none" is without a limit
    latency: str = "0ms"  # one way, from any node to any other
    jitter: str = "0ms"  # variation of the latency
    loss: str = "0%"  # fraction of the packets

    def __post_init__(self) -> None:
        if self.rate != "none" and self.rate_bits() < LOWEST_RATE:
            raise ValueError(f"--rate={self.rate} is too slow for packets; give 100kbit or more")
        if self._number("jitter") > self._number("latency"):
            raise ValueError(f"--jitter={self.jitter} must not be more than --latency={self.latency}")
        if self._number("loss") >= 100:
            raise ValueError(f"--loss={self.loss} leaves nothing; `ctl cut NODE` silences a node")

    def rate_bits(self) -> float:
        """Returns the bits per second, infinite without a limit."""
        return float("inf") if self.rate == "none" else self._number("rate")

    def delay(self) -> tuple[float, float, float]:
        """Returns the latency and the jitter in seconds, and the fraction of lost packets."""
        return self._number("latency"), self._number("jitter"), self._number("loss") / 100

    def leaving(self, device: str) -> list[str]:
        """Returns the `tc` commands for the sending end of a link, in the node: latency, loss and rate."""
        if not (self._number("latency") or self._number("loss")):
            return self.arriving(device)
        delay = f"delay {self.latency} {self.jitter} loss {self.loss}"
        netem = f"qdisc replace dev {device} root handle 2: netem limit {QUEUE_PACKETS} {delay}"
        if self.rate == "none":
            return [*self.arriving(device), netem]  # without the qdiscs that were below it
        return [netem, *self.arriving(device, "parent 2:1")]  # above tbf, whose queue and limit it would replace

    def arriving(self, device: str, where: str = "root") -> list[str]:
        """Returns the `tc` commands for the receiving end of a link, at the switch: the rate."""
        if self.rate == "none":
            return [f"qdisc replace dev {device} {where} noqueue"]
        rate_bytes = self.rate_bits() / 8
        burst = max(BURST_BYTES, round(rate_bytes * BURST_S))
        limit = burst + round(rate_bytes * QUEUE_S)
        return [f"qdisc replace dev {device} {where} handle 1: tbf rate {self.rate} burst {burst}b limit {limit}b"]

    def _number(self, option: str) -> float:
        """Returns the value of an option in bit/s, seconds or percent."""
        value, (units, examples) = getattr(self, option), UNITS[option]
        match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(units)})", value)
        if not match:
            raise ValueError(f"--{option}={value}: give a number and its unit, such as {examples}")
        return float(match[1]) * units[match[2]]
