"""`write_report`: a self-contained HTML page about a run, made from the files in its directory.

`python -m training.metrics.report RUN_DIR` writes `RUN_DIR/report.html` and prints its path.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.command_line import OneLineParser, complain, prepare_output
from runtime.events import Event
from runtime.files import atomic, run_directory
from runtime.files.json_objects import JsonMapping
from runtime.files.paths import user_path
from training.metrics.attempts import Attempt, attempts_of, attempts_rows, goodput, nodes_chart, span_s
from training.metrics.charts import Chart, Curve, curve_chart
from training.metrics.page import render
from training.metrics.run_files import RunFiles, headline, mean_over_steps, number, read_run, series
from training.metrics.units import UNKNOWN, format_bytes, format_count, format_percent, format_seconds


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart of the page: keys of the metrics with their labels. It is shown if the run has values for any key."""

    title: str
    curves: Mapping[str, str]
    form: Callable[[float], str]
    zero: bool = True  # the axis starts at zero


LOSS = "Loss"
PANELS = (
    Panel(title=LOSS, curves={"loss": "training", "validation_loss": "validation"}, form="{:g}".format, zero=False),
    Panel(title="Accuracy", curves={"validation_accuracy": "validation"}, form=format_percent, zero=False),
    Panel(title="Dropped choices of experts", curves={"dropped_share": "training"}, form=format_percent),
    Panel(title="Tokens/s", curves={"tokens_per_s": "tokens/s"}, form=format_count),
    Panel(title="Examples/s", curves={"examples_per_s": "examples/s"}, form=format_count),
    Panel(
        title="Step time", curves={"step_time_s": "step time", "data_wait_s": "waiting for data"}, form=format_seconds
    ),
    Panel(title="Learning rate", curves={"learning_rate": "learning rate"}, form="{:g}".format),
    Panel(title="Gradient norm", curves={"grad_norm": "norm"}, form="{:g}".format),
    Panel(title="Update norm", curves={"update_norm": "norm"}, form="{:g}".format),
    Panel(
        title="Bytes per step",
        curves={
            "collective_inter_bytes": "a device sends between nodes",
            "collective_intra_bytes": "a device sends inside its node",
            "wire_tx_bytes": "the host of process 0 sent, counted",
            "wire_rx_bytes": "the host of process 0 received, counted",
        },
        form=format_bytes,
    ),
)


def write_report(run: RunFiles) -> Path:
    """Writes `report.html` into a run's directory and returns its path."""
    path = run.run_dir / run_directory.REPORT
    atomic.replace(path, run_page(run))
    return path


def run_page(run: RunFiles) -> str:
    """Returns the whole page."""
    attempts = attempts_of(run.events, run.outcome)
    attempts = attempts if len(attempts) > 1 else []
    skipped = [f"{file} {problem}" for file, problem in run.problems.items() if "skipped" in problem]
    return render(
        "training/metrics/run.html",
        title=run.name,
        heading=run.name,
        badge=run.outcome or "no outcome recorded",
        mood=_mood(run.outcome),
        about=_about(run),
        footer="; ".join(["Made from the files in the run directory", *skipped]) + ".",
        facts=_tiles(run, attempts),
        nodes=nodes_chart(attempts) if attempts else None,
        attempts=attempts_rows(attempts) if attempts else None,
        charts=charts_of(run),
        strategy=strategy_facts(run),
        mesh_png=run.mesh_png,
        collectives=collective_table(run),
        collectives_note=collectives_note(run),
        sample=run.sample,
        command=run.environment.get("command"),
        files=[
            ("Environment", run_directory.ENVIRONMENT, facts_of(run.environment)),
            ("Configuration", run_directory.CONFIG, facts_of(run.config)),
        ],
        problems=run.problems,
    )


def _mood(outcome: str) -> str:
    words = outcome.lower()
    if any(word in words for word in ("error", "fail", "non-finite", "nan", "diverge", "crash")):
        return "bad"
    return "good" if any(word in words for word in ("finish", "complete", "done")) else "warn"


def _about(run: RunFiles) -> str:
    """Returns the line below the title: the model (`decoder, 4 layers, hidden 128`), the date and the folder."""
    model = run.config.get("model")
    forms = {"kind": "{}", "num_layers": "{} layers", "hidden": "hidden {}"}
    model = model if isinstance(model, Mapping) else {}
    words = ", ".join(form.format(model[key]) for key, form in forms.items() if key in model)
    folder = run.run_dir.resolve().name
    date = str(run.environment.get("date", "")).replace("T", " ").replace("+00:00", " UTC")
    return " · ".join(fact for fact in (words, date, "" if folder == run.name else folder) if fact)


def _tiles(run: RunFiles, attempts: Sequence[Attempt]) -> list[tuple[str, str, str]]:
    """Returns the headline numbers, and the goodput of a run of several attempts if known.

    The goodput of an independent replica is unknown: while it was away the other replicas did steps, and its rows do
    not distinguish these steps from its own.
    """
    tiles = [(label[0].upper() + label[1:], value, detail) for label, value, detail in headline(run)]
    sharding = run.config.get("sharding")
    is_replica = isinstance(sharding, Mapping) and sharding.get("replicas") == "independent"
    if not is_replica and (share := goodput(attempts, run.rows)) is not None:
        whole = f"of {format_seconds(span_s(attempts))} went into steps that count"
        tiles.append(("Goodput", format_percent(share), whole))
    return tiles


