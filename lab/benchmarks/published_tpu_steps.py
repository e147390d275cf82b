"""Holds the planner to training steps that others published on TPUs: MaxText and tpu-recipes, 8 B to 256 B parameters.

    python -m lab.benchmarks.published_tpu_steps [--only=maxtext-16b] [--again]
    python -m lab.benchmarks.published_tpu_steps --choose

Rows of lab/benchmarks/published_tpu_steps.csv name their source (github.com/AI-Hypercomputer, maxtext and tpu-recipes):
configs/tpu_decoder.py with the row's sizes, sharded inside a slice as published. Each is compiled and replayed as
MaxText runs it, and as we do. No step ran here, and our program is not MaxText's: REMAT names our nearest
rematerialisation, and the blocks of attention are ours. The rows in CHOSEN chose the rates in planner/rates.csv, by
`--choose`; the error bar that plans print is from the other rows only. XLA for TPUs is needed (`make
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
# a row of each generation, and of v6e a second one, in which attention takes less of the step
CHOSEN = (
    ("v5e", "maxtext-16b", 1, 256),
    ("v5p", "maxtext-64b", 1, 64),
    ("v6e", "llama3.1-8b", 1, 8),
    ("v6e", "llama3.1-70b", 1, 32),
    ("tpu7x", "llama3.1-70b", 1, 64),
)
REMAT = {"minimal": "dots", "offload": "offload"}  # else full
WINDOWS = {"gemma3-12b": {"model.window": 1024, "model.global_every": 6, "model.tied_head": True}}


def cells() -> list[Key]:
    """Returns the keys of all lines: the published rows, and whether each chose rates."""
    rows = rows_of("published_tpu_steps.csv")
    key = lambda row: (row["tpu"], row["model"], row["slices"], row["chips_per_slice"])
    return [{**row, "chose_rates": key(row) in CHOSEN} for row in rows]


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
    """Returns the step of a row, compiled for its slices."""
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
        "model.remat": REMAT.get(cell["remat"], "full"),
        "data.seq_len": cell["seq"],
        "mesh.tensor": tensor,
        "batch.micro_size": rows,
        "batch.global_size": int(float(cell["rows_per_chip"])) * cell["chips_per_slice"] * cell["slices"],
        **WINDOWS.get(cell["model"], {}),
    }
    return on_cluster(cluster_of(cell), cell["slices"], "tpu_decoder:16b", keys)


def replayed(cell: Key) -> dict[str, Any]:
    """Returns the line of a row: published and replayed seconds per step, and memory per device."""
    return compared(compiled(cell), published_s(cell), cluster_of(cell, "ours"))


@program
def choose() -> int:
    """Prints the rates that come nearest to the rows that choose, and records nothing.

    The two rows of v6e choose the share of attention as well, which the others take.
    """
    chosen = [cell for cell in cells() if cell["chose_rates"]]
    start_devices(max(map(devices, chosen)))
    for tpu in TPUS:
        steps = [(compiled(cell), published_s(cell)) for cell in chosen if cell["tpu"] == tpu]
        print(nearest(tpu, steps, (0.8, 0.5)[: len(steps)]))
    return 0


def devices(cell: Key) -> int:
    """Returns the devices of a row's slices."""
    return cell["slices"] * cell["chips_per_slice"] * TPUS[cell["tpu"]].devices_per_chip


# ----------------------------------------------------------------------------------------- the content of pages


def groups(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Returns the held-back rows, in all and by generation, and the rows that chose the rates."""
    held = [line for line in lines if not line["chose_rates"]]
    found = {"held back, all": held}
    for tpu in dict.fromkeys(line["tpu"] for line in held):
        found[tpu] = [line for line in held if line["tpu"] == tpu]
    found["several slices"] = [line for line in held if line["slices"] > 1]
    return found | {"chose the rates": [line for line in lines if line["chose_rates"]]}


def table(lines: Sequence[Line]) -> str:
    """Returns each row: published and predicted seconds, with our overlap too, and memory."""
    rows = []
    for line in lines:
        seconds = [f"{line[key]:.2f}" for key in ("published_s", "predicted_s")]
        chose = "chose rates" if line["chose_rates"] else ""
        cells = [name(line), line["inside_slice"], line["remat"], *seconds, f"{error(line, 'published_s'):+.1%}"]
        rows.append([*cells, f"{line['ours_s']:.2f}", f"{line['memory_bytes'] / 1e9:.1f}", chose])
    head = ["model and slices", "inside a slice", "published remat", "step, s: published", "predicted", "error"]
    return markdown([*head, "with our overlap", "memory, GB", ""], rows)


main = replaying(__doc__, RESULTS, cells, name, replayed, devices)

if __name__ == "__main__":
    sys.exit(choose() if sys.argv[1:] == ["--choose"] else main())
