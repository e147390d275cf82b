"""The tables and charts of the measured pages, by the name that a page gives them; lab/pages.py writes them."""

import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from matplotlib.figure import Figure

from lab.benchmarks import (
    accuracy,
    all_reduce,
    elastic,
    gpu,
    losses,
    overlap_table,
    planner_gpu,
    planner_records,
    planner_replicas,
    planner_validation,
    published_steps,
    replica_events,
    replica_links,
    replicas,
    starts,
    time_to_loss_table,
    utilisation,
)
from lab.benchmarks.local_steps import dense_of, run_of
from lab.benchmarks.names import in_times, on_pages
from lab.benchmarks.scores import (
    DENSE,
    PEER,
    SCALE_MODEL,
    above_compute_s,
    best_ratio,
    by_themselves,
    bytes_per_s,
    codecs_of,
    commits_of,
    compute_s,
    faster_than_dense,
    names_of,
    optimizer_of,
    ours_of,
    paired,
    rates_of,
    ratio,
    runs_of,
    sent_bytes,
    step_time,
)
from lab.plots import draw_bars, draw_headline, draw_stacked, rate_in_words
from lab.records import SAME, Line, Range, Records, middle, same_until, spread
from runtime.files.pages import markdown

LEVELS = ("inter", "intra")
NOT_SHOWN = (
    "--events",
    "--seed",
    "--workdir",
    "--reference",
    "--smaller",
)  # options of chaos
TITLE = "seconds a step, measured on emulated nodes"
PAIRS = (  # the same strategy, ours and PyTorch's
    ("mics(2)", "pytorch hsdp"),
    ("mics(2) kept dots", "pytorch hsdp kept dots"),
    ("zero3", "pytorch zero3"),
    ("ddp", "pytorch ddp"),
    ("ddp dots", "pytorch ddp dots"),
)


def text(found: Range | None, digits: int = 1) -> str:
    """Returns a value with its range, or `-` if it is missing."""
    return found.text(digits) if found else "-"


# --------------------------------------------------------------------------------------------------- strategies


def strategy_bytes(lines: Sequence[Line]) -> str:
    """Returns what a node sends in a step under each strategy: by formula, in the program and on the wire."""
    rows = []
    for name in names_of(lines):
        sizes = [
            sent_bytes(lines, name, key) for key in ("formula_inter_bytes", "compiled_inter_bytes", "wire_tx_bytes")
        ]
        cells = [f"{size / 1e6:.1f}" for size in sizes] + [f"{sizes[2] / sizes[0]:.3f}"]
        if "auto" in name:  # XLA chose the collectives
            cells[0] = cells[3] = "-"
        rows.append([name, *cells])
    return markdown(["strategy", "formula MB", "compiled MB", "on the wire MB", "wire / formula"], rows)


def held_and_sent(lines: Sequence[Line]) -> str:
    """Returns what a device holds between steps under each strategy, and what it sends in a step."""
    rows = []
    for line in lines:
        held, sent = line["state_bytes"], [[c[f"{level}_bytes"] for c in line["collectives"]] for level in LEVELS]
        sizes = [held["parameters"] + held["optimizer"], *map(sum, sent)]
        rows.append([f"`{line['name']}`", *(f"{size / 1e6:.2f} MB" for size in sizes)])
    return markdown(["strategy", "stored", "sent between nodes", "sent inside the node"], rows)


def step_times(lines: Sequence[Line], rate: str) -> str:
    """Returns the step times of every strategy at a rate, compared with those of runs at the same commits."""
    flat, rows = runs_of(lines, "zero3 flat", rate), []
    for name in names_of(lines):
        if runs := runs_of(lines, name, rate):
            cells = [name, str(len(runs)), commits_of(runs), text(step_time(runs))]
            cells += [text(ratio(flat, runs), 2), text(above_compute_s(lines, name, rate))]
            link_s = sent_bytes(lines, name, "wire_tx_bytes") / bytes_per_s(rate)  # at full rate
            rows.append([*cells, f"{link_s:.1f}"])
    heads = [f"at {rate}", "runs", "commits", "s / step", "zero3 flat / this", "above compute only, s", "link, s"]
    return markdown(heads, rows)


