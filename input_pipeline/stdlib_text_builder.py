"""The TFDS builder of `stdlib_text`: array_record files, without TensorFlow and without a download."""

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from input_pipeline import stdlib_documents


class StdlibText(tfds.core.GeneratorBasedBuilder):
    """The sources of the running Python's standard library and the topics of its manual, split by file."""

    VERSION = tfds.core.Version(stdlib_documents.RELEASE)
    RELEASE_NOTES = {stdlib_documents.RELEASE: "The rules of stdlib_documents.py."}
    url_infos = None  # nothing to download; checksums would need a package that TFDS does not declare

    def _info(self) -> tfds.core.DatasetInfo:
        self.documents = stdlib_documents.by_split(stdlib_documents.library_documents())
        return tfds.core.DatasetInfo(
            builder=self,
            description="The sources of the Python standard library and `pydoc_data.topics`, one example per file.",
            features=tfds.features.FeaturesDict({"name": tfds.features.Text(), "text": tfds.features.Text()}),
            disable_shuffling=True,
            license="PSF License Version 2",
            metadata=tfds.core.MetadataDict(
                {split: stdlib_documents.fingerprint(iter(texts.items())) for split, texts in self.documents.items()}
            ),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager):
        del dl_manager
        return {split: self._generate_examples(texts) for split, texts in self.documents.items()}

    def _generate_examples(self, texts: dict[str, str]):  # pyright: ignore[reportIncompatibleMethodOverride]
        for number, (name, text) in enumerate(texts.items()):
            yield number, {"name": name, "text": text}


def prepare(folder: Path) -> None:
    """Writes the data set below `folder`."""
    with _quiet():
        builder = StdlibText(data_dir=str(folder), file_format="array_record")
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))


def defect(folder: Path) -> str:
    """Returns what is wrong with a prepared data set, "" if nothing; checks that its fingerprints match its content."""
    try:
        builder = _open(folder)
        for split, expected in (builder.info.metadata or {}).items():
            if stdlib_documents.fingerprint(_records(builder, split)) != expected:
                return f"the content of split {split} does not match its fingerprint"
        return "" if builder.info.metadata else "the fingerprints are missing"
    except Exception as error:  # damaged files can raise any exception
        return f"{type(error).__name__}: {error}"


def documents(folder: Path, split: str) -> Iterator[str]:
    """Yields the texts of a split, sorted by name."""
    for _, text in _records(_open(folder), split):
        yield text


def _open(folder: Path) -> Any:
    with _quiet():
        return tfds.builder_from_directory(str(folder / "stdlib_text" / str(StdlibText.VERSION)))


def _records(builder: Any, split: str) -> Iterator[tuple[str, str]]:
    records = builder.as_data_source(split=split)
    for place in range(len(records)):
        yield records[place]["name"].decode(), records[place]["text"].decode()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disables TFDS's progress bars, its output and its log messages below warnings."""
    logger = logging.getLogger("absl")
    level = logger.level
    tfds.disable_progress_bar()
    logger.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        tfds.enable_progress_bar()
