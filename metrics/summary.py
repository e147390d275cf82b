"""`print_summary`: the table printed at the end of a run."""

from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metrics.run_files import Results, read_run, results_of
from metrics.units import format_bytes, format_count, format_loss, format_percent, format_seconds


def print_summary(run_dir: Path, console: Console | None = None) -> None:
    """Prints the results of a run directory; unknown numbers are omitted."""
    files = read_run(run_dir)
    table = Table(title=Text(files.name), box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    for label, value in headline(results_of(files)):
        table.add_row(Text(label), Text(value))
    (Console(highlight=False) if console is None else console).print(table)


def headline(results: Results) -> list[tuple[str, str]]:
    """Returns the (label, text) pairs of the known numbers, the important ones first."""
    pairs = [] if results.exit_reason is None else [("outcome", results.exit_reason)]
    numbers: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("training loss", results.loss, format_loss),
        ("validation loss", results.validation_loss, format_loss),
        ("validation bits per byte", results.validation_bits_per_byte, format_loss),
        ("validation accuracy", results.validation_accuracy, format_percent),
        ("steps", results.steps, format_count),
        (results.speed_unit, results.speed, format_count),
        ("median step time", results.step_time_s, format_seconds),
        ("median data wait", results.data_wait_s, format_seconds),
        ("model FLOP/s utilisation", results.mfu, format_percent),
        ("inside nodes, per device and step", results.intra_bytes, format_bytes),
        ("between nodes, per device and step", results.inter_bytes, format_bytes),
        ("wall time of the last attempt", results.wall_time_s, format_seconds),
        ("skipped steps", results.skipped_steps or None, format_count),
    ]
    return pairs + [(label, form(value)) for label, value, form in numbers if value is not None]
