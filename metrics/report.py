"""`write_report`: a self-contained HTML page about a run, made from the files in its directory.

`python -m metrics.report RUN_DIR` writes `RUN_DIR/report.html` and prints its path.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from files import atomic
from metrics.attempts import Attempt, attempts_of, goodput, span_s
from metrics.curves import Curve, curve_chart
from metrics.page import header, note, page, section, tiles
from metrics.report_attempts import attempts_table, nodes_chart
from metrics.report_tables import collective_table, config_facts, facts_table, mesh_picture, strategy_facts
from metrics.run_files import Results, RunFiles, read_run, results_of, series
from metrics.units import UNKNOWN, format_bytes, format_count, format_loss, format_percent, format_seconds
from runtime.command_line import prepare_output

REPORT_FILE = "report.html"
Tile = tuple[str, float | None, Callable[[float], str], str]
TRAIN, VALIDATION, SPEED, WAIT = range(4)  # colours of the curves
BYTES = {  # key of the metrics: label
    "collective_inter_bytes": "a device sends between nodes",
    "collective_intra_bytes": "a device sends inside its node",
    "wire_tx_bytes": "the host of process 0 sent, counted",
    "wire_rx_bytes": "the host of process 0 received, counted",
}


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes `report.html` into a run directory and returns its path; ValueError if it is not a run directory."""
    path = Path(run_dir) / REPORT_FILE
    atomic.replace(path, render(read_run(run_dir)))
    return path


def render(run: RunFiles) -> str:
    """Returns the whole page."""
    results = results_of(run)
    attempts = attempts_of(run.events, results.exit_reason)
    body = "\n".join(
        [
            _header(run, results),
            _tiles(results, _elastic_tile(run, attempts)),
            section("Nodes over time", nodes_chart(attempts) + attempts_table(attempts)) if len(attempts) > 1 else "",
            f'<div class="two">{_loss(run)}{_accuracy(run)}{_dropped(run)}{_speed(run, results)}{_times(run)}'
            f"{_learning_rate(run)}{_norm(run)}{_bytes(run)}</div>",
            _strategy(run),
            section("Mesh", mesh_picture(run)),
            section("Collectives per step", collective_table(run)),
            section("Sample", _sample(run)),
            section("Reproduce", _collapsed(run)),
            f"<footer>{_footer(run)}</footer>",
        ]
    )
    return page(run.name, body)


def _header(run: RunFiles, results: Results) -> str:
    outcome = results.exit_reason or "no outcome recorded"
    words = outcome.lower()
    good = any(word in words for word in ("finish", "complete", "done"))
    bad = any(word in words for word in ("error", "fail", "non-finite", "nan", "diverge", "crash"))
    mood = "bad" if bad else "good" if good else "warn"
    folder = run.run_dir.resolve().name
    date = str(run.environment.get("date", "")).replace("T", " ").replace("+00:00", " UTC")
    about = " · ".join(fact for fact in (_model(run), date, "" if folder == run.name else folder) if fact)
    return header(run.name, outcome, mood, about)


def _model(run: RunFiles) -> str:
    """Returns a short description of the model (`decoder, 4 layers, hidden 128`)."""
    model = run.config.get("model")
    if not isinstance(model, Mapping):
        return ""
    forms = (("kind", "{}"), ("num_layers", "{} layers"), ("hidden", "hidden {}"))
    return ", ".join(form.format(model[key]) for key, form in forms if key in model)


def _tiles(results: Results, elastic: Tile | None) -> str:
    speed_detail = "median" if results.mfu is None else f"median; MFU {format_percent(results.mfu)}"
    skipped = f"{format_count(results.skipped_steps)} skipped" if results.skipped_steps else ""
    quality = ("Bits per byte", results.validation_bits_per_byte, format_loss, "validation")
    if results.validation_accuracy is not None:
        quality = ("Accuracy", results.validation_accuracy, format_percent, "validation")
    facts = (
        ("Training loss", results.loss, format_loss, "at the last step"),
        ("Validation loss", results.validation_loss, format_loss, ""),
        quality,
        (results.speed_unit.capitalize(), results.speed, format_count, speed_detail),
        ("Step time", results.step_time_s, format_seconds, "median"),
        ("Data wait", results.data_wait_s, format_seconds, "median per step"),
        ("Inside nodes", results.intra_bytes, format_bytes, "per device and step"),
        ("Between nodes", results.inter_bytes, format_bytes, "per device and step"),
        ("Steps", results.steps, format_count, skipped),
        elastic or ("Wall time", results.wall_time_s, format_seconds, "of the last attempt"),
    )
    return tiles(
        [
            (label, UNKNOWN if value is None else form(value), "" if value is None else detail)
            for label, value, form, detail in facts
        ]
    )


