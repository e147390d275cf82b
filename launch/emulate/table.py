"""`Monitor`: the state of the nodes of a job, as rows, as text, and as a live table on a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from launch.emulate.job import ClusterJob
from runtime.files.pages import columns
from runtime.progress import read_progress, workdir_of

HEADER = ("node", "host", "link", "state", "step", "sent MB/s", "received MB/s")
SAMPLE_S = 1.0
Sample = tuple[float, list[tuple[int, int]]]  # time, and the bytes that each node has sent and received so far


class Monitor:
    """Returns rows about the nodes. `step` is read from the metrics in the program's `--workdir`, if it has one."""

    def __init__(self, job: ClusterJob, command: Sequence[str]) -> None:
        self._job = job
        self._workdir = workdir_of(command)
        self._step = self._newest_step()
        self._before = self._now = self._sample()

    def rows(self) -> list[tuple[str, ...]]:
        """Returns one row per node, with the columns of `HEADER`. Speeds are averages over a second or more."""
        if time.monotonic() - self._now[0] >= SAMPLE_S:
            self._before, self._now = self._now, self._sample()
            self._step = self._newest_step()
        (now_s, now), (before_s, before) = self._now, self._before
        took_s = now_s - before_s or 1.0
        rows = []
        for node in self._job.cluster.nodes:
            n = node.number
            moved = [after - so_far for so_far, after in zip(before[n], now[n])] if n < len(before) else [0, 0]
            speeds = [f"{size / took_s / 1e6:.1f}" for size in moved]
            state = ", ".join(sorted(node.marks)) or "up"
            ended = [p.code for p in self._job.processes if p.node == n and p.code is not None]
            if ended and not node.marks:
                state = f"exit code {max(ended)}"
            rows.append((str(n), f"node{n}", node.links.rate, state, self._step, *speeds))
        return rows

    def text(self) -> str:
        """Returns the rows as lines of aligned columns."""
        return "\n".join(columns([HEADER, *self.rows()], left=len(HEADER)))

    def _sample(self) -> Sample:
        return time.monotonic(), [(traffic.tx_bytes, traffic.rx_bytes) for traffic in self._job.cluster.traffic()]

    def _newest_step(self) -> str:
        step = read_progress(self._workdir).step if self._workdir else 0
        return str(step) if step else "-"


@contextlib.contextmanager
def shown(monitor: Monitor) -> Iterator[Callable[[], None]]:
    """Yields a function that redraws the table. It does nothing if the output is not a terminal."""
    if not sys.stdout.isatty():
        yield lambda: None
        return
    from rich.live import Live  # the only dependency of this package outside the standard library
    from rich.table import Table

    def drawn() -> Table:
        table = Table(*HEADER)
        for row in monitor.rows():
            table.add_row(*row)
        return table

    with Live(drawn(), refresh_per_second=4) as live:
        yield lambda: live.update(drawn())
