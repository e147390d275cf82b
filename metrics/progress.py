"""`Progress`: a live progress bar in a terminal, elsewhere a plain line every ten seconds; `print_summary`: its end.

No thread draws: `update` itself redraws, at most every half second, so that it costs the training loop almost nothing.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from metrics.run_files import headline, read_run
from metrics.units import format_bytes, format_count, format_loss, format_percent, format_seconds

DRAW_EVERY_S = 0.5
PRINT_EVERY_S = 10.0
RECENT = 0.1  # weight of the latest step time in the running average that gives the ETA


class Progress:
    """Shows the progress of a run of `total_steps`, which resumes after `start_step`."""

    def __init__(self, total_steps: int, start_step: int = 0, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._step = start_step
        self._scalars: dict[str, float] = {}
        self._last_update_s: float | None = None
        self._recent_step_time_s: float | None = None
        self._shown_s = -1e9
        self._shown_step: int | None = None
        self._console = Console(highlight=False) if console is None else console
        self._live: Live | None = None
        if (sys.stdout.isatty() if console is None else True) and self._console.is_interactive:
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._draw)
            self._live.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes the values of `step` (keys of `metrics.jsonl`); a key without a new value still shows its last one."""
        now = time.monotonic()
        self._follow_speed(step, now)
        self._step = step
        self._scalars.update(scalars)
        if self._live is not None:
            if now - self._shown_s >= DRAW_EVERY_S or step >= self._total_steps:
                self._shown_s = now
                self._live.refresh()
        elif now - self._shown_s >= PRINT_EVERY_S or step >= self._total_steps:
            self._print_line(now)

    def print(self, text: str) -> None:
        """Prints text unchanged, above the bar in a terminal."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Shows the final values and restores the terminal; a second call does nothing."""
        if self._live is not None:
            self._live.refresh()
            self._live.stop()
            self._live = None
        elif self._scalars and self._shown_step != self._step:
            self._print_line(time.monotonic())

    def _follow_speed(self, step: int, now: float) -> None:
        """Updates the running average of the time per step, validations and checkpoints included."""
        if self._last_update_s is not None and step > self._step:
            step_time_s = (now - self._last_update_s) / (step - self._step)
            recent = self._recent_step_time_s
            self._recent_step_time_s = step_time_s if recent is None else recent + RECENT * (step_time_s - recent)
        self._last_update_s = now

    def _eta(self) -> str | None:
        if self._recent_step_time_s is None or self._step >= self._total_steps:
            return None
        seconds = (self._total_steps - self._step) * self._recent_step_time_s
        return f"{seconds:.0f} s" if seconds < 59.5 else format_seconds(seconds)

    def _print_line(self, now: float) -> None:
        self._shown_s, self._shown_step = now, self._step
        parts = [f"step {self._step}/{self._total_steps}"]
        parts += [f"{label} {value}" for label, value in shown(self._scalars)]
        eta = self._eta()
        self.print("  ".join(parts + ([] if eta is None else [f"ETA {eta}"])))

    def _draw(self) -> Group:
        """Returns the bar and below it two lines of values, the second one with the byte counts."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        share = self._step / self._total_steps if self._total_steps else 1.0
        eta = self._eta()
        bar.add_row(
            Text(f"step {self._step}/{self._total_steps}", style="bold"),
            ProgressBar(total=max(1, self._total_steps), completed=self._step, complete_style="cyan"),
            Text(f"{share:4.0%}" + ("" if eta is None else f"  ETA {eta}")),
        )
        lines = [Text(no_wrap=True, overflow="ellipsis") for _ in range(2)]
        for label, value in shown(self._scalars):
            line = lines[label in ("inside nodes", "between nodes", "hop two")]
            line.append("  " if line else "")
            line.append(f"{label} ", style="dim")
            line.append(value)
        return Group(bar, *(line for line in lines if line))


def shown(scalars: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns the (label, text) pairs to show for the keys in `scalars`."""
    pairs = []
    for key, label, form in (
        ("loss", "loss", format_loss),
        ("validation_loss", "validation", format_loss),
        ("validation_accuracy", "accuracy", format_percent),
        ("tokens_per_s", "tokens/s", format_count),
        ("examples_per_s", "examples/s", format_count),
        ("step_time_s", "step", format_seconds),
        ("data_wait_s", "data wait", format_seconds),
        ("mfu", "MFU", format_percent),
        ("collective_intra_bytes", "inside nodes", format_bytes),
        ("collective_inter_bytes", "between nodes", format_bytes),
    ):
        if key in scalars:
            pairs.append((label, form(float(scalars[key]))))
    if scalars.get("hop_two_ratio"):  # not its payload: a device keeps a part of that, or sends it several times
        pairs.append(("hop two", f"{scalars['hop_two_ratio']:.3g} times smaller"))
    if scalars.get("skipped_steps"):
        pairs.append(("skipped", format_count(scalars["skipped_steps"])))
    return pairs


def print_summary(run_dir: Path, console: Console | None = None) -> None:
    """Prints the results of a run directory; unknown numbers are omitted."""
    files = read_run(run_dir)
    table = Table(title=Text(files.name), box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    table.add_column(style="dim")
    if files.outcome:
        table.add_row("outcome", Text(files.outcome))
    for row in headline(files):
        table.add_row(*row)
    (Console(highlight=False) if console is None else console).print(table)
