"""Prints the collectives of a train step that is compiled for H100s, 4 nodes of 2, on a machine that has none.

    PYTHONPATH=.venv/h100:. python tests/compiling.py '{"compression.hop_two": "int8"}'

The argument changes keys of `configs/quickstart.py`. A process of its own: with the CUDA plug-in in its path jax looks
for a GPU, and says so.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import jax
from jax.experimental import topologies

from configs import base, quickstart
from sharding import hlo
from training.experiment import make_experiment

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "planner" / "h100_target_config.txt"
LAYERS, HIDDEN, MLP = 2, 128, 256
SMALL = {
    "model.num_layers": LAYERS,
    "model.hidden": HIDDEN,
    "model.intermediate": MLP,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "data.source": "synthetic",
    "data.seq_len": 32,
    "batch.global_size": 16,
    "batch.micro_size": 1,
}


def main() -> None:
    """Compiles and prints, as JSON."""
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc(
        topology_name="h100", platform="cuda", target_config=TARGET.read_text(), topology="1x4x2"
    )
    jax.devices = lambda: topology.devices  # what make_experiment takes
    config = quickstart.get_config()
    changes = json.loads(sys.argv[1])
    if "model.kind" in changes:
        config.model = base.model(changes["model.kind"])
    small = {key: value for key, value in SMALL.items() if not key.startswith("model.") or key[6:] in config.model}
    config.update_from_flattened_dict(small | changes)
    experiment = make_experiment(base.typed(config))
    collectives = hlo.read_collectives(experiment.compile_train_step().as_text() or "", experiment.plan.layout.shape)
    print(json.dumps([asdict(collective) for collective in collectives]))


if __name__ == "__main__":
    main()
