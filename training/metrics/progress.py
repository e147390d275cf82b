"""`RunProgress`: a live progress bar in a terminal, or a plain line every ten seconds. `print_summary`: the results.

No thread draws. `update` itself redraws, at most every half second, so that it costs the training loop almost nothing.
"""

import sys
import time
from collections.abc import Mapping

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from training.metrics.run_files import HEADLINES, RunFiles, headline
from training.metrics.units import format_seconds

DRAW_EVERY_S = 0.5
PRINT_EVERY_S = 10.0


class RunProgress:
    """Shows the progress of a run of `total_steps`, which resumes after `start_step`."""

    def __init__(self, total_steps: int, start_step: int = 0, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._step = start_step
        self._scalars: dict[str, float] = {}
        self._first: tuple[int, float] | None = None  # step and time of the first update
        self._eta = ""
        self._shown_s = -1e9
        self._shown_step: int | None = None
        self._console = Console(highlight=False) if console is None else console
        self._live: Live | None = None
        if (sys.stdout.isatty() if console is None else True) and self._console.is_interactive:
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._draw)
            self._live.start()

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes the values of `step` (keys of `metrics.jsonl`).

        A key without a new value still shows its last value.
        """
        now = time.monotonic()
        self._first = self._first or (step, now)
        self._step = step
        self._scalars.update(scalars)
        self._eta = self._time_left(now)
        if now - self._shown_s < (PRINT_EVERY_S if self._live is None else DRAW_EVERY_S) and step < self._total_steps:
            return
        self._shown_s = now
        if self._live is None:
            self._print_line()
        else:
            self._live.refresh()

    def print(self, text: str) -> None:
        """Prints text unchanged, above the bar in a terminal."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Shows the final values and restores the terminal. A second call does nothing."""
        if self._live is not None:
            self._live.refresh()
            self._live.stop()
            self._live = None
        elif self._scalars and self._shown_step != self._step:
            self._print_line()

    def _time_left(self, now: float) -> str:
        """Returns the time for the remaining steps at the mean speed so far, "" if unknown or finished."""
        assert self._first is not None
        first, since_s = self._first
        if self._step <= first or self._step >= self._total_steps:
            return ""
        seconds = (self._total_steps - self._step) * (now - since_s) / (self._step - first)
        return f"ETA {seconds:.0f} s" if seconds < 59.5 else f"ETA {format_seconds(seconds)}"

    def _print_line(self) -> None:
        self._shown_step = self._step
        values = [f"{label} {value}" for label, value in shown(self._scalars)]
        self.print("  ".join(filter(None, [f"step {self._step}/{self._total_steps}", *values, self._eta])))

    def _draw(self) -> Group:
        """Returns the bar, and below it two lines of values, the second with the byte counts."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        share = self._step / self._total_steps if self._total_steps else 1.0
        bar.add_row(
            Text(f"step {self._step}/{self._total_steps}", style="bold"),
            ProgressBar(total=max(1, self._total_steps), completed=self._step, complete_style="cyan"),
            Text(f"{share:4.0%}  {self._eta}".rstrip()),
        )
        lines = [Text(no_wrap=True, overflow="ellipsis") for _ in range(2)]
        for label, value in shown(self._scalars):
            line = lines[label in ("inside nodes", "between nodes", "replica all-reduce")]
            line.append("  " if line else "")
            line.append(f"{label} ", style="dim")
            line.append(value)
        return Group(bar, *(line for line in lines if line))


def shown(scalars: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns the (label, text) pairs to show for the headline numbers in `scalars`."""
    of_rows = [(one.keys[-1], one) for one in HEADLINES.values() if one.keys[-1] in scalars]
    pairs = [
        (one.label, one.form(float(scalars[key]))) for key, one in of_rows if key != "skipped_steps" or scalars[key]
    ]
    if scalars.get("all_reduce_ratio"):  # not the payload: a device keeps a part of it or sends it several times
        pairs.append(("replica all-reduce", f"{scalars['all_reduce_ratio']:.3g} times smaller"))
    return pairs


def print_summary(files: RunFiles) -> None:
    """Prints the results of a run. Unknown numbers are omitted."""
    table = Table(title=Text(files.name), box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    table.add_column(style="dim")
    if files.outcome:
        table.add_row("outcome", Text(files.outcome))
    for row in headline(files):
        table.add_row(*row)
    Console(highlight=False).print(table)