def scale_model(lines: Sequence[Line]) -> str:
    """Returns the step times of the scale model."""
    (rate,) = rates_of(lines)
    flat, rows = runs_of(lines, "zero3 flat", rate), []
    for name in names_of(lines):
        runs = runs_of(lines, name, rate)
        rows.append([name, str(len(runs)), text(step_time(runs)), text(ratio(flat, runs), 2)])
    return markdown([f"strategy at {rate}", "runs", "s / step", "zero3 flat / this"], rows)


def pytorch(lines: Sequence[Line]) -> str:
    """Returns PyTorch's strategies and ours, run in one session, and their ratios."""
    rates, rows = rates_of(lines), []
    for name in names_of(lines):
        cells = [text(step_time(runs_of(lines, name, rate))) for rate in rates]
        rows.append([name, *cells, f"{sent_bytes(lines, name, 'wire_tx_bytes') / 1e6:.0f}"])
    for ours, theirs in PAIRS:
        ratios = [ratio(runs_of(lines, theirs, rate), runs_of(lines, ours, rate)) for rate in rates]
        rows.append([f"{theirs} / {ours}", *(text(one, 2) for one in ratios), ""])
    rows.append(["best of theirs / best of ours", *(text(best_ratio(lines, rate), 2) for rate in rates), ""])
    return markdown(["", *(f"s / step at {rate}" for rate in rates), "wire MB"], rows)


# ------------------------------------------------------------------------------------------------------- codecs


def codec_steps(steps: Sequence[Line]) -> str:
    """Returns the steps with each codec at one rate; times are compared between runs of one commit and optimizer."""
    runs = {name: [line for line in steps if line["codec"] == name] for name in codecs_of(steps)}
    wire = {name: median(line["wire_tx_bytes"] for line in of) for name, of in runs.items()}
    rows = []
    for name, of in runs.items():
        cells = [name, str(len(of)), commits_of(of), optimizer_of(of[0]), f"{wire[name] / 1e6:.2f}"]
        cells += [f"{wire[DENSE] / wire[name]:.2f}", text(step_time(of), 2), text(faster_than_dense(steps, name), 2)]
        first, last = (median(line["losses"][i] for line in of) for i in (0, -1))
        rows.append([*cells, f"{first:.3f}, {last:.3f}"])
    heads = ["codec", "runs", "commits", "optimizer", "a node sends, MB a step", "none / this", "s a step"]
    return markdown([*heads, "none / this", "loss of the first and the last step"], rows)


def codec_accuracy(task: str, lines: Sequence[Line]) -> str:
    """Returns a row per method of a task, with differences from the dense runs of the same seed."""
    classifies, rows = task == "digits", []
    methods = accuracy.methods(task)
    runs = {name: [line for line in lines if (line["task"], line["method"]) == (task, name)] for name in methods}
    for name, method in methods.items():
        if not runs[name] or not runs[method.against]:
            continue
        smaller = method.times_smaller(runs[name][-1].get("all_reduce_ratio", 1.0))
        cells = [on_pages(name), in_times(smaller), spread([line["validation_loss"] for line in runs[name]], ".3f")]
        cells += [spread([line["validation_accuracy"] for line in runs[name]], ".1%")] if classifies else []
        pairs = paired(runs[name], runs[method.against])
        rows.append([*cells, "" if name == method.against else spread(pairs, "+z.3f")])
    heads = [task, "times smaller", "validation loss", *(["accuracy"] if classifies else []), "minus dense, by seed"]
    return markdown(heads, rows)


def local_steps(lines: Sequence[Line]) -> str:
    """Returns a row per setting of local SGD, beside the dense AdamW runs of lowest loss with its seeds."""
    rows = []
    dense = [line for line in lines if line["dense"] and line["optimizer"] == "adamw"]
    for run in sorted(set(map(run_of, lines))):
        alike = [line for line in lines if run_of(line) == run]
        for line in sorted(alike, key=lambda line: (line["optimizer"], not line["dense"], line["inner_steps"])):
            best = min((x["validation_losses"] for x in dense if run_of(x) == dense_of(line)), key=sum, default=[])
            losses = line["validation_losses"]
            pairs = [(loss - other) / other for loss, other in zip(losses, best, strict=True)]
            settings = ["dense", "", "", ""]
            if not line["dense"]:
                settings = [*(f"{line[name]:g}" for name in ("inner_steps", "momentum", "rate")), line["codec"]]
                settings[0] += ", by rate" if line.get("follows_rate") else ""
            kept = ", mean state" if line.get("state") == "mean" else ""
            kept += f", momentum {line['inner_momentum']:g}" if line.get("inner_momentum") else ""
            length = f"{run[0]}, beside {line['beside']}" if line.get("beside") else str(run[0])
            cells = [length, ", ".join(map(str, run[1])), line["optimizer"] + kept, f"{line['learning_rate']:g}"]
            cells += [*settings, in_times(line["times_smaller"]), spread(losses, ".3f"), spread(pairs, "+z.1%")]
            rows.append(cells)
    heads = ["steps", "seeds", "optimizer", "learning rate", "H", "outer momentum", "outer rate", "codec"]
    return markdown([*heads, "times smaller", "validation loss", "minus dense AdamW, by seed"], rows)


