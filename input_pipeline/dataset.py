"""Examples by index: `load` returns a `Dataset` whose example `i` depends on (seed, i) only."""

from collections.abc import Sequence
from typing import Literal

from configs.schema import DataConfig
from configs.schema.own import OWN
from input_pipeline import chats, folder, index, packing, stdlib_text, streams, tfds_data
from input_pipeline.images import Digits, ImageDataset, Images
from input_pipeline.mixture import MixedDataset
from input_pipeline.shards import ShardSet
from input_pipeline.synthetic import SyntheticImages, SyntheticWindows
from input_pipeline.text import StreamWindows, TextDataset
from input_pipeline.tokenizers import HuggingFace, Tokenizer, tokenizer_for

Split = Literal["train", "validation", "all"]  # `all` is both together, for data.source=folder and chats only
SPLITS: tuple[Split, ...] = ("train", "validation")

Dataset = TextDataset | MixedDataset | ImageDataset


def load(
    config: DataConfig, split: Split, seed: int, shards: Sequence[ShardSet] = (), tokenizer: Tokenizer | None = None
) -> Dataset:
    """Returns the examples of a split. Text is tokenised into the cache the first time.

    `shards` are the open shard sets of data.source=shards. A missing set is opened for this process alone. The default
    `tokenizer` is the tokenizer of the config, for a model that has all its ids.
    Raises ValueError for missing, empty or unreadable data or vocabularies, and for data too small for one example.
    """
    if config.objective == "classify":
        return ImageDataset(_images(config, split), config, seed, training=split == "train")
    tokenizer = tokenizer or tokenizer_for(config)
    if components := config.components:
        examples = [_load_text(config.alone(component), split, seed, shards, tokenizer) for component in components]
        return MixedDataset(examples, [one.name for one in components], [one.weight for one in components])
    return _load_text(config, split, seed, shards, tokenizer)


def _images(config: DataConfig, split: Split) -> Images:
    if config.source == "digits":
        return Digits(split)
    if config.source == "synthetic":
        return SyntheticImages(config.image_size, config.channels, split)
    if config.source in OWN["source"]:
        return OWN["source"][config.source](config, split)
    return tfds_data.TfdsImages(config.source.removeprefix("tfds:"), config.path, split)


def _load_text(
    config: DataConfig, split: Split, seed: int, shards: Sequence[ShardSet], tokenizer: Tokenizer
) -> TextDataset:
    if config.source == "synthetic":
        windows = SyntheticWindows(config.seq_len, config.objective, tokenizer.num_ids, split)
    elif config.source == "chats":
        assert isinstance(tokenizer, HuggingFace)  # guaranteed by the config's validation
        windows = chats.load_rows(config, split, tokenizer)
    elif config.source == "shards":
        opened = next((one for one in shards if one.config.path == config.path), None) or ShardSet(config, tokenizer)
        windows = opened.windows(split)
    else:
        source = _text_source(config, split)
        stream = streams.tokenised(source, tokenizer, config.skip_bad)
        if config.packing == "whole":
            windows = packing.WholeDocuments(stream, config.seq_len, config.objective, tokenizer)
        else:
            windows = StreamWindows(stream, config.seq_len, config.objective)
        if len(windows) == 0:
            needed = config.seq_len + (config.objective == "causal")
            raise ValueError(
                f"{source.name} has {len(stream.tokens)} tokens in its {split} split, but one example needs {needed}: "
                "lower data.seq_len or add text"
            )
    if windows.shuffled_together > index.MAX_WINDOWS:
        raise ValueError(
            f"data.seq_len={config.seq_len} gives the {split} split {windows.shuffled_together} windows, more than the "
            f"{index.MAX_WINDOWS} that can be shuffled; raise data.seq_len"
        )
    if isinstance(windows, chats.ChatRows):
        return chats.ChatDataset(windows, tokenizer, config, seed)
    return TextDataset(windows, tokenizer, config, seed)


def _text_source(config: DataConfig, split: Split) -> streams.TextSource:
    if config.source == "stdlib_text":
        return stdlib_text.source(split)
    if config.source == "folder":
        return folder.source(config.path, split, config.pattern)
    if config.source in OWN["source"]:
        return OWN["source"][config.source](config, split)
    return tfds_data.source(config.source.removeprefix("tfds:"), config.path, split)
