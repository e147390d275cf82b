"""`EmulatedCluster`: emulated nodes, each with its own network and a link of a chosen speed to a switch."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from launch.emulate import namespaces
from launch.emulate.delays import NetemDelay, find_delay
from launch.emulate.links import MTU_BYTES, TCP_BUFFERS, Links
from runtime.files import locks

MAX_NODES = 254  # addresses of a /24
DISABLED, FORWARDING = 0, 3  # states of a bridge's port
END_S = 10.0  # limit for the kernel to end a node, which takes milliseconds


@dataclass(frozen=True, kw_only=True)
class LinkTraffic:
    """The traffic of a node since its start, from the counters of its interface, and the current rate of its link.

    The kernel may merge several packets. It then counts them as one packet with one header.
    """

    node: int
    rate: str
    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int


@dataclass(kw_only=True)
class EmulatedNode:
    """One emulated node. `network_fd` keeps its network alive after its processes have ended."""

    number: int
    init: subprocess.Popen[bytes]
    network_fd: int
    links: Links
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)  # of cut, stopped, killed

    @property
    def network(self) -> str:
        """Returns the path of the network, valid while this process keeps it open."""
        return f"/proc/{os.getpid()}/fd/{self.network_fd}"

    def bury(self) -> None:
        """Waits for the end of a node whose process 1 is ending. The kernel waits until we reap its processes."""
        for process in [*self.processes, self.init]:
            process.wait(END_S)


class EmulatedCluster:
    """Emulated nodes, which run while the context is open. They also end with this process, however it ends.

    Nodes are `node0`, `node1`, ... at 10.77.0.1, 10.77.0.2, ... Other clusters on this machine may use the same
    addresses, because no packet leaves a cluster. Each node has its own /tmp and /dev/shm, except this folder,
    `workdir` and the `shared` paths.
    """

    def __init__(self, nodes: int, links: Links, workdir: Path, shared: Sequence[Path] = ()) -> None:
        self.nodes: list[EmulatedNode] = []
        self.links = links
        self.workdir = workdir.resolve()
        self._num_nodes = nodes
        named = [workdir, Path.cwd(), *shared]
        real = {path.resolve() for path in named}
        by_links = {path.absolute() for path in named} - real
        self._shared = sorted(real) + sorted(by_links)  # parents first, and targets before their links
        self._hosts = self.workdir / "hosts"
        self._delay = NetemDelay()

    def __enter__(self) -> "EmulatedCluster":
        self.workdir.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            try:
                undo.enter_context(locks.locked(self.workdir / ".lock", wait_s=0))
            except BlockingIOError:
                raise ValueError(f"another emulation uses --workdir={self.workdir}; give another one") from None
            self._hosts.write_text("127.0.0.1 localhost\n")
            self._switch = namespaces.new_node("switch", self._hosts, [])
            undo.callback(self._close)
            self._delay = find_delay(self._switch.pid, self.links)
            bridge = [f"link add br0 mtu {MTU_BYTES} type bridge mcast_snooping 0", "link set br0 up"]
            namespaces.configure(self._switch_network, "ip", bridge)
            for _ in range(self._num_nodes):
                self.add()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def address(self, node: int) -> str:
        """Returns the IP address of a node."""
        return f"10.77.0.{node + 1}"

    def add(self) -> int:
        """Starts another node, and returns its number."""
        number = len(self.nodes)
        if number >= MAX_NODES:
            raise ValueError(f"there are {MAX_NODES} nodes, and no more addresses")
        with contextlib.ExitStack() as undo:
            init = undo.enter_context(namespaces.new_node(f"node{number}", self._hosts, self._shared))
            network_fd = os.open(f"/proc/{init.pid}/ns/net", os.O_RDONLY)
            undo.callback(os.close, network_fd)
            node = EmulatedNode(number=number, init=init, network_fd=network_fd, links=self.links)
            self._connect(node)
            with self._hosts.open("a") as hosts:  # the same file is mounted in every node
                hosts.write(f"{self.address(number)} node{number}\n")
            undo.pop_all()
        self.nodes.append(node)
        return number

    def _connect(self, node: EmulatedNode) -> None:
        """Connects a node to the switch, and sets its address and its rate limits."""
        number = node.number
        cable = f"address {_mac(number)} mtu {MTU_BYTES} netns {node.init.pid} type veth peer name p{number}"
        port = f"link set p{number} mtu {MTU_BYTES} master br0 up"
        namespaces.configure(self._switch_network, "ip", [f"link add eth0 {cable}", port])
        self._delay.connect(number, _mac(number), node.links)
        # Permanent neighbours: a dead node is silent, as behind a real switch, instead of "unreachable".
        others = [
            f"neigh add {self.address(i)} lladdr {_mac(i)} dev eth0 nud permanent"
            for i in range(MAX_NODES)
            if i != number
        ]
        up = [f"addr add {self.address(number)}/24 dev eth0", "link set lo up", "link set eth0 up"]
        namespaces.configure(node.network, "ip", [*up, *others])
        if any(node.links.delay()):
            namespaces.set_tcp(node.init.pid, TCP_BUFFERS)
        self._limit(node, node.links)

    def start(
        self, node: int, command: Sequence[str], env: Mapping[str, str] | None = None, log: IO[bytes] | int = -1
    ) -> subprocess.Popen[bytes]:
        """Starts a program in a node as a child process, with its output to a file or a pipe (default)."""
        process = namespaces.start_in(self._init(node), command, os.environ if env is None else env, log)
        self.nodes[node].processes.append(process)
        return process

    def cut(self, node: int) -> None:
        """Drops every packet from and to a node, without an error for its peers."""
        self._set_port(node, DISABLED)
        self.nodes[node].marks.add("cut")

    def heal(self, node: int) -> None:
        """Undoes `cut`."""
        self._set_port(node, FORWARDING)
        self.nodes[node].marks.discard("cut")

    def slow(self, node: int, rate: str) -> None:
        """Sets another rate for a node's link, in both directions."""
        links = replace(self.nodes[node].links, rate=rate)
        self._limit(self.nodes[node], links)
        self.nodes[node].links = links

    def kill(self, node: int) -> None:
        """Kills all processes of a node at once (SIGKILL). Its kernel stays alive and closes their connections."""
        self.nodes[node].init.kill()
        self.nodes[node].bury()
        self.nodes[node].marks.add("killed")

    def stop(self, node: int) -> None:
        """Stops all processes of a node (SIGSTOP). Its kernel continues to answer."""
        namespaces.signal_all(self._init(node), signal.SIGSTOP)
        self.nodes[node].marks.add("stopped")

    def cont(self, node: int) -> None:
        """Undoes `stop`."""
        namespaces.signal_all(self._init(node), signal.SIGCONT)
        self.nodes[node].marks.discard("stopped")

    def traffic(self) -> list[LinkTraffic]:
        """Returns the bytes and packets that each node sent and received, measured at the switch's end of its link."""
        ports = {}
        for line in Path(f"/proc/{self._switch.pid}/net/dev").read_text().splitlines()[2:]:
            name, counters = line.split(":")
            ports[name.strip()] = [int(counter) for counter in counters.split()]
        found = []
        for node in self.nodes:
            counts = ports[f"p{node.number}"]  # received by the switch: bytes, packets, 6 others; then sent
            sent = {"tx_bytes": counts[0], "tx_packets": counts[1]}
            received = {"rx_bytes": counts[8], "rx_packets": counts[9]}
            found.append(LinkTraffic(node=node.number, rate=node.links.rate, **sent, **received))
        return found

    @property
    def _switch_network(self) -> str:
        return f"/proc/{self._switch.pid}/ns/net"

    def _init(self, node: int) -> int:
        if "killed" in self.nodes[node].marks:
            raise ValueError(f"node {node} was killed; `ctl add` brings up another one")
        return self.nodes[node].init.pid

    def _set_port(self, node: int, state: int) -> None:
        # Not `ip link set down`, which the node would detect.
        states = [f"link set dev {port} state {state}" for port in self._delay.ports(node)]
        namespaces.configure(self._switch_network, "bridge", states)

    def _limit(self, node: EmulatedNode, links: Links) -> None:
        """Sets the rate limits at both ends of a link. The switch limits the traffic to the node."""
        ends = (
            (node.network, self._delay.leaving(links)),
            (self._switch_network, links.arriving(f"p{node.number}")),
        )
        for network, commands in ends:
            namespaces.configure(network, "tc", commands)

    def _close(self) -> None:
        for init in [*[node.init for node in self.nodes], self._switch]:
            assert init.stdin
            init.stdin.close()
        for node in self.nodes:
            node.bury()
            for process in node.processes:
                if process.stdout:
                    process.stdout.close()
            os.close(node.network_fd)
        self._delay.close()
        self._switch.wait(END_S)
        self.nodes.clear()


def _mac(node: int) -> str:
    return f"02:00:00:00:00:{node + 1:02x}"