# --------------------------------------------------------------------------------------------------- elasticity


def kill_matrix(lines: Sequence[Line]) -> str:
    """Returns what each event of the matrix cost; older lines do not have the pause."""
    rows = []
    for case in dict.fromkeys(elastic.MATRIX):
        of = [line for line in lines if line["title"] == case.title]
        if not of:
            rows.append([case.title, case.aim, "0", "not measured", *[""] * 7])
            continue
        lost = ", ".join(map(str, sorted({line["lost_steps"] for line in of})))
        phases = [[line["phases"][name] for line in of] for name in ("noticed", "stopped", "started", "restored")]
        # old lines have a sentence as their source: "memory (3 of 3 nodes had it)", "its checkpoint"
        sources = sorted({line["source"].partition(" (")[0].removeprefix("its ") for line in of})
        pauses = [line.get("pause_s") for line in of]
        times = map(middle, [[line["next_step_s"] for line in of], pauses, *phases])
        rows.append([case.title, case.aim, str(len(of)), lost, *times, ", ".join(sources)])
    heads = ["event", "aim: lost, seconds", "events", "lost", "seconds", "pause", "noticed", "ended", "started"]
    return markdown([*heads, "restored", "state from"], rows)


def chaos_runs(lines: Sequence[Line]) -> str:
    """Returns each run of lab.chaos: its options, and how far it ended from an undisturbed one."""
    rows = []
    for line in lines:
        loads = [event["load"] for event in line["events"]]
        words = [f"--events={len(line['events'])}", f"--seed={line.get('seed', 0)}"]
        given = shlex.split(line["command"])[3:]  # behind `python -m lab.chaos`
        words += [word for word in given if word.partition("=")[0] not in NOT_SHOWN]
        cells = [f"`{shlex.join(words)}`", str(line["steps"])]
        cells += [f"{line['loss_difference']:.1g}", f"{line['parameter_difference']:.1g}"]
        rows.append([*cells, f"{min(loads):.0f} to {max(loads):.0f}", line["commit"][:7] + line.get("patch", "")])
    return markdown(["options", "steps", "loss", "parameter", "load average", "commit"], rows)


def chaos_events(lines: Sequence[Line]) -> str:
    """Returns the events of all runs of lab.chaos by kind."""
    found, rows = defaultdict[str, list[Line]](list), []
    for line in lines:
        for event in line["events"]:
            found[event["kind"]].append(event)
    for kind, of in sorted(found.items()):
        lost = ", ".join(str(event["lost_steps"]) for event in of)
        rows.append([f"`{kind}`", str(len(of)), middle([event["next_step_s"] for event in of]), lost])
    return markdown(["kind", "events", "seconds", "steps lost"], rows)


# --------------------------------------------------------------------------------------------- Dynamic Training


def changing_nodes(lines: Sequence[Line]) -> str:
    """Returns a row per run: restarts, steps done again, the last validation, and how long the losses stay equal."""
    by_run, rows = {(line["seed"], line["kind"]): line for line in lines}, []
    for seed in sorted({line["seed"] for line in lines}):
        for kind in ("fixed", "fluctuating", "control"):
            line, end = by_run[seed, kind], by_run[seed, kind]["validations"][-1]
            cells = [str(seed), kind, " ".join(str(attempt["nodes"]) for attempt in line["starts"])]
            cells += [str(len(line["starts"]) - 1), str(line["steps_again"])]
            cells += [f"{end['validation_accuracy']:.2%}", f"{end['validation_loss']:.4f}"]
            step, before = same_until(by_run[seed, "fixed"]["losses"], line["losses"])
            rows.append([*cells, *(["", ""] if kind == "fixed" else [str(step or "none"), f"{before:.0e}"])])
    heads = ["seed", "run", "nodes", "restarts", "steps repeated", "accuracy", "validation loss"]
    heads += [f"first step whose loss is not that of `fixed` to {SAME:.0e}", "largest difference before"]
    return markdown(heads, rows)


