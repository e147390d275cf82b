"""Predicts how a config trains on a cluster that is not here: memory, time by part, throughput, cost.

    python -m planner --config=configs/mics_paper.py:bert_10b --cluster=p4d.24xlarge --nodes=16
    python -m planner --config=configs/mics_paper.py:bert_10b --cluster=p4d.24xlarge --nodes=16 --search

The real train step is compiled for the cluster's GPUs (none is needed) and its schedule replayed on the cluster's
links. `--strategy=mics(8),zero3` compares strategies, `--search` looks for the best, `--nodes=1,2,4,8` shows how a run
scales, `--spot_trace=FILE` what it costs on nodes that come and go. The emulated cluster is predicted from the program
compiled for CPUs. docs/planner.md says how far to trust it.
Exit codes: 0 done; 2 bad configuration, or nothing fits.
"""

import io
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from absl import flags
from matplotlib.figure import Figure

from configs import command_line
from configs.schema import Config
from files import atomic
from metrics.units import format_bytes
from planner import clusters
from planner import compile as compiling
from planner.candidates import Candidate, of_config, of_strategies
from planner.curves import draw_curves
from planner.page import plan_page
from planner.picture import draw
from planner.predict import Machine, Prediction, Step, what_helps
from planner.probed import with_probe
from planner.report import Plan, plan_text, scaling_text, title, to_json
from planner.search import search
from planner.spot import planned_cost, run_of, spot_text
from planner.spot_trace import read_trace
from planner.table import MOST_DEVICES
from runtime.command_line import check_file, prepare_output
from runtime.exit_codes import ExitCode

