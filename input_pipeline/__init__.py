"""Batches that are a pure function of (seed, step), for any number of processes and across restarts.

    config = DataConfig(source="stdlib_text", ...)             # configs/schema/data.py
    dataset = load(config, "train", seed=0)                    # dataset.py: dataset[i] for any i >= 0
    with Batches(dataset, global_size=32, rows=range(32),      # batches.py: rows of each step, prefetched
                 start_step=0, prefetch=4) as batches:
        batch = next(batches)                                  # e.g. tokens, targets, weights: [rows, T]

Text becomes examples in three steps. A source yields documents (`stdlib_text.py`, `folder.py`, `tfds_data.py`). A
tokenizer turns them once into one long token stream in the cache (`tokenizers.py`, `streams.py`, `cache.py`). The
stream's windows are drawn in an order that depends on the seed only (`index.py`). `synthetic.py` needs no text.
`packing.py` keeps the documents of a row apart, and `mixture.py` mixes several sources by weight.
`shards.py` reads text from object storage instead, file by file (docs/data.md).
Labelled images (`images.py`, `tfds_data.py`, `synthetic.py`) are drawn in the same way, then cropped, shifted, mirrored
and resized.
"""

from input_pipeline.batches import Batches
from input_pipeline.dataset import Dataset, load
from input_pipeline.images import ImageDataset
from input_pipeline.index import RowArray, row_arrays
from input_pipeline.mixture import MixedDataset
from input_pipeline.text import TextDataset

__all__ = ["Batches", "Dataset", "ImageDataset", "MixedDataset", "RowArray", "TextDataset", "load", "row_arrays"]
