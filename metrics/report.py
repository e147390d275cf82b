"""`write_report`: one self-contained page about a run, from the files of its directory; needs no network to read.

`python -m metrics.report RUN_DIR` writes `RUN_DIR/report.html` and prints its path.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from files import atomic
from metrics.charts import Line, line_chart, trend
from metrics.report_tables import collective_table, config_facts, facts_table, mesh_picture, strategy_facts
from metrics.run_files import Results, RunFiles, read_run, results_of, series
from metrics.units import UNKNOWN, format_bytes, format_count, format_loss, format_percent, format_seconds
from palette import SERIES, SERIES_ON_DARK
from runtime.command_line import prepare_output

REPORT_FILE = "report.html"
STYLE_FILE = Path(__file__).with_name("page.css")
LINES = ("train", "validation", "speed", "wait")  # the series of the page's charts, in the order of the palette


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes `report.html` into a run directory and returns its path; ValueError if the folder is not a run."""
    path = Path(run_dir) / REPORT_FILE
    atomic.replace(path, render(read_run(run_dir)))
    return path


def render(run: RunFiles) -> str:
    """Returns the whole page."""
    results = results_of(run)
    body = "\n".join(
        [
            _header(run, results),
            _tiles(results),
            f'<div class="two">{_loss(run)}{_accuracy(run)}{_speed(run, results)}{_times(run)}{_strategy(run)}</div>',
            _section("Mesh", mesh_picture(run)),
            _section("Collectives of one step", collective_table(run)),
            _section("Sample", _sample(run)),
            _section("To run it again", _collapsed(run)),
            f"<footer>{_footer(run)}</footer>",
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)}</title>\n<style>\n{page_style()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def page_style() -> str:
    """Returns the style sheet: the colours of the lines for light and dark, and page.css."""
    light, dark = (
        " ".join(f"--{name}: {colour};" for name, colour in zip(LINES, colours, strict=False))
        for colours in (SERIES, SERIES_ON_DARK)
    )
    colours = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    return colours + STYLE_FILE.read_text(encoding="utf-8")


def _header(run: RunFiles, results: Results) -> str:
    outcome = results.exit_reason or "no outcome recorded"
    words = outcome.lower()
    good = any(word in words for word in ("finish", "complete", "done"))
    bad = any(word in words for word in ("error", "fail", "non-finite", "nan", "diverge", "crash"))
    mood = "bad" if bad else "good" if good else "warn"
    folder = run.run_dir.resolve().name
    date = str(run.environment.get("date", "")).replace("T", " ").replace("+00:00", " UTC")
    about = " · ".join(escape(fact) for fact in (_model(run), date, "" if folder == run.name else folder) if fact)
    return (
        f'<header><h1>{escape(run.name)}</h1><span class="badge {mood}">{escape(outcome)}</span>'
        f'<p class="about">{about}</p></header>'
    )


def _model(run: RunFiles) -> str:
    """Returns the model in a few words (`decoder, 4 layers, hidden 128`)."""
    model = run.config.get("model")
    if not isinstance(model, Mapping):
        return ""
    forms = (("kind", "{}"), ("num_layers", "{} layers"), ("hidden", "hidden {}"))
    return ", ".join(form.format(model[key]) for key, form in forms if key in model)


def _tiles(results: Results) -> str:
    mfu = None if results.mfu is None else f"median; MFU {format_percent(results.mfu)}"
    skipped = f"{format_count(results.skipped_steps)} skipped" if results.skipped_steps else None
    quality = ("Bits per byte", results.validation_bits_per_byte, format_loss, "validation")
    if results.validation_accuracy is not None:
        quality = ("Accuracy", results.validation_accuracy, format_percent, "validation")
    tiles = (
        ("Training loss", results.loss, format_loss, "at the last step"),
        ("Validation loss", results.validation_loss, format_loss, None),
        quality,
        (results.speed_unit[0].upper() + results.speed_unit[1:], results.speed, format_count, mfu or "median"),
        ("Step time", results.step_time_s, format_seconds, "median"),
        ("Data wait", results.data_wait_s, format_seconds, "median of a step"),
        ("Inside nodes", results.intra_bytes, format_bytes, "per device and step"),
        ("Between nodes", results.inter_bytes, format_bytes, "per device and step"),
        ("Steps", results.steps, format_count, skipped),
        ("Wall time", results.wall_time_s, format_seconds, "of the last start"),
    )
    cells = []
    for label, value, form, detail in tiles:
        text = UNKNOWN if value is None else form(value)
        under = f'<div class="detail">{escape(detail)}</div>' if detail and value is not None else ""
        cells.append(
            f'<div class="tile"><div class="label">{escape(label)}</div>'
            f'<div class="value">{escape(text)}</div>{under}</div>'
        )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _loss(run: RunFiles) -> str:
    train, validation = series(run.rows, "loss"), series(run.rows, "validation_loss")
    lines = _with_trend("training", "train", train)
    if validation:
        lines.append(Line(label="validation", style="validation", points=validation, dots=True))
    return _chart(run, "Loss", lines, form=lambda value: f"{value:g}", label="loss over steps")


def _accuracy(run: RunFiles) -> str:
    """Returns the chart of a classifier's accuracy, nothing for other models."""
    points = series(run.rows, "validation_accuracy")
    if not points:
        return ""
    line = Line(label="validation", style="validation", points=points, dots=True)
    return _chart(run, "Accuracy", [line], form=format_percent, label="accuracy over steps")


def _speed(run: RunFiles, results: Results) -> str:
    title = results.speed_unit[0].upper() + results.speed_unit[1:]
    points = series(run.rows, results.speed_unit.replace("/s", "_per_s"))
    lines = _with_trend(results.speed_unit, "speed", points)
    return _chart(run, title, lines, form=format_count, label=f"{results.speed_unit} over steps", zero=True)


def _times(run: RunFiles) -> str:
    lines = _with_trend("step time", "train", series(run.rows, "step_time_s"))
    lines += _with_trend("waiting for data", "wait", series(run.rows, "data_wait_s"))
    return _chart(run, "Step time", lines, form=format_seconds, label="step time over steps", zero=True)


def _with_trend(label: str, style: str, points: Sequence[tuple[float, float]]) -> list[Line]:
    """Returns the raw line; a long one faint, with its trend over it."""
    if len(points) < 200:
        return [Line(label=label, style=style, points=points)] if points else []
    return [
        Line(label=label, style=style, points=points, faint=True),
        Line(label=label, style=style, points=trend(points), trend=True),
    ]


def _chart(run: RunFiles, title: str, lines: Sequence[Line], **how: Any) -> str:
    if not lines:
        problem = run.problems.get("metrics.jsonl")
        why = f"metrics.jsonl {problem}." if problem else "metrics.jsonl has no such numbers."
        return _section(title, f'<p class="note">{escape(why)}</p>')
    return _section(title, line_chart(lines, **how))


def _strategy(run: RunFiles) -> str:
    facts = strategy_facts(run)
    if not facts:
        return _section(
            "Strategy", f'<p class="note">config.json {escape(run.problems.get("config.json", "is empty"))}.</p>'
        )
    return _section("Strategy", facts_table(facts))


def _sample(run: RunFiles) -> str:
    if run.sample is None:
        return f'<p class="note">sample.txt {escape(run.problems.get("sample.txt", "is missing"))}.</p>'
    return f"<pre>{escape(run.sample)}</pre>" if run.sample.strip() else '<p class="note">sample.txt is empty.</p>'


def _collapsed(run: RunFiles) -> str:
    parts = []
    command = run.environment.get("command")
    if command:
        text = " ".join(map(str, command)) if isinstance(command, list) else str(command)
        parts.append(f"<pre>{escape(text)}</pre><br>")
    for title, file, values in (
        ("Environment", "environment.json", run.environment),
        ("Configuration", "config.json", run.config),
    ):
        inside = facts_table(config_facts(values)) if values else ""
        note = f'<p class="note">{file} {escape(run.problems.get(file, "is empty"))}.</p>'
        parts.append(f"<details><summary>{title}</summary>{inside or note}</details>")
    return "".join(parts)


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


def _footer(run: RunFiles) -> str:
    notes = [f"{file} {problem}" for file, problem in run.problems.items() if "passed over" in problem]
    return escape("; ".join(["Written from the files of the run directory", *notes]) + ".")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report of the run that the command line names."""
    prepare_output()
    parser = argparse.ArgumentParser(
        prog="python -m metrics.report", description="Writes report.html into a run directory."
    )
    parser.add_argument("run_dir", help="the --workdir of a run")
    try:
        print(write_report(parser.parse_args(arguments).run_dir))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