def charts_of(run: RunFiles) -> dict[str, Chart]:
    """Returns the charts with values, by title. An empty loss chart has a note with the reason."""
    charts = {}
    keys = sorted({key for row in run.rows for key in row if key.startswith("validation_loss/")})
    sets = {key: key.partition("/")[2] for key in keys}
    for panel in (*PANELS, Panel(title="Validation losses", curves=sets, form="{:g}".format, zero=False)):
        curves = [
            Curve(label=label, points=points, sparse=key.startswith("validation"))
            for key, label in panel.curves.items()
            if (points := series(run.rows, key))
        ]
        if curves:
            label = f"{panel.title} over steps"
            charts[panel.title] = curve_chart(curves, form=panel.form, label=label, zero=panel.zero)
        elif panel.title == LOSS:
            problem = run.problems.get(run_directory.METRICS, "has none of these values")
            charts[panel.title] = Chart(note=f"metrics.jsonl {problem}.")
    return charts


# ------------------------------------------------------------------------------------------------------ tables


def facts_of(values: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Returns a nested dict flattened to (`a.b.c`, value) pairs."""
    facts: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        facts += facts_of(value, f"{name}.") if isinstance(value, Mapping) and value else [(name, _text(value))]
    return facts


def strategy_facts(run: RunFiles) -> list[tuple[str, str]]:
    """Returns the settings of sharding, its ablations and batch, with the resulting devices and mesh."""
    known = {key: run.config.get(key) for key in ("sharding", "ablation", "batch")}
    known |= {key: run.environment.get(key) for key in ("devices", "mesh")}
    return [(name, text) for name, text in facts_of(known) if text != UNKNOWN]


def collective_table(run: RunFiles) -> list[tuple[str, ...]]:
    """Returns a header, the collectives of the compiled step, largest first, and their sum."""
    entries = run.collectives.get("collectives")
    entries = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    if not entries:
        return []
    sent = [tuple(number(entry.get(key)) or 0.0 for key in ("inter_bytes", "intra_bytes")) for entry in entries]
    order = sorted(range(len(entries)), key=lambda i: sent[i], reverse=True)
    return [
        ("Name", "Over axes", "Kind", "Type", "Payload", "Times per step", "Between nodes", "Inside nodes"),
        *((*_collective(entries[i]), *map(_sent_bytes, sent[i])) for i in order),
        ("Sum", *[""] * 5, *(_sent_bytes(sum(counts)) for counts in zip(*sent, strict=True))),
    ]


def _collective(entry: Mapping[str, object]) -> list[str]:
    payload, times = number(entry.get("payload_bytes")), number(entry.get("times"))
    return [
        *(_text(entry.get(key)) for key in ("name", "axes", "kind", "dtype")),
        UNKNOWN if payload is None else format_bytes(payload),
        UNKNOWN if times is None else format_count(times),
    ]


def _sent_bytes(count: float) -> str:
    return format_bytes(count) if count else UNKNOWN


def collectives_note(run: RunFiles) -> str:
    """Returns the source of the table, or why it is missing, and the bytes that network interfaces counted, if any."""
    if not collective_table(run):
        problem = run.collectives.get("problem")
        why = f"says that {problem}" if problem else "lists no collectives: the step sends nothing"
        return f"collectives.json {run.problems.get('collectives.json', why)}."
    said = "From the compiled program. Bytes are per device and step."
    if profiles := [event for event in run.events if event["event"] == Event.PROFILED]:
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # another version wrote it
            said += f" {profile_text(profiles[-1])} Exposed: the device computes nothing meanwhile."
    wire = ("wire_tx_bytes", "wire_rx_bytes")
    sent, received = (mean_over_steps(run.rows, key) for key in wire)
    if sent is None or received is None:
        return said
    counted = f"{format_bytes(sent)} sent, {format_bytes(received)} received"
    return f"{said} Counted by this node's network interfaces, average per step: {counted}."


def profile_text(event: JsonMapping) -> str:
    """Returns the text of an event of a profile, with fields as in runtime/events.py."""
    first, last = event["step"], event["step"] + event["steps"] - 1
    times = [f"{format_seconds(event['step_s'])} a step"]
    times += [
        f"{format_seconds(time['total_s'])} in collectives {level} ({format_seconds(time['exposed_s'])} exposed)"
        for level, time in event["collectives"].items()
    ]
    return f"Profile of steps {first} to {last}: {', '.join(times)}."


def _text(value: object) -> str:
    """Returns a value as text: booleans as yes and no, lists with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or UNKNOWN
    if isinstance(value, float):
        return f"{value:g}"
    return UNKNOWN if value is None or value == "" else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report of the run directory given on the command line."""
    prepare_output()
    parser = OneLineParser(
        prog="python -m training.metrics.report", description="Writes report.html into a run directory."
    )
    parser.add_argument("run_dir", type=user_path, help="the --workdir of a run")
    try:
        print(write_report(read_run(parser.parse_args(arguments).run_dir)))
    except (ValueError, OSError) as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
