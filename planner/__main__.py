"""Predicts how a config trains on a cluster: memory, time by part, throughput, cost.

    python -m planner --config=configs/mics_paper.py:bert_10b --cluster=p4d.24xlarge --nodes=16
    python -m planner --config=configs/mics_paper.py:bert_10b --cluster=p4d.24xlarge --nodes=16 --search

The real train step is compiled for the cluster's GPUs (none is needed) and its schedule replayed on the cluster's
links. `--strategy=mics(8),zero3` compares strategies, `--search` looks for the best, `--nodes=1,2,4,8` shows how a run
scales, `--spot_trace=FILE` its cost on spot nodes. The emulated cluster is predicted from the program
compiled for CPUs. docs/results/planner.md has the errors of predictions.
Exit codes: 0 done; 2 bad configuration, or nothing fits.
"""

import io
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from absl import flags
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from configs import command_line
from configs.schema import Config, TransformerConfig
from planner import targets
from planner.candidates import of_config, of_strategies
from planner.day import losses, snapshot_interval
from planner.independent import independent_prediction, independent_text
from planner.options import recorded_optimizer
from planner.pictures import draw, draw_curves
from planner.predict import Machine, Prediction, ReplayableStep, what_helps
from planner.question import Question, command_flags, question_of
from planner.report import Plan, plan_page, plan_text, scaling_text, to_json
from planner.search import search
from planner.spot import other_strategies, planned_cost, read_trace, run_of, spot_text, world_of
from runtime.command_line import complain, prepare_output
from runtime.exit_codes import ExitCode
from runtime.files import atomic
from runtime.files.paths import user_path
from training import batches
from training.metrics.units import format_bytes, format_count

SHOWN = 10  # rows of a search


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, and its best step."""

    plan: Plan
    step: ReplayableStep


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code. A user's mistake is reported in one line."""
    prepare_output()
    values = command_flags(argv)
    try:
        if command_line.asks_for_help(argv):
            print(command_line.help_text(__doc__ or "", argv, values))
        else:
            _answer_all(argv, question_of(argv, values), values)
    except (ValueError, OSError, RuntimeError) as error:
        return complain(ValueError(error))
    return ExitCode.FINISHED


# ------------------------------------------------------------------------------------------------ answers


def _answer_all(argv: Sequence[str], question: Question, values: flags.FlagValues) -> None:
    """Prints the plans and writes their files. With several numbers of nodes, an error replaces its plan."""
    trace, spot = read_trace(user_path(values.spot_trace)) if values.spot_trace else None, ""
    if trace:
        run_of(question.config)  # raises ValueError if its cost is unknown
        if values.json:
            raise ValueError("--json has no part for --spot_trace; leave out one of the two")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(question.nodes) * question.cluster.devices_per_node)
    answers: list[Answer | str] = []
    for nodes in question.nodes:
        try:
            answers.append(_answer(question, nodes))
        except ValueError as error:
            answers.append(str(error))
    found = [answer for answer in answers if isinstance(answer, Answer)]
    if not found:
        raise ValueError(answers[-1])
    plans = [answer if isinstance(answer, str) else answer.plan for answer in answers]
    said = [plan_text(found[-1].plan)]
    if len(plans) > 1:
        said.insert(0, scaling_text(plans, question.nodes))
    if trace:
        steps = [(answer.step, answer.plan.best.step_s) for answer in found]
        worlds = [world_of(step, step_s, snapshot_interval(step, step_s)) for step, step_s in steps]
        spot = spot_text(planned_cost(trace, worlds, question.config, question.cluster), values.spot_trace)
        spot += other_strategies([answer.step for answer in found])
        said.append(spot)
    if values.png:
        is_one = len(found) == 1
        figure = _timeline(question, found[0].step) if is_one else _curves(question, found)
        figure.savefig(user_path(values.png), dpi=110)
        said.append(f"{'timeline' if is_one else 'curves'}: {values.png}")
    if values.html:
        command = shlex.join(["python", "-m", "planner", *argv[1:]])
        pictures = {"timeline": _png(_timeline(question, found[-1].step))}
        if len(plans) > 1:
            pictures["curves"] = _png(_curves(question, found))
        page = plan_page(question.name, plans, question.nodes, pictures, command, spot)
        atomic.replace(user_path(values.html), page)
        said.append(f"page: {values.html}")
    print(to_json([answer.plan for answer in found]) if values.json else "\n\n".join(said))


