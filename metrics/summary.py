"""`print_summary`: the table printed at the end of a run."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metrics.run_files import headline, read_run, results_of


def print_summary(run_dir: Path, console: Console | None = None) -> None:
    """Prints the results of a run directory; unknown numbers are omitted."""
    files = read_run(run_dir)
    table = Table(title=Text(files.name), box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    table.add_column(style="dim")
    results = results_of(files)
    if results.exit_reason:
        table.add_row("outcome", Text(results.exit_reason))
    for row in headline(results):
        table.add_row(*row)
    (Console(highlight=False) if console is None else console).print(table)
