"""The stream of tokens of a split of data.source=folder, for the tests of examples and tokenizers."""

from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import DataConfig
from input_pipeline import load
from input_pipeline.dataset import Split


def settings(corpus: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(**{"source": "folder", "path": str(corpus), "seq_len": 1, "objective": "masked"} | changes)


def ids_of(config: DataConfig, split: Split) -> np.ndarray:
    """Returns the stream of a split, which the tests of the examples cut into windows."""
    return np.array(load(config, split, 0)._windows._tokens)  # pyright: ignore


def text_of(config: DataConfig, split: Split) -> bytes:
    return ids_of(config, split).astype(np.uint8).tobytes()