SHOWN = 10  # of a search
LOOKED_AT = 3  # programs of a search, unless --compile says otherwise
DEFAULT = "p4d.24xlarge"  # cluster
RATE = {"mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the command line asks."""

    name: str  # of the config
    config: Config
    words: tuple[str, ...]
    cluster: clusters.Cluster
    nodes: tuple[int, ...]
    strategies: tuple[str, ...]
    is_search: bool
    most: int
    xla_flags: str
    notes: tuple[str, ...]
    spot_trace: Path | None


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code; a user's mistake is one line."""
    prepare_output()
    values = _flags(argv)
    try:
        if command_line.asks_for_help(argv):
            print(command_line.help_text(__doc__ or "", argv, values))
            return 0
        question = _question(argv, values)
        trace = read_trace(question.spot_trace) if question.spot_trace else None
        if trace:
            run_of(question.config)  # raises ValueError if nothing can be said of it
            if values.json:
                raise ValueError("--json has no part for --spot_trace; leave out one of the two")
        if values.png:
            if Path(values.png).suffix != ".png":
                raise ValueError(f"--png={values.png}: the picture is a PNG; give a name that ends in .png")
            check_file(Path(values.png), "--png")
        if values.html:
            check_file(Path(values.html), "--html")
        answers, spot = _answers(question, quiet=values.json), ""
        plans = [plan for plan, _ in answers if isinstance(plan, Plan)]
        if not plans:
            raise ValueError(str(answers[-1][0]))
        if values.json:
            print(to_json(plans))
        else:
            _print(question, [plan for plan, _ in answers])
            if trace:
                steps = [(step, plan.best.step_s) for plan, step in answers if step and isinstance(plan, Plan)]
                cost = planned_cost(trace, steps, question.config, question.cluster)
                spot = spot_text(cost, str(question.spot_trace))
                print(f"\n{spot}")
        if values.png:
            _draw(question, answers, plans).savefig(values.png, dpi=110)
            if not values.json:
                print(f"\n{'timeline' if len(plans) == 1 else 'curves'}: {values.png}")
        if values.html:
            command = shlex.join(["python", "-m", "planner", *argv[1:]])
            atomic.replace(Path(values.html), _page(question, answers, command, spot))
            if not values.json:
                print(f"\npage: {values.html}")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    return 0


def _flags(argv: Sequence[str]) -> flags.FlagValues:
    values = command_line.new_flags()
    flags.DEFINE_string(
        "cluster", DEFAULT, f"one of {', '.join(clusters.CLUSTERS)} ({DEFAULT}, unless it is given)", flag_values=values
    )
    flags.DEFINE_list(
        "nodes",
        ["1"],
        "nodes of the cluster (one, unless it is given); several with commas between",
        flag_values=values,
    )
    flags.DEFINE_string("strategy", None, "strategies to compare: mics(8),zero3,hsdp+hop_two=int8", flag_values=values)
    flags.DEFINE_boolean("search", False, "look for the best", flag_values=values)
    about = f"programs that a search looks at ({LOOKED_AT}, unless it is given)"
    flags.DEFINE_integer("compile", None, about, flag_values=values, lower_bound=1)
    flags.DEFINE_string("probe", None, "probe.json of lab.probe: measured links", flag_values=values)
    flags.DEFINE_string("rate", None, "of each node's link, such as 25gbit, if not the cluster's", flag_values=values)
    flags.DEFINE_integer("devices_per_node", None, "if not the cluster's", flag_values=values, lower_bound=1)
    flags.DEFINE_boolean("json", False, "print JSON", flag_values=values)
    flags.DEFINE_string(
        "png", None, "file for a picture of the best step; with several --nodes, of cost", flag_values=values
    )
    flags.DEFINE_string("html", None, "file for a page of the plan, with its pictures", flag_values=values)
    flags.DEFINE_string(
        "spot_trace", None, "CSV of seconds,nodes: cost on spot nodes that come and go", flag_values=values
    )
    flags.DEFINE_string("xla_flags", "", "more flags for XLA", flag_values=values)
    return values


def _question(argv: Sequence[str], values: flags.FlagValues) -> Question:
    """Returns what is asked. ValueError for what cannot be."""
    config = command_line.parse(argv, values)
    if config.mesh.stages > 1:
        raise ValueError(
            f"mesh.stages={config.mesh.stages}: the planner does not price pipelines; set mesh.stages=1, or see "
            "docs/pipelines.md"
        )
    for name in ("strategy", "probe", "rate", "png", "html", "spot_trace"):
        value = values[name].value
        if value is not None and not value.strip(", "):
            raise ValueError(f"--{name}= is empty; give a value, or leave it out")
    cluster = clusters.find_cluster(values.cluster)
    notes = [cluster.device.note] if cluster.device.note else []
    if values.devices_per_node:
        cluster = replace(cluster, devices_per_node=values.devices_per_node)
    if values.rate:
        cluster = clusters.with_rate(cluster, _rate_bits(values.rate))
    if values.probe:
        cluster, note = with_probe(cluster, Path(values.probe))
        notes.append(note)
    if not values.nodes or not all(re.fullmatch(r"[1-9]\d*", word) for word in values.nodes):
        raise ValueError(f"--nodes={','.join(values.nodes)}: give one number from 1 on, or several, such as 1,2,4,8")
    nodes = tuple(sorted({*map(int, values.nodes)}))
    if nodes[-1] * cluster.devices_per_node > MOST_DEVICES:
        raise ValueError(
            f"--nodes={nodes[-1]} with {cluster.devices_per_node} devices each: a plan is made of at most "
            f"{MOST_DEVICES:,} devices, each of which jax must make here; {MOST_DEVICES // cluster.devices_per_node} "
            "nodes at most"
        )
    if values.search and values.strategy:
        raise ValueError("--search looks at every strategy; leave out --strategy")
    if values.compile and not values.search:
        raise ValueError(f"--compile={values.compile} is of a search; add --search, or leave it out")
    return Question(
        name=command_line.config_name(values),
        config=config,
        words=tuple(word for word in argv[1:] if word.startswith(("--config=", "--config."))),
        cluster=cluster,
        nodes=nodes,
        strategies=tuple(re.findall(r"[^,\s]+", values.strategy or "")),
        is_search=values.search,
        most=values.compile or LOOKED_AT,
        xla_flags=values.xla_flags,
        notes=(*notes, *_notes(config, cluster)),
        spot_trace=Path(values.spot_trace) if values.spot_trace else None,
    )


def _notes(config: Config, cluster: clusters.Cluster) -> list[str]:
    """Returns what a reader must know of how the program was made."""
    notes = []
    if cluster.device.target != compiling.CPU:
        if compiling.WHEELS.exists():
            notes.append(
                "exposed is a lower bound: the replay has a queue for each network level, jax 0.10.2 one stream for "
                "all collectives of a device"
            )
        else:
            notes.append(
                "XLA for GPUs is not installed (make .venv/h100/installed): priced from the program compiled for CPUs, "
                "which overlaps nothing and has other temporaries; less exact"
            )
        if getattr(config.model, "attention", "xla") != "xla" and config.model.compute_dtype == "bfloat16":
            notes.append(
                "attention is XLA's own: cuDNN's kernel, which A100s and later would use, needs a GPU to compile"
            )
        reached = clusters.ACHIEVED["gpu"].basis["memory_share"]
        memory = f"{format_bytes(cluster.usable_bytes(1))} of {format_bytes(cluster.device.memory_bytes)}"
        notes.append(f"memory: {memory}, {reached}")
    return notes


def _answers(question: Question, quiet: bool) -> list[tuple[Plan | str, Step | None]]:
    """Returns a plan and its best step for each number of nodes; if there are several, errors as text."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(question.nodes) * question.cluster.devices_per_node)
    answers: list[tuple[Plan | str, Step | None]] = []
    for nodes in question.nodes:
        try:
            answers.append(_answer(question, nodes, quiet))
        except ValueError as error:
            if len(question.nodes) == 1:
                raise
            answers.append((str(error), None))
    return answers


def _answer(question: Question, nodes: int, quiet: bool) -> tuple[Plan, Step]:
    cluster, config = question.cluster, question.config
    is_there = cluster.device.target == compiling.CPU or compiling.WHEELS.exists()
    machine = Machine(
        cluster=cluster,
        nodes=nodes,
        config_words=question.words,
        target=cluster.device.target if is_there else compiling.CPU,
        xla_flags=question.xla_flags,
    )
    several = f"{nodes} node{'s' if nodes > 1 else ''}, " if len(question.nodes) > 1 else ""

    def say(line: str) -> None:
        print(f"{several}{line}", file=sys.stderr)

    candidates: list[Candidate] = []
    if not question.is_search:
        candidates = of_strategies(question.strategies, config) or [of_config(config)]
    found = search(
        config,
        machine,
        jax.devices()[: machine.num_devices],
        most=question.most,
        candidates=candidates,
        say=(lambda line: None) if quiet or not question.is_search else say,
    )
    best, step = found.steps[0]
    unit = "images" if best.tokens_per_s is None else "sequences"
    rows, num_params = config.batch.global_size, step.experiment.model.num_params
    notes = (*question.notes, *_padding(config, [prediction for prediction, _ in found.steps], machine.num_devices))
    plan = Plan(
        title=title(question.name, cluster, nodes, num_params, rows, unit),
        cluster=cluster.name,
        nodes=nodes,
        devices=machine.num_devices,
        unit=unit,
        predictions=tuple(prediction for prediction, _ in found.steps[:SHOWN]),
        helps=what_helps(step),
        counts=found.counts if question.is_search else None,
        error_bar=str(clusters.ERROR_BARS[cluster.device.kind]),
        notes=notes if question.is_search else (*notes, *found.refused, *found.too_large),
    )
    return plan, step


def _padding(config: Config, predictions: Sequence[Prediction], num_devices: int) -> list[str]:
    """Returns a note for each micro-batch with which rows of weight zero are computed."""
    rows, data_devices = config.batch.global_size, num_devices // config.mesh.tensor
    notes = {}
    for p in predictions:
        micro, steps = p.candidate.micro_size, p.accumulation
        if (computed := data_devices * micro * steps) > rows:
            taken = f"{data_devices:,} devices take {micro} in each of {steps} micro-step{'s' if steps > 1 else ''}"
            notes[micro] = (
                f"{computed - rows:,} of {computed:,} rows of a step are padding: the batch has {rows:,}, and {taken}; "
                "choose a micro-batch or a number of nodes that divides them"
            )
    return [*notes.values()]


def _print(question: Question, plans: Sequence[Plan | str]) -> None:
    """Prints the one plan, or throughput against nodes and the last plan."""
    last = [plan for plan in plans if isinstance(plan, Plan)][-1]
    if len(plans) > 1:
        print(f"{scaling_text(plans, question.nodes)}\n")
    print(plan_text(last))


def _draw(question: Question, answers: Sequence[tuple[Plan | str, Step | None]], plans: Sequence[Plan]) -> Figure:
    """Returns a picture of the one plan's best step, or of all strategies against the number of devices."""
    if len(plans) > 1:
        batch = f"{question.config.batch.global_size:,} {plans[0].unit} a step"
        return draw_curves(plans, f"{question.name}, {batch}, on {question.cluster.name}", question.nodes)
    return _timeline(question, next(step for _, step in answers if step))


def _timeline(question: Question, step: Step) -> Figure:
    nodes = f"{step.machine.nodes} node{'s' if step.machine.nodes > 1 else ''}"
    heading = f"{question.name}, {step.candidate.words}, on {nodes} ({question.cluster.name})"
    return draw(step.timeline(), heading)


def _page(question: Question, answers: Sequence[tuple[Plan | str, Step | None]], command: str, spot: str) -> str:
    """Returns the page of all plans, and of the last one's best step."""
    png = io.BytesIO()
    _timeline(question, [step for _, step in answers if step][-1]).savefig(png, dpi=110)
    return plan_page(question.name, [plan for plan, _ in answers], question.nodes, png.getvalue(), command, spot)


def _rate_bits(rate: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", rate)
    if not match or not float(match[1]):
        raise ValueError(f"--rate={rate}: give a number and its unit, such as 25gbit or 200mbit")
    return float(match[1]) * RATE[match[2]]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
