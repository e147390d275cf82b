"""A run directory that metrics and reports read."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from support.parsed_page import EVIL, PIXEL


def make_run(folder: Path, num_steps: int = 120) -> Path:
    """Writes the files of a finished run as train.py writes them."""
    rng = np.random.default_rng(0)
    lines = []
    for step in range(1, num_steps + 1):
        row: dict[str, Any] = {"step": step, "loss": 2 + 3 * math.exp(-step / 20), "data_wait_s": 0.002}
        row |= {"learning_rate": 1e-3 * step / num_steps, "grad_norm": 2 + rng.random()}
        row |= {"collective_inter_bytes": 1_650_012, "collective_intra_bytes": 4_430_012}
        if step > 1:
            row |= {"step_time_s": 0.2 + 0.01 * rng.random(), "tokens_per_s": 8192 / 0.2}
            row |= {"wire_tx_bytes": 3.4e6, "wire_rx_bytes": 3.3e6}
        if step % 40 == 0:
            row |= {"validation_loss": 2.1, "validation_bits_per_byte": 3.03}
        if step == 60:
            row["loss"] = "NaN"
        lines.append(json.dumps(row))
    sharding = {"strategy": "mics", "partition_size": 2, "gather": "layer"}
    config = {"model": {"kind": "decoder", "num_layers": 4, "hidden": 128}, "sharding": sharding}
    config |= {"ablation": {"hierarchical": True, "two_hop": False}}
    config |= {"batch": {"global_size": 32, "micro_size": 4}, "data": {"path": EVIL}}
    mesh = {"replica_inter": 4, "shard_inter": 1, "replica_intra": 1, "shard_intra": 2, "tensor": 1}
    collectives = [
        collective("gather", "all-gather", ["shard_intra"], 8, 2_210_000, 0),
        collective("group-reduce-scatter", "reduce-scatter", ["shard_intra"], 4, 2_220_000, 0),
        collective("replica-all-reduce", "all-reduce", ["replica_inter"], 1, 0, 1_650_000),
        collective("", EVIL, ["replica_inter", "shard_intra"], 2, 12, 12),
    ]
    command = "python train.py --config=configs/quickstart.py:x --workdir=/runs/a"
    environment = {"command": command, "git_commit": "0123abcd", "mesh": mesh, "versions": {"jax": "0.10.2"}}
    sent = {"collectives": collectives, "intra_bytes": 4_430_012, "inter_bytes": 1_650_012}
    summary = {"steps": num_steps, "final_loss": 2.00712, "validation_loss": 2.0834, "wall_time_s": 133.2}
    summary |= {"validation_bits_per_byte": 3.0057, "exit_reason": "finished"}
    files = {
        "metrics.jsonl": "\n".join(lines) + "\n",
        "config.json": json.dumps(config),
        "environment.json": json.dumps(environment),
        "collectives.json": json.dumps(sent),
        "summary.json": json.dumps(summary),
        "sample.txt": f"def f(x):\n    return {EVIL}\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "mesh.png").write_bytes(PIXEL)
    return folder


def collective(name: str, kind: str, axes: list[str], times: int, intra: int, inter: int) -> dict[str, Any]:
    return {
        "name": name, "kind": kind, "axes": axes, "dtype": "f32", "payload_bytes": 1_100_000, "times": times,
        "intra_bytes": intra, "inter_bytes": inter,
    }  # fmt: skip
