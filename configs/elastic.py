"""A decoder of 6.4 M parameters with short sequences and a snapshot every step, for tests of failures.

    python -m lab.benchmarks.elastic
    python -m lab.chaos --config=configs/elastic.py:tiny

On CPUs nothing overlaps; without `sharding.overlap` each restart compiles its step faster.
`:tiny` has 28 thousand parameters and runs many steps quickly. 24 rows per step can be split over 1 to 4 nodes of 2.

Hardware: 2 CPU cores and root for the emulated cluster, 4 nodes of 2 devices (docs/results/elasticity_measured.md).
Expected: the loss falls from 5.5 to 2 in 500 steps (tiny: 30 s in one process).
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    """Returns the config; `arg` is "" or "tiny"."""
    if arg not in ("", "tiny"):
        raise ValueError(f"configs/elastic.py:{arg} is not known; use :tiny, or no argument")
    config = base.get_config()
    config.model.update({"num_layers": 6, "hidden": 256, "intermediate": 1024})
    config.data.seq_len = 16
    config.num_steps = 100_000
    config.checkpoint.every = 20
    if arg == "tiny":
        config.model.update({"num_layers": 2, "hidden": 32, "intermediate": 64, "num_heads": 2, "num_kv_heads": 2})
        config.data.seq_len = 32
        config.num_steps = 2000
        config.checkpoint.every = 50
    config.batch.update({"global_size": 24, "micro_size": 1})
    config.mesh.devices_per_node = 2
    config.sharding.update({"partition_size": 2, "overlap": "off"})
    config.optimizer.schedule = "constant"
    config.elastic.update({"snapshot_every": 1, "silence_s": 10.0})
    config.eval.update({"every": 0, "num_batches": 1})
    config.sample.length = 0
    return config