def _answer(question: Question, nodes: int) -> Answer:
    """Returns the plan for a number of nodes. ValueError if nothing fits them."""
    cluster = question.cluster
    is_there = not cluster.is_gpu or targets.is_installed(targets.TARGETS[cluster.device.target])
    machine = Machine(
        cluster=cluster,
        nodes=nodes,
        config_words=question.words,
        target=cluster.device.target if is_there else targets.CPU,
        xla_flags=question.xla_flags,
        is_quick=question.is_search and cluster.is_gpu and is_there,
    )
    config = machine.fitted(question.config)
    candidates = [] if question.is_search else of_strategies(question.strategies, config) or [of_config(config)]
    devices = jax.devices()[: machine.num_devices]
    console = Console(stderr=True, quiet=question.is_quiet, highlight=False, markup=False)
    columns_ = ("compiling", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns_, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def say(line: str) -> None:
            text = f"{_of_nodes(nodes)}, {line}" if len(question.nodes) > 1 else line
            console.print(text, soft_wrap=True)

        def count(done: int, most: int) -> None:
            bar.update(task, completed=done, total=most)

        found = search(config, machine, devices, most=question.most, candidates=candidates, say=say, count=count)
    best, step = found.steps[0]
    unit = "images" if best.tokens_per_s is None else "sequences"
    size = f"{format_count(step.experiment.model.num_params)} parameters"
    if isinstance(model := config.model, TransformerConfig):
        size += f" ({model.num_layers} layers of {model.hidden:,})"
    size += f", {config.batch.global_size:,} {unit} a step"
    link = format_bytes(8 * cluster.node_bandwidth).replace("B", "bit")
    where = f"{cluster.name} ({machine.num_devices} x {cluster.device.name}, {link}/s a node)"
    padding = _padding(config, [prediction for prediction, _ in found.steps], machine.num_devices)
    shown = found.steps[: SHOWN if question.is_search else None]
    more = [f"the {SHOWN} fastest are shown, of {len(found.steps)} that fit"] * (len(shown) < len(found.steps))
    alone = independent_text(step, best.step_s, question.config.batch.micro_size)
    notes = (*question.notes, *alone, *_stand_ins(step), *padding, *more)
    plan = Plan(
        title=f"{question.name}, {size}, on {_of_nodes(nodes)} of {where}",
        cluster=cluster.name,
        nodes=nodes,
        devices=machine.num_devices,
        unit=unit,
        predictions=tuple(prediction for prediction, _ in shown),
        changed=tuple(prediction for prediction, _ in found.changed),
        replicas=independent_prediction(step, best),
        helps=what_helps(step),
        day=losses(step, best.step_s),
        steps=config.num_steps,
        optimizer=recorded_optimizer(config, machine),
        counts=found.counts if question.is_search else None,
        error_bar=str(cluster.error_bar),
        notes=notes if question.is_search else (*notes, *found.refused, *found.too_large),
    )
    return Answer(plan=plan, step=step)


def _stand_ins(step: ReplayableStep) -> list[str]:
    """Returns notes about parts of a run that are priced by a substitute."""
    config, machine, notes = step.experiment.config, step.machine, list[str]()
    model, length, compression = config.model, config.data.seq_len, config.compression
    if compression.warmup_steps:
        first = f"the first {compression.warmup_steps:,} exchanges, which send more"
        notes.append(f"compression.all_reduce={compression.all_reduce}: priced as behind its warm-up, {first}")
    can_fuse = machine.target != targets.CPU and machine.cluster.device.attention
    if not (can_fuse and isinstance(model, TransformerConfig)):
        return notes
    if machine.attention(config) == "xla" != model.attention:
        notes.append(
            f"no fused attention for heads of {model.head_size} in rows of {length:,} with this sharding compiles "
            "without a GPU: it is priced as XLA's, slower, with all scores in memory"
        )
    return notes


def _padding(config: Config, predictions: Sequence[Prediction], num_devices: int) -> list[str]:
    """Returns a note for each micro-batch that needs padding rows of weight zero."""
    data_devices = num_devices // (config.mesh.tensor * config.mesh.context)
    sizes = dict.fromkeys(p.candidate.micro_size for p in predictions)
    return [line for size in sizes for line in batches.padding(replace(config.batch, micro_size=size), data_devices)]


def _of_nodes(nodes: int) -> str:
    return f"{nodes} node{'s' if nodes > 1 else ''}"


def _timeline(question: Question, step: ReplayableStep) -> Figure:
    heading = f"{question.name}, {step.candidate.words}, on {_of_nodes(step.machine.nodes)} ({question.cluster.name})"
    return draw(step.timeline(), heading)


def _curves(question: Question, found: Sequence[Answer]) -> Figure:
    plans = [answer.plan for answer in found]
    batch = f"{question.config.batch.global_size:,} {plans[0].unit} a step"
    return draw_curves(plans, f"{question.name}, {batch}, on {question.cluster.name}", question.nodes)


def _png(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    return drawn.getvalue()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
