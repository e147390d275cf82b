"""Writes the Python sources of pinned packages as a folder of text, 160 MB, the same on every machine.

    python -m lab.benchmarks.site_packages --to=runs/site_packages
    python train.py --config=configs/base.py --workdir=runs/text \
        --config.data.source=folder --config.data.path=runs/site_packages
    python -m lab.benchmarks.site_packages --record      # after a change of requirements/constraints.txt

site_packages.csv names the packages, with the version, size and hash of each: the packages in
requirements/constraints.txt whose wheels are the same on every platform, without two generated ones. A document is a
source file; a file that occurs several times is written once. Documents are assigned to FILES files by the hash of
their names, so that the validation files of data.source=folder hold documents of all packages.
"""

import csv
import hashlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path

from lab.benchmarks.runner import ROOT, options_of, program
from runtime.files import atomic

CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
PACKAGES = Path(__file__).with_suffix(".csv")
GENERATED = ("kubernetes", "kubeflow_trainer_api")  # a third of all bytes, with few different lines
FILES = 64
DONE = ".sha256"  # in the folder: the hash of all documents, of a folder that is complete
Row = Mapping[str, str]


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Writes the folder, or the list of packages; returns 0."""
    options = options_of(
        __doc__,
        argv,
        to=("runs/site_packages", "the folder"),
        record=(False, "write site_packages.csv from the installed packages instead"),
    )
    if options.record:
        atomic.replace(PACKAGES, table_of(pinned(CONSTRAINTS.read_text()), sys.path))
        return 0
    print(f"{options.to}: sha256 {write(Path(options.to), rows_of(PACKAGES), sys.path)}")
    return 0


def write(folder: Path, rows: Sequence[Row], path: Sequence[str]) -> str:
    """Writes the documents of packages installed on `path`, unless the folder is complete; returns their hash.

    ValueError, with the package, if one is missing or differs from its row.
    """
    wanted = hashlib.sha256("".join(row["sha256"] for row in rows).encode()).hexdigest()
    if (folder / DONE).exists() and (folder / DONE).read_text() == wanted:
        return wanted
    texts, seen = [bytearray() for _ in range(FILES)], set[bytes]()
    for row in rows:
        documents = checked(row, path)
        for name, content in documents.items():
            if (digest := hashlib.sha256(content).digest()) not in seen:
                seen.add(digest)
                texts[hashlib.sha256(name.encode()).digest()[0] % FILES] += content + b"\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DONE).unlink(missing_ok=True)
    for number, text in enumerate(texts):
        atomic.replace(folder / f"{number:02}.py", bytes(text))
    atomic.replace(folder / DONE, wanted)
    return wanted


def checked(row: Row, path: Sequence[str]) -> dict[str, bytes]:
    """Returns the documents of a package, by name. ValueError if it is not the one in the row."""
    name, version = row["package"], row["version"]
    remedy = f"pip install --no-deps --force-reinstall {name}=={version}"
    found = distribution(name, path)
    if not found or found.version != version:
        raise ValueError(f"{name} {version} is not installed, but {found.version if found else 'nothing'}: {remedy}")
    documents = documents_of(found)
    if hash_of(documents) != row["sha256"]:
        raise ValueError(f"{name} {version} has other source files than in {PACKAGES.name}: {remedy}")
    return documents


def documents_of(package: Distribution) -> dict[str, bytes]:
    """Returns the source files of a package that are UTF-8 text and not empty, sorted by name."""
    names = {str(file): file for file in package.files or () if file.suffix == ".py" and ".." not in file.parts}
    contents = {name: Path(str(names[name].locate())).read_bytes() for name in sorted(names)}
    return {name: content for name, content in contents.items() if content and is_text(content)}


def is_text(content: bytes) -> bool:
    """Whether bytes are UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def hash_of(documents: Mapping[str, bytes]) -> str:
    """Returns the hash of names and contents."""
    digest = hashlib.sha256()
    for name, content in documents.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def distribution(name: str, path: Sequence[str]) -> Distribution | None:
    """Returns the package installed on `path`, or None."""
    context = DistributionFinder.Context(name=name, path=[*path])
    return next(iter(MetadataPathFinder.find_distributions(context)), None)


# ------------------------------------------------------------------------------------------------------- the table


def rows_of(file: Path) -> list[Row]:
    """Returns the rows of site_packages.csv."""
    return list(csv.DictReader(io.StringIO(file.read_text())))


def pinned(constraints: str) -> Iterator[tuple[str, str]]:
    """Yields name and version of each package in a file of constraints."""
    for line in constraints.splitlines():
        name, separator, version = line.partition("==")
        if separator and not name.startswith("#"):
            yield name, version.split()[0]


def table_of(packages: Iterator[tuple[str, str]], path: Sequence[str]) -> str:
    """Returns site_packages.csv for the pinned packages that are the same on every platform.

    ValueError if a package is not installed in its version.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["package", "version", "files", "bytes", "sha256"])
    for name, version in sorted(packages):
        found = distribution(name, path)
        if not found or found.version != version:
            raise ValueError(f"{name} {version} is not installed, but {found.version if found else 'nothing'}")
        documents = documents_of(found)
        if name not in GENERATED and documents and "Root-Is-Purelib: true" in (found.read_text("WHEEL") or ""):
            size = sum(map(len, documents.values()))
            writer.writerow([name, version, len(documents), size, hash_of(documents)])
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