# ----------------------------------------------------------------------------------------------------- pipelines


def bubble(line: Line) -> str:
    """Returns a row for each number of micro-batches; a ratio is the mean of the rounds', with their range."""
    stages, found = line["stages"], {int(a): runs for a, runs in line["by_micro_batches"].items()}
    most = max(found)
    each = {a: [seconds / a for seconds in runs["stages"]["cpu_seconds"]] for a, runs in found.items()}
    ticks = {a: (a + stages - 1) / a for a in found}
    rows = []
    for a, runs in found.items():
        seconds = runs["stages"]["seconds"]
        slower = [one / other for one, other in zip(each[a], each[most], strict=True)]
        over = [one * a / other for one, other in zip(each[a], runs["none"]["cpu_seconds"], strict=True)]
        cells = [f"{a}", f"{(stages - 1) / (a + stages - 1):.1%}", f"{min(seconds):.2f} to {max(seconds):.2f} s"]
        cells += [spread(slower) if a < most else "1", f"{ticks[a] / ticks[most]:.2f}", spread(over)]
        rows.append(cells)
    over_most = f"over that of A = {most}"
    heads = ["A", "bubble (S-1)/(A+S-1)", f"step, {len(each[most])} rounds", f"CPU time a micro-batch, {over_most}"]
    return markdown([*heads, f"(A+S-1)/A, {over_most}", "CPU time, over no pipeline"], rows)


# ------------------------------------------------------------------------------------------------------ the charts


def draw_step_times(lines: Sequence[Line]) -> Figure:
    """Draws the step time of every strategy, one bar per rate, with the range of the steps."""
    names, compute = names_of(lines), compute_s(lines)
    series = {rate_in_words(rate): [step_time(runs_of(lines, n, rate)) for n in names] for rate in rates_of(lines)}
    line = {"line": compute.value, "line_label": "compute only"} if compute else {}
    return draw_bars(names, series, TITLE, digits=1, **line)


def draw_bytes(lines: Sequence[Line], names: Sequence[str]) -> Figure:
    """Draws the bytes per step that a node sends to other nodes, and those between its devices."""
    levels = {"between nodes": "compiled_inter_bytes", "inside the node": "compiled_intra_bytes"}
    series = {level: [sent_bytes(lines, name, key) / 1e6 for name in names] for level, key in levels.items()}
    return draw_stacked(names, series, "MB that a node sends in a step, counted in the compiled program")


def draw_readme(records: Records, *, is_dark: bool) -> Figure:
    """Draws the README's picture: bytes on the wire per step with ZeRO-3, MiCS, and MiCS with int8 gradients."""
    full = sent_bytes(ours_of(records.lines("strategies")), "zero3", "wire_tx_bytes")
    replicas = records.lines("replicas", mode="four micro-steps")
    plain, int8 = (
        median(line["sent_bytes"] for line in replicas if line["run"] == f"one_world {codec}")
        for codec in ("none", "int8")
    )
    sent = {"ZeRO-3 (FSDP)": full, "MiCS": plain, "MiCS, int8 gradients": int8}
    title = "sent by each node to other nodes, per optimizer step"
    return draw_headline({name: size / 1e6 for name, size in sent.items()}, title, is_dark=is_dark)


