"""The training and validation data of an experiment, checked against its model and between processes."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from input_pipeline import Dataset, ImageDataset, MixedDataset, load
from training.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The training and validation data of a run."""

    train: Dataset
    validation: Dataset

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Hashes of both, by their names in checkpoints."""
        return {"fingerprint": self.train.fingerprint, "validation_fingerprint": self.validation.fingerprint}

    def described(self, num_examples: int) -> list[str]:
        """Returns lines for the user on a run of so many examples: how often a mixture repeats each source."""
        if isinstance(self.train, ImageDataset):
            return []
        lines = [self.train.epochs(num_examples)] if isinstance(self.train, MixedDataset) else []
        if self.train.filled < 1:
            lines.append(f"rows of whole documents: {self.train.filled:.2%} of the positions hold tokens")
        return lines


def load_datasets(experiment: Experiment) -> Datasets:
    """Loads both splits. ValueError if the model has too few ids or classes, or if the processes' data differ."""
    config = experiment.config
    train, validation = (load(config.data, split, config.seed) for split in ("train", "validation"))
    for dataset in (train, validation):
        _check_size(experiment, dataset)
        if jax.process_count() > 1:
            everyone = multihost_utils.process_allgather(np.frombuffer(bytes.fromhex(dataset.fingerprint), np.uint8))
            if not (everyone == everyone[0]).all():
                raise ValueError(f"{config.data.origin} differs between processes; give all the same data")
    return Datasets(train=train, validation=validation)


def _check_size(experiment: Experiment, dataset: Dataset) -> None:
    data, model = experiment.config.data, experiment.config.model
    if isinstance(dataset, ImageDataset):
        key, there, what = "num_classes", dataset.num_classes, f"classes of data.source={data.source}"
    else:
        key, there, what = "vocab_size", dataset.vocab_size, f"ids of data.tokenizer={data.tokenizer}"
    if there > (here := getattr(model, key)):
        raise ValueError(f"model.{key}={here} is less than the {there} {what}; set model.{key}={there}")
