"""Records the memory, time and cost of each config for GPUs by the planner, on the fewest nodes of the config.

    python -m lab.benchmarks.planner_configs [--only=llama]

Each row of lab/benchmarks/planner_configs.csv has a line in results/derived/planner_configs.jsonl, which becomes
invalid when the config changes. The docstrings in configs/ hold `text` of the lines (tests/test_planner_figures.py),
docs/configs.md their `table`. XLA for GPUs and for TPUs is needed (`make .venv/h100/installed .venv/tpu/installed`); a
program takes 10 to 60 s on 2 cores. Exit codes: 0 done; 1 a config has no plan, for example because it does not fit; 2
no config has such a name.
"""

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from configs import command_line
from configs.schema import defaults, flat
from lab.benchmarks.runner import ROOT, Key, options_of, program, rows_of, run_missing, started
from lab.records import DERIVED, Line, recorded, replace
from planner.clusters import CLUSTERS
from planner.report import from_json
from planner.slices import find_cluster
from runtime.files.pages import markdown
from training.metrics.units import format_bytes, format_seconds

RESULTS = DERIVED / "planner_configs.jsonl"
FLAGS: dict[str, str] = {row["config"]: row["flags"] for row in rows_of("planner_configs.csv")}  # planner options


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Plans and records the missing configs; returns the exit code."""
    options = options_of(__doc__, argv, only=("", "only configs whose name contains this"))
    chosen = [name for name in FLAGS if options.only in name]
    if not chosen:
        raise ValueError(f"--only={options.only} is in none of {', '.join(FLAGS)}")
    replace(RESULTS, lines())
    return run_missing(RESULTS, map(key_of, chosen), planned)


def key_of(name: str) -> Key:
    """Returns the key of a line: the command, and the config values that differ from its model's defaults."""
    command = ["planner", f"--config=configs/{name}", *FLAGS[name].split()]
    values = values_of(name)
    usual = flat(defaults(values["model.kind"]))
    keys = {key: value for key, value in values.items() if value != usual[key]}
    return {"config": name, "command": shlex.join(["python", "-m", *command]), "keys": keys}


def values_of(name: str) -> dict[str, Any]:
    """Returns the values of a config by their keys, such as `batch.micro_size`."""
    return flat(command_line.parse(["planner", f"--config={ROOT}/configs/{name}"]).to_dict())


def clusters_table() -> str:
    """Returns the planner's clusters with their devices, links and prices."""
    rows = []
    for name, cluster in CLUSTERS.items():
        link = format_bytes(8 * cluster.node_bandwidth).replace("B", "bit")
        price = "" if cluster.on_demand is None else f"${cluster.on_demand:.2f}"
        rows.append([f"`{name}`", f"{cluster.devices_per_node} x {cluster.device.name}", f"{link}/s", price])
    return markdown(["cluster", "devices of a node", "link of a node", "an hour of a node"], rows)


def planned(key: Key) -> dict[str, Any]:
    """Returns the values of a line. RuntimeError with the planner's message if it finds no plan."""
    (plan,) = from_json(started([sys.executable, *shlex.split(key["command"])[1:], "--json"]))
    best = plan.best
    return {
        "cluster": plan.cluster,
        "nodes": plan.nodes,
        "devices": plan.devices,
        "memory_bytes": round(best.memory.total),
        "capacity_bytes": round(best.memory.capacity),
        "step_s": best.step_s,
        "num_steps": values_of(key["config"])["num_steps"],
    }


def lines() -> list[Line]:
    """Returns the lines of the configs as they are now, in the order of `FLAGS`."""
    found = {line["config"]: line for line in recorded(RESULTS)}
    return [found[name] for name in FLAGS if name in found and key_of(name).items() <= found[name].items()]


def text(line: Line) -> str:
    """Returns a line as the docstring of its config has it, with today's price."""
    file, _, argument = line["config"].partition(":")
    kind = "GPU" if find_cluster(line["cluster"]).is_gpu else "TPU"
    nodes = f"{line['nodes']} {line['cluster']} ({line['devices']} {kind}s)"
    memory = f"{format_bytes(line['memory_bytes'])} of {format_bytes(line['capacity_bytes'])} a {kind}"
    parts = [f"{argument or file.removesuffix('.py')}: {nodes}", memory, f"{format_seconds(line['step_s'])} a step"]
    if cost := cost_of(line):
        parts.append(f"{cost} for its {line['num_steps']:,} steps on demand")
    return ", ".join(parts)


def cost_of(line: Line) -> str:
    """Returns the cost of all steps on demand, such as `$98`, at today's price; "" for a cluster without a price."""
    price = find_cluster(line["cluster"]).on_demand
    usd = (price or 0) * line["nodes"] * line["num_steps"] * line["step_s"] / 3600
    return f"${usd:,.{0 if usd >= 10 else 2}f}" if price else ""


def table() -> str:
    """Returns the valid lines as a table of Markdown, for docs/configs.md."""
    rows = []
    for line in lines():
        need = f"{line['nodes']} {line['cluster']}, {format_bytes(line['memory_bytes'])}"
        cost = ", ".join(filter(None, (format_seconds(line["step_s"]), cost_of(line))))
        rows.append((f"`{line['config']}`", need, cost))
    return markdown(("config", "nodes, memory of a GPU", "step, all steps"), rows)


if __name__ == "__main__":
    sys.exit(main())
