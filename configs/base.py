"""Returns the config that every experiment starts from: the defaults of `configs/schema/`, which says what keys mean.

An experiment changes what it needs (`config = base.get_config(); config.model.num_layers = 12`); the command line
changes it further (`--config.batch.global_size=64`); `typed` checks the outcome and returns what the programs take.
"""

from ml_collections import ConfigDict

from configs.schema import Config, defaults


def decoder() -> ConfigDict:
    """A decoder-only language model (`models/decoder.py`)."""
    return ConfigDict(defaults("decoder")["model"])


def encoder() -> ConfigDict:
    """A BERT / RoBERTa encoder trained by masked language modelling (`models/encoder.py`)."""
    return ConfigDict(defaults("encoder")["model"])


def resnet() -> ConfigDict:
    """A ResNet that classifies images (`models/resnet.py`)."""
    return ConfigDict(defaults("resnet")["model"])


def get_config(arg: str = "") -> ConfigDict:
    """Returns the base config: a small decoder on the Python standard library's text."""
    del arg  # of the experiment that starts from it
    return ConfigDict(defaults())


def no_argument(arg: str, file: str) -> None:
    """ValueError for what follows a colon in `--config=FILE:arg`, if the config file has no variants."""
    if arg:
        raise ValueError(f"{file} takes no :arg; leave out :{arg}")


def typed(config: ConfigDict) -> Config:
    """Returns the checked config of an experiment. ValueError names a key or a value that no run takes."""
    return Config.from_dict(config.to_dict())
