"""How links get their latency, jitter and loss: by netem, or by a delay line where the kernel has no netem."""

import subprocess
import sys
from pathlib import Path

from launch.emulate import namespaces
from launch.emulate.delay_line import MAX_QUEUE_BYTES
from launch.emulate.links import MTU_BYTES, Links

PROGRAM = Path(__file__).with_name("delay_line.py")
MAX_RATE = 1e9  # bit/s; one stream was measured to reach 97 % of it


class NetemDelay:
    """The kernel delays the packets that leave a node, in the node."""

    def connect(self, number: int, mac: str, links: Links) -> None:
        """Prepares the link of a new node, which enters the switch at port p{number}."""

    def leaving(self, links: Links) -> list[str]:
        """Returns the `tc` commands for eth0 in the node. ValueError if the delay cannot hold at this rate."""
        return links.leaving("eth0")

    def ports(self, number: int) -> list[str]:
        """Returns the ports of the switch that a node's packets pass."""
        return [f"p{number}"]

    def close(self) -> None:
        """Waits for the end of the programs, which the kernel ends with the switch."""


class DelayLine(NetemDelay):
    """A program per node delays the packets that leave it, in the switch (delay_line.py).

    The kernel redirects each packet that enters port p{N} to the TAP device d{N}, the program returns it after the
    latency, and the bridge then forwards it. Packets to node N go to p{N} directly.
    """

    def __init__(self, switch: int) -> None:
        self._switch = switch  # process 1
        self._programs: list[subprocess.Popen[bytes]] = []

    def connect(self, number: int, mac: str, links: Links) -> None:
        """Starts the program, and inserts its device between the port and the bridge."""
        port, tap = self.ports(number)
        command = [sys.executable, "-I", "-S", str(PROGRAM), tap, *map(str, links.delay())]
        self._programs.append(program := namespaces.start_in_network(self._switch, command))
        assert program.stdout
        with program.stdout as output:
            if (line := output.readline()) != b"ready\n":
                raise ValueError(f"this kernel cannot delay links: no sch_netem, and no TAP ({line.decode().strip()})")
        # The bridge knows the node's address at its port only, and floods no packet to the program.
        bridge = [f"link set dev {tap} learning off flood off mcast_flood off bcast_flood off"]
        bridge += [f"link set dev {port} learning off", f"fdb add {mac} dev {port} master static"]
        redirect = f"u32 match u32 0 0 action mirred egress redirect dev {tap}"
        filters = [f"qdisc add dev {port} ingress", f"filter add dev {port} parent ffff: protocol all {redirect}"]
        up = [f"link set {tap} mtu {MTU_BYTES} master br0 up"]
        for tool, commands in (("ip", up), ("bridge", bridge), ("tc", filters)):
            namespaces.configure(f"/proc/{self._switch}/ns/net", tool, commands)

    def leaving(self, links: Links) -> list[str]:
        """Returns the commands for the rate, to which the node is limited before the delay."""
        latency_s, jitter_s, _ = links.delay()
        if links.rate_bits() > min(MAX_RATE, 8 * MAX_QUEUE_BYTES / (latency_s + jitter_s + 1e-9)):
            raise ValueError(
                f"--rate={links.rate}: this kernel has no netem, and the delay line instead of it carries up to 1gbit "
                f"and {MAX_QUEUE_BYTES >> 20} MiB at a time; give a lower --rate or --latency"
            )
        return links.arriving("eth0")

    def ports(self, number: int) -> list[str]:
        """Returns the port of the node and the device of the program."""
        return [f"p{number}", f"d{number}"]

    def close(self) -> None:
        """Waits for the end of the programs."""
        for program in self._programs:
            program.wait()


def find_delay(switch: int, links: Links) -> NetemDelay:
    """Returns netem, or a delay line if the links have a latency or loss and the kernel has no netem."""
    try:
        if any(links.delay()):  # on a device that nothing uses
            namespaces.configure(f"/proc/{switch}/ns/net", "tc", ["qdisc replace dev lo root netem delay 1ms"])
    except namespaces.MissingQdiscError:
        return DelayLine(switch)
    return NetemDelay()