def _elastic_tile(run: RunFiles, attempts: Sequence[Attempt]) -> Tile | None:
    """Returns the goodput of a run of several attempts; None for one attempt, or if it is unknown."""
    share = goodput(attempts, run.rows) if len(attempts) > 1 else None
    whole = f"of {format_seconds(span_s(attempts))} went into steps that count"
    return None if share is None else ("Goodput", share, format_percent, whole)


def _loss(run: RunFiles) -> str:
    curves = [
        Curve(label="training", colour=TRAIN, points=series(run.rows, "loss")),
        Curve(label="validation", colour=VALIDATION, points=series(run.rows, "validation_loss"), sparse=True),
    ]
    return _chart(run, "Loss", curves, form=lambda value: f"{value:g}")


def _accuracy(run: RunFiles) -> str:
    """Returns the chart of a classifier's accuracy, or nothing for other models."""
    points = series(run.rows, "validation_accuracy")
    curve = Curve(label="validation", colour=VALIDATION, points=points, sparse=True)
    return _chart(run, "Accuracy", [curve], form=format_percent) if points else ""


def _dropped(run: RunFiles) -> str:
    """Returns the chart of the choices that found no room at their experts, or nothing for models without experts."""
    points = series(run.rows, "dropped_share")
    curve = Curve(label="training", colour=TRAIN, points=points)
    return _chart(run, "Dropped choices of experts", [curve], form=format_percent, zero=True) if points else ""


def _speed(run: RunFiles, results: Results) -> str:
    points = series(run.rows, results.speed_unit.replace("/s", "_per_s"))
    curve = Curve(label=results.speed_unit, colour=SPEED, points=points)
    return _chart(run, results.speed_unit.capitalize(), [curve], form=format_count, zero=True)


def _times(run: RunFiles) -> str:
    curves = [
        Curve(label="step time", colour=TRAIN, points=series(run.rows, "step_time_s")),
        Curve(label="waiting for data", colour=WAIT, points=series(run.rows, "data_wait_s")),
    ]
    return _chart(run, "Step time", curves, form=format_seconds, zero=True)


def _learning_rate(run: RunFiles) -> str:
    """Returns the chart of the learning rate, or nothing for an optimizer with a rate of its own."""
    points = series(run.rows, "learning_rate")
    curve = Curve(label="learning rate", colour=TRAIN, points=points)
    return _chart(run, "Learning rate", [curve], form="{:g}".format, zero=True) if points else ""


def _norm(run: RunFiles) -> str:
    """Returns the chart of the norm of what hop two hands on: a gradient, or with some methods an update."""
    gradient, update = series(run.rows, "grad_norm"), series(run.rows, "update_norm")
    curve = Curve(label="norm", colour=TRAIN, points=update or gradient)
    return _chart(run, "Update norm" if update else "Gradient norm", [curve], form="{:g}".format, zero=True)


def _bytes(run: RunFiles) -> str:
    """Returns the chart of what a device sends by the compiled program, and what the host's interfaces counted."""
    curves = [
        Curve(label=label, colour=i, points=series(run.rows, key)) for i, (key, label) in enumerate(BYTES.items())
    ]
    return _chart(run, "Bytes per step", curves, form=format_bytes, zero=True)


def _chart(
    run: RunFiles, title: str, curves: Sequence[Curve], *, form: Callable[[float], str], zero: bool = False
) -> str:
    curves = [curve for curve in curves if curve.points]
    if curves:
        return section(title, curve_chart(curves, form=form, label=f"{title} over steps", zero=zero))
    problem = run.problems.get("metrics.jsonl", "has none of these values")
    return section(title, note(f"metrics.jsonl {problem}."))


def _strategy(run: RunFiles) -> str:
    facts = strategy_facts(run)
    if not facts:
        return section("Strategy", note(f"config.json {run.problems.get('config.json', 'is empty')}."))
    return section("Strategy", facts_table(facts))


def _sample(run: RunFiles) -> str:
    if run.sample is None:
        return note(f"sample.txt {run.problems.get('sample.txt', 'is missing')}.")
    return f"<pre>{escape(run.sample)}</pre>" if run.sample.strip() else note("sample.txt is empty.")


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
        inside = inside or note(f"{file} {run.problems.get(file, 'is empty')}.")
        parts.append(f"<details><summary>{title}</summary>{inside}</details>")
    return "".join(parts)


def _footer(run: RunFiles) -> str:
    notes = [f"{file} {problem}" for file, problem in run.problems.items() if "skipped" in problem]
    return escape("; ".join(["Made from the files in the run directory", *notes]) + ".")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report of the run directory given on the command line."""
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