def drawn(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines of strategies: one with and without overlap is a bar already."""
    return [line for line in lines if "overlap=" not in line["strategy"]]


CHARTS: Mapping[str, Callable[[Records], Figure]] = {
    "strategies_step_time": lambda x: draw_step_times(drawn(by_themselves(x.lines("strategies")))),
    "strategies_bytes": lambda x: draw_bytes(ours := drawn(ours_of(x.lines("strategies"))), names_of(ours)),
    "readme_bytes": lambda x: draw_readme(x, is_dark=False),
    "readme_bytes_dark": lambda x: draw_readme(x, is_dark=True),
    "replica_events": lambda x: replica_events.picture(x.lines("replica_events")),
    "time_to_loss": lambda x: time_to_loss_table.picture(x.lines("time_to_loss")),
    "planner_curves": lambda _: planner_records.curves(),
}


# ---------------------------------------------------------------------------------------------------- all tables


def checkpoints(lines: Sequence[Line]) -> str:
    """Returns how long a checkpoint stopped training on disks of known bandwidth, and how long by the planner."""
    rows = [
        [
            f"{line['rate_mb']} MB/s",
            f"{line['written_bytes'] / 1e6:.1f} MB ({line['planned_bytes'] / 1e6:.1f})",
            f"{line['step_s']:.2f} s",
            f"{line['planned_s']:.2f} s",
            f"{spread(line['checkpoint_s'])} s",
        ]
        for line in lines
    ]
    return markdown(["disk", "written (planned)", "step", "a checkpoint stops, planned", "measured"], rows)


def tables(records: Records) -> dict[str, Callable[[], str]]:
    """Returns what gives each table as Markdown."""
    strategies, steps = records.lines("strategies"), records.lines("compression")
    ours = by_themselves(strategies)
    chaos = records.lines("elastic", title=elastic.CHAOS)
    events = [line for line in records.lines("elastic") if line not in chaos]
    sessions = {name: records.lines("planner", timed=name) for name in planner_validation.SESSIONS}
    return {
        "what strategies hold": lambda: held_and_sent(records.lines("compiled", config="quickstart", accum=2)),
        "bytes of strategies": lambda: strategy_bytes(ours_of(strategies)),
        **{f"step times at {rate}": lambda rate=rate: step_times(ours, rate) for rate in rates_of(ours)},
        "the scale model": lambda: scale_model(records.lines("strategies", mode=SCALE_MODEL)),
        "PyTorch": lambda: pytorch(records.lines("strategies", mode=PEER)),
        "times of all-reduce": lambda: all_reduce.table(records.lines("all_reduce"), steps),
        **{
            f"steps with codecs at {rate}": lambda rate=rate: codec_steps([x for x in steps if x["rate"] == rate])
            for rate in rates_of(steps)
        },
        **{
            f"accuracy on {task}": lambda task=task: codec_accuracy(task, records.lines("accuracy", task=task))
            for task in accuracy.TASKS
        },
        "local SGD, tuned": lambda: local_steps(records.lines("local_steps")),
        "a target utilisation": lambda: utilisation.table(records.lines("utilisation")),
        "what is free": lambda: losses.free(records),
        "what is dominated": lambda: losses.dominated(records),
        "kill matrix": lambda: kill_matrix(events),
        "runs of chaos": lambda: chaos_runs(chaos),
        "events of chaos": lambda: chaos_events(chaos),
        "changing nodes": lambda: changing_nodes(records.lines("dynamic_training")),
        "the bubble": lambda: bubble(records.lines("pipelines")[-1]),
        "what overlaps": lambda: overlap_table.table(records.lines("overlap")),
        "starts": lambda: starts.table(records.lines("starts")),
        "checkpoints": lambda: checkpoints(records.lines("checkpoints")),
        "replicas": lambda: replicas.table(records.lines("replicas")),
        "time to loss": lambda: time_to_loss_table.table(records.lines("time_to_loss")),
        "steps on the wire": lambda: time_to_loss_table.step_times(records.lines("time_to_loss")),
        "what to choose": lambda: time_to_loss_table.choice(records.lines("time_to_loss")),
        "events of replicas": lambda: replica_events.table(records.lines("replica_events")),
        "links of replicas": lambda: replica_links.table(records.lines("replica_links")),
        "goodput of replicas": lambda: replica_events.goodput_table(records.lines("replica_events")),
        "random events of replicas": lambda: replica_events.random_table(records.lines("replica_events")),
        "a search": planner_records.example,
        "ways to a loss": planner_records.to_loss,
        "a run on spot nodes": planner_records.spot,
        "adapters of 70 B": planner_records.adapters,
        "errors on published steps": lambda: published_steps.summary(records.lines("published_steps")),
        "errors of the planner": lambda: planner_validation.summary(sessions),
        "a GPU by the planner": lambda: planner_gpu.table(records.lines("planner_gpu")),
        "a GPU beside PyTorch": lambda: gpu.table(records.lines("gpu")),
        "rates of a GPU": lambda: gpu.rates(records.lines("gpu_rates")),
        "replicas by the planner": lambda: planner_replicas.table(records.lines("planner_replicas")),
        "fastest by the planner": lambda: planner_validation.bests(sessions),
    }
