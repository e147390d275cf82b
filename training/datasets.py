"""The training and validation data of an experiment, checked against its model and between processes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import jax

from configs.schema import Config
from configs.schema.data import PATHS
from configs.schema.mixture import SPLIT
from input_pipeline import Dataset, ImageDataset, MixedDataset, load
from input_pipeline.bad_documents import check
from input_pipeline.dataset import Split
from input_pipeline.shards import ShardProcesses, ShardSet, check_room
from input_pipeline.tokenizers import Tokenizer, tokenizer_for
from runtime.consensus import all_gather, new_key
from runtime.files import atomic, run_directory
from runtime.handshake import shared_token
from training import answer_ends
from training.experiment import Experiment
from training.resume import has_begun


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The training and validation data of a run."""

    train: Dataset
    validation: Mapping[str, Dataset]  # by the names of `eval.data`; "" without them. The first is the main set
    shards: Sequence[ShardSet] = ()  # of data.source=shards, or of such components of a mixture
    skipped: Sequence[str] = ()  # place and fault of each broken document that a process leaves out

    def counters(self) -> Mapping[str, float]:
        """Returns counters of this process' reads, by the keys of metrics.jsonl; none for sources other than shards."""
        every = [opened.tiers.counters.scalars() for opened in self.shards]
        return {key: sum(one[key] for one in every) for key in every[0]} if every else {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None for images."""
        return None if isinstance(self.train, ImageDataset) else self.train.tokenizer

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Hashes of the training data and its validation split, by their names in checkpoints.

        Sets of `eval.data` may change when a run resumes.
        """
        split = next((self.validation[name] for name in ("", SPLIT) if name in self.validation), None)
        found = {"fingerprint": self.train.fingerprint}
        return found | ({"validation_fingerprint": split.fingerprint} if split else {})

    def write_skipped(self, workdir: Path) -> None:
        """Writes the places and faults of the skipped documents, in one process, if documents were skipped."""
        if jax.process_index() == 0 and self.skipped:
            atomic.replace(workdir / run_directory.SKIPPED, "".join(f"{line}\n" for line in self.skipped))

    def described(self, num_examples: int) -> list[str]:
        """Returns lines for the user on a run of so many examples: how often a mixture repeats each source."""
        if isinstance(self.train, ImageDataset):
            return []
        lines = [self.train.epochs(num_examples)] if isinstance(self.train, MixedDataset) else []
        if self.skipped:
            lines.append(f"broken documents that are skipped: {len(self.skipped)}, named in {run_directory.SKIPPED}")
        if self.train.filled < 1:
            lines.append(f"rows of whole documents: {self.train.filled:.2%} of the positions hold tokens")
        lines += answer_ends.warnings(self.train)
        summaries = {"training": self.train.summary}
        for name, data in self.validation.items():
            assert not isinstance(data, ImageDataset)
            summaries[f"validation {name}".strip()] = data.summary
        return lines + [f"{what}: {summary}" for what, summary in summaries.items() if summary]


def load_datasets(
    experiment: Experiment, workdir: Path, register: Callable[[AbstractContextManager[object]], object]
) -> Datasets:
    """Loads both splits. ValueError if the model has too few ids or classes, or if the processes' data differ.

    `register` gets each open shard set, and closes it when the run ends.
    """
    config = experiment.config
    tokenizer = None if config.data.objective == "classify" else tokenizer_of(config)
    own = [data for name, data in config.validation_data().items() if name != SPLIT]
    sources = [*([config.data.alone(one) for one in config.data.components] or [config.data]), *own]
    shards: list[ShardSet] = []
    if stored := [data for data in sources if data.source == "shards"]:
        count = jax.process_count()
        token = shared_token(workdir) if count > 1 else ""
        world = ShardProcesses(process=jax.process_index(), count=count, token=token)
        for data in stored:
            shards.append(ShardSet(data, tokenizer, world, was_reached=has_begun(workdir)))
            register(shards[-1])
    train = load(config.data, "train", config.seed, shards, tokenizer)
    validation = validation_sets(config, shards, tokenizer)
    if shards:
        check_room(shards)
    _check(experiment, train, config.data.origin)
    for name, data in validation.items():
        _check(experiment, data, config.data.origin if name in ("", SPLIT) else f"eval.data, set {name},")
    skipped = skipped_by_all(train, *validation.values())
    check(skipped, config.data.skip_bad)
    return Datasets(train=train, validation=validation, shards=shards, skipped=skipped)


def skipped_by_all(*datasets: Dataset) -> list[str]:
    """Returns place and fault of each broken document that any process leaves out; every process must call it.

    Splits and processes may share files, whose documents count once.
    """
    texts = [data for data in datasets if not isinstance(data, ImageDataset)]
    by_process = all_gather(new_key("skipped"), [line for data in texts for line in data.skipped] or None)
    return [*dict.fromkeys(line for lines in by_process for line in lines or ())]


def tokenizer_of(config: Config) -> Tokenizer:
    """Returns the tokenizer of a model of text. ValueError if the model has too few ids for it."""
    data, size = config.data, config.values["model.vocab_size"]
    tokenizer = tokenizer_for(data, size)
    _check_size(config, "vocab_size", tokenizer.vocab_size(data.objective), f"ids of data.tokenizer={data.tokenizer}")
    return tokenizer


def validation_sets(config: Config, shards: Sequence[ShardSet], tokenizer: Tokenizer | None) -> dict[str, Dataset]:
    """Returns the validation sets by name; without `eval.data` the validation split, named "".

    Files of a named set are read completely. ValueError, which names the set, if it cannot be read.
    """
    sets: dict[str, Dataset] = {}
    for name, data in (config.validation_data() or {"": config.data}).items():
        split: Split = "validation" if name in ("", SPLIT) or data.source not in PATHS else "all"
        try:
            sets[name] = load(data, split, config.seed, shards, tokenizer)
        except ValueError as error:
            raise ValueError(f"eval.data, set {name}: {error}" if name else str(error)) from error
    return sets


def _check(experiment: Experiment, dataset: Dataset, origin: str) -> None:
    config = experiment.config
    if isinstance(dataset, ImageDataset):
        _check_size(config, "num_classes", dataset.num_classes, f"classes of data.source={config.data.source}")
    # no collective, which times out after half an hour: one process may have to tokenise texts that others cached
    if len({*all_gather(new_key("fingerprint"), dataset.fingerprint)}) > 1:
        raise ValueError(f"{origin} differs between processes; give all the same data")


def _check_size(config: Config, key: str, there: int, what: str) -> None:
    if there > (here := getattr(config.model, key)):
        raise ValueError(f"model.{key}={here} is less than the {there} {what}; set model.{key}={there}")
