"""The files of a checkpoint step, shared among processes that hash them: each is somebody's, and only one's."""

from pathlib import Path

import pytest

from elastic import manifest
from elastic.manifest import DamagedError, File

FILES = {  # as Orbax leaves them
    manifest.STATE_FILE: 300,
    manifest.DATA_FILE: 2,
    manifest.CONFIG_FILE: 50,
    "state/d/merged": 700,
    "state/array_metadatas/process_1": 9,
    "state/ocdbt.process_0/d/a": 4000,
    "state/ocdbt.process_0/manifest.ocdbt": 100,
    "state/ocdbt.process_1/d/a": 3000,
    "state/ocdbt.process_1/d/b": 5000,
    "state/ocdbt.process_10/d/a": 1000,
}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A folder of those files, which 11 processes wrote."""
    for number, (name, size) in enumerate(FILES.items()):
        (tmp_path / "7" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "7" / name).write_bytes(bytes([number]) * size)
    return tmp_path / "7"


def build(step: Path, files: tuple[File, ...]) -> manifest.Manifest:
    return manifest.build(step, files, step=7, tree=(), metrics={})


def test_each_file_is_described_once_and_the_manifest_is_that_of_one_process(step: Path) -> None:
    for count in (1, 2, 11, 64):
        by_process = [manifest.describe(step, process, count) for process in range(count)]
        together = tuple(file for files in by_process for file in files)
        assert sorted(file.path for file in together) == sorted(FILES)
        assert build(step, together[::-1]).files == build(step, manifest.describe(step)).files
        assert [file.path for file in build(step, together).files] == [str(path) for path in sorted(map(Path, FILES))]
        for process, files in enumerate(by_process[1:], start=1):
            assert all(file.path.startswith(f"state/ocdbt.process_{process}/") for file in files)


def test_all_that_is_described_is_forced_to_disk(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the folders, so that the names are there."""
    synced: set[Path] = set()
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.add(Path(f"/proc/self/fd/{descriptor}").readlink()))
    for process in range(11):
        manifest.describe(step, process, 11)
    assert synced == {step, *step.rglob("*")}


def test_a_file_that_nobody_described_is_no_part_of_a_checkpoint(step: Path) -> None:
    files = manifest.describe(step)
    (step / "state" / "ocdbt.process_2").mkdir()
    with pytest.raises(DamagedError, match=r"state/ocdbt.process_2 is not in the manifest"):
        build(step, files)


def test_whatever_is_damaged_one_process_finds_it(step: Path) -> None:
    manifest.write(step, build(step, manifest.describe(step)))
    for count in (1, 3, 12):
        for process in range(count):
            manifest.verify(step, share=(process, count))
        for name in FILES:
            content = (step / name).read_bytes()
            for damaged in (content[:-1] + b"\xff", content[:-1]):
                (step / name).write_bytes(damaged)
                finders = [process for process in range(count) if finds_damage(step, name, (process, count))]
                assert len(finders) == 1, name
            (step / name).write_bytes(content)
    (step / "state" / "stranger").touch()
    assert [finds_damage(step, "state/stranger", (process, 3)) for process in range(3)].count(True) == 1


def finds_damage(step: Path, name: str, share: tuple[int, int]) -> bool:
    try:
        manifest.verify(step, share=share)
    except DamagedError as error:
        assert name in str(error)
        return True
    return False
