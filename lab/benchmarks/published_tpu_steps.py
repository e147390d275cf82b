"""Holds the planner to training steps that others published on TPUs: MaxText and tpu-recipes, 8 B to 256 B parameters.

    python -m lab.benchmarks.published_tpu_steps [--only=maxtext-16b] [--again]
    python -m lab.benchmarks.published_tpu_steps --choose

Rows of lab/benchmarks/published_tpu_steps.csv name their source (github.com/AI-Hypercomputer, maxtext and tpu-recipes):
configs/tpu_decoder.py with the row's sizes, sharded inside a slice as published. Each is compiled and replayed as
MaxText runs it, and as we do. No step ran here, and our program is not MaxText's: the blocks of attention are ours, and
so is the rematerialisation, the first of REMAT that fits. No row chose a rate of planner/rates.csv. `--choose` prints
the rates of products that the first row of each generation would choose. XLA for TPUs is needed (`make
.venv/tpu/installed`); a program takes 10 to 60 s on 2 cores. results/derived/published_tpu_steps.jsonl has a line a
row. Exit codes: 0 done; 1 a step could not be compiled; 2 no row has such a name.
"""

import re
import sys
from collections.abc import Sequence
from typing import Any

from lab.benchmarks.compiled import on_cluster, replaying, start_devices
from lab.benchmarks.planner_errors import error
from lab.benchmarks.published_steps import compared, nearest
from lab.benchmarks.runner import Key, program, rows_of
from lab.records import DERIVED, Line
from planner.clusters import Cluster, with_system
from planner.predict import ReplayableStep
from planner.slices import find_cluster
from planner.targets import TPUS
from runtime.files.pages import markdown

RESULTS = DERIVED / "published_tpu_steps.jsonl"
SYSTEM = "maxtext"
FSDP = "FSDP inside a slice"
# our policies next to a published one, the nearest first; else full
REMAT = {"minimal": ("dots", "attention"), "offload": ("offload",), "qkv_proj_offloaded": ("offload",)}
WINDOWS = {"gemma3-12b": {"model.window": 1024, "model.global_every": 6, "model.tied_head": True}}


def cells() -> list[Key]:
    """Returns the keys of all lines: the published rows."""
    return [*rows_of("published_tpu_steps.csv")]


def name(cell: Key) -> str:
    """Returns the name of a row for `--only`."""
    return f"{cell['model']}, {cell['slices']} x {cell['tpu']}-{cell['chips_per_slice']}"


def cluster_of(cell: Key, system: str = SYSTEM) -> Cluster:
    """Returns the slices of a row."""
    return with_system(find_cluster(f"{cell['tpu']}-{cell['chips_per_slice']}"), system)


def published_s(cell: Key) -> float:
    """Returns the seconds per step of a row: published, or MaxText's operations divided by its published rate.

    It counts the head's products, all pairs of positions, and no recomputation.
    """
    if cell["published_step_s"]:
        return float(cell["published_step_s"])
    of_layer = 2 * (cell["heads"] + cell["kv_heads"]) * cell["head_dim"] * cell["hidden"]
    of_layer += 3 * cell["hidden"] * cell["intermediate"]
    params = cell["layers"] * of_layer + cell["hidden"] * cell["vocab"]
    pairs = 12 * cell["seq"] * cell["heads"] * cell["head_dim"] * cell["layers"]
    flops = cell["rows_per_chip"] * cell["seq"] * (6 * params + pairs)
    return flops / (1e12 * float(cell["published_tflops_per_chip"]))


def compiled(cell: Key) -> ReplayableStep:
    """Returns the step of a row, compiled for its slices with its nearest policy that fits, or with the last one."""
    *others, last = REMAT.get(cell["remat"], ("full",))
    for remat in others:
        step = compiled_with(cell, remat)
        if step.memory().total <= step.memory().capacity:
            return step
    return compiled_with(cell, last)


def compiled_with(cell: Key, remat: str) -> ReplayableStep:
    """Returns the step of a row with a policy of ours."""
    found = re.search(r"tensor=(\d+)", cell["inside_slice"])
    tensor = int(found[1]) if found else 1
    rows = int(float(cell["rows_per_chip"])) * tensor // TPUS[cell["tpu"]].devices_per_chip
    keys = {
        "model.num_layers": cell["layers"],
        "model.hidden": cell["hidden"],
        "model.intermediate": cell["intermediate"],
        "model.num_heads": cell["heads"],
        "model.num_kv_heads": cell["kv_heads"],
        "model.head_dim": cell["head_dim"],
        "model.vocab_size": cell["vocab"],
        "model.max_len": cell["seq"],
        "model.remat": remat,
        "data.seq_len": cell["seq"],
        "mesh.tensor": tensor,
        "batch.micro_size": rows,
        "batch.global_size": int(float(cell["rows_per_chip"])) * cell["chips_per_slice"] * cell["slices"],
        **WINDOWS.get(cell["model"], {}),
    }
    return on_cluster(cluster_of(cell), cell["slices"], "tpu_decoder:16b", keys)


def replayed(cell: Key) -> dict[str, Any]:
    """Returns the line of a row: published and replayed seconds per step, and memory per device."""
    step = compiled(cell)
    return {
        **compared(step, published_s(cell), cluster_of(cell, "ours")),
        "our_remat": step.experiment.config.model.remat,
    }


@program
def choose() -> int:
    """Prints the rate of products that each generation's first row would choose, and records nothing."""
    first = {cell["tpu"]: cell for cell in reversed(cells())}
    start_devices(max(map(devices, first.values())))
    for tpu, cell in first.items():
        print(nearest(tpu, [(compiled(cell), published_s(cell))], (0.8,)))
    return 0


def devices(cell: Key) -> int:
    """Returns the devices of a row's slices."""
    return cell["slices"] * cell["chips_per_slice"] * TPUS[cell["tpu"]].devices_per_chip


# ----------------------------------------------------------------------------------------- the content of pages


def groups(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Returns the rows with FSDP alone inside a slice, of them each generation and several slices, and the others."""
    alone = [line for line in lines if "tensor=" not in line["inside_slice"]]
    found = {FSDP: alone}
    for tpu in dict.fromkeys(line["tpu"] for line in alone):
        found[f"{FSDP}, {tpu}"] = [line for line in alone if line["tpu"] == tpu]
    found[f"{FSDP}, several slices"] = [line for line in alone if line["slices"] > 1]
    return found | {"tensor parallelism inside a slice": [line for line in lines if line not in alone]}


def table(lines: Sequence[Line]) -> str:
    """Returns each row: published and predicted seconds, with our overlap too, and memory."""
    rows = []
    for line in lines:
        seconds = [f"{line[key]:.2f}" for key in ("published_s", "predicted_s")]
        remat = [line["remat"], f"`{line['our_remat']}`"]
        cells = [name(line), line["inside_slice"], *remat, *seconds, f"{error(line, 'published_s'):+.1%}"]
        rows.append([*cells, f"{line['ours_s']:.2f}", f"{line['memory_bytes'] / 1e9:.1f}"])
    head = ["model and slices", "in a slice", "remat: published", "ours", "step, s: published", "predicted", "error"]
    return markdown([*head, "with our overlap", "memory, GB"], rows)


main = replaying(__doc__, RESULTS, cells, name, replayed, devices)

if __name__ == "__main__":
    sys.exit(choose() if sys.argv[1:] == ["--choose"] else main())
