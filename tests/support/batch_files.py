"""Runs that write the rows of their batches to files, and the check of these rows."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.schema import Config, DataConfig
from input_pipeline import load
from runtime.consensus import barrier
from runtime.exit_codes import ResumableError
from training.datasets import load_datasets
from training.experiment import Experiment, make_experiment

RESUMABLE = 75


def writes_batches(out: str) -> Callable[[Config], Experiment]:
    """Returns a maker that ends the run: it writes this process' shards of the batches of `TIMES` into `out`."""

    def write_shards(config: Config) -> Experiment:
        ex, found = make_experiment(config), {}
        for first in (0, 1):
            with ex.batches.read(
                load_datasets(ex, Path(out), ExitStack().enter_context).train, first, prefetch=1
            ) as batches:
                for step in range(first, 2):
                    for name, x in ex.batches.to_devices(next(batches)).items():
                        for number, shard in enumerate(x.addressable_shards):
                            place = [cut.indices(size)[:2] for cut, size in zip(shard.index, x.shape, strict=True)]
                            key = f"{first} {step} {name} {number}"
                            found |= {f"{key} data": np.asarray(shard.data), f"{key} place": np.array(place)}
                            found[f"{first} {step} {name} shape"] = np.array(x.shape)
        np.savez(f"{out}/{jax.process_index()}.npz", **found)
        barrier("written")
        raise ResumableError("the batches are written")

    return write_shards


def check_batches(out: Path, num_processes: int, global_size: int, rows_wanted: Sequence[Any] = ()) -> None:
    """Checks that the shards of all processes are, together, the rows of the data set, or those given."""
    files = [dict(np.load(out / f"{i}.npz")) for i in range(num_processes)]
    config = {"source": "synthetic", "path": "", "tokenizer": "bytes", "tokenizer_path": "", "seq_len": 32}
    config |= {"image_size": 8, "channels": 1, "augment": "none"}
    dataset = rows_wanted or load(DataConfig(**config, objective="causal", mask_rate=0.15, prefetch=4), "train", 0)
    for first, step in TIMES:
        for name in dataset[0]:
            prefix = f"{first} {step} {name}"
            whole = np.full(files[0][f"{prefix} shape"], -1.0)
            for file in files:
                for key in [key for key in file if key.startswith(prefix) and key.endswith("data")]:
                    place = tuple(slice(*cut) for cut in file[key.replace("data", "place")])
                    assert ((whole[place] == -1) | (whole[place] == file[key])).all()  # copies are the same
                    whole[place] = file[key]
            rows = whole.reshape(-1, whole.shape[-1])
            wanted = np.stack([dataset[step * global_size + r][name] for r in range(global_size)])
            np.testing.assert_array_equal(rows[:global_size], wanted)
            assert (rows[global_size:] == 0).all()


TIMES = ((0, 0), (0, 1), (1, 1))  # first step of the run (after a restart: 1), step
