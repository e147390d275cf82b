"""Files that several programs share, whole or not at all, with one holder of a lock; JSON from outside the process."""

import json
import os
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from support.failing import fails, no_locks
from support.tables import check_rows, raised

from runtime.files import atomic, json_lines, json_objects, locks


def test_a_kill_between_write_and_rename_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", fails(KeyboardInterrupt))
        atomic.replace(file, "new")
    assert file.read_text() == "old" and (tmp_path / "a.partial").read_text() == "new"
    atomic.replace(file, b"newer")  # what the kill left is in nobody's way
    assert file.read_bytes() == b"newer" and [*tmp_path.iterdir()] == [file]


def test_what_is_durable_is_on_the_disk_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the content, then the move, then the name in the folder."""
    file, done, rename = tmp_path / "a.json", [], Path.rename

    def force(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append((path, path.stat().st_size if path.is_file() else 0))

    def move(path: Path, target: Path) -> Path:
        done.append(("moved", path.stat().st_size))
        return rename(path, target)

    monkeypatch.setattr("os.fsync", force)
    monkeypatch.setattr(Path, "rename", move)
    atomic.replace(file, "content")
    assert done == [("moved", 7)]
    atomic.replace(file, "content", durable=True)
    assert done[1:] == [(tmp_path / "a.partial", 7), ("moved", 7), (tmp_path, 0)]


def test_a_private_file_is_new_and_follows_no_link(tmp_path: Path) -> None:
    """Neither a file of another mode nor a link that was put in its way gets the content."""
    secret = tmp_path / "elsewhere"
    (tmp_path / "a.partial").symlink_to(secret)
    atomic.replace(tmp_path / "a.json", "secret", is_private=True)
    assert not secret.exists() and (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "b.partial").touch(mode=0o644)
    atomic.replace(tmp_path / "b.json", "secret", is_private=True)
    assert (tmp_path / "b.json").stat().st_mode & 0o777 == 0o600


def is_held(file: Path) -> bool:
    with suppress(BlockingIOError), locks.locked(file, wait_s=0):
        return False
    return True


def test_a_lock_of_another_holder_is_refused_then_waited_for(tmp_path: Path) -> None:
    """Each opening of the file is a holder, as another process is."""
    file, said = tmp_path / "lock", []
    with ExitStack() as other:
        other.enter_context(locks.locked(file))
        with pytest.raises(BlockingIOError), locks.locked(file, wait_s=0, waits=lambda: said.append("at once")):
            pass
        with pytest.raises(BlockingIOError), locks.locked(file, wait_s=0.3, waits=lambda: said.append("a little")):
            pass
        with locks.locked(file, waits=lambda: (said.append("for ever"), other.close())):
            assert is_held(file)
    assert said == ["a little", "for ever"] and not is_held(file)


def test_who_inherits_the_descriptor_holds_the_lock(tmp_path: Path) -> None:
    with locks.locked(tmp_path / "lock") as lock:
        heir = os.dup(lock)
    assert is_held(tmp_path / "lock")
    os.close(heir)
    assert not is_held(tmp_path / "lock")


def test_a_lock_keeps_what_is_in_its_file_and_a_private_one_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "lock").touch(mode=0o600)
    (tmp_path / "lock").write_text("content")
    with locks.locked(tmp_path / "lock", is_private=True):
        assert (tmp_path / "lock").read_text() == "content"
    (tmp_path / "lock").unlink()
    with locks.locked(tmp_path / "lock", is_private=True):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels"), locks.locked(tmp_path / "link", is_private=True):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_without_locks_is_told_from_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError), locks.locked(tmp_path / "absent" / "lock"):
        pass

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(locks.NoLocksError, match="Function not implemented"), locks.locked(tmp_path / "lock"):
        pass


def test_lines_are_added_and_read_and_another_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "a.jsonl"
    json_lines.append(file, {"step": 1, "loss": 0.5})
    json_lines.append(file, {"step": 2})
    assert file.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2}\n'
    assert json_lines.read(file) == [{"step": 1, "loss": 0.5}, {"step": 2}]
    for written in ("[1]", '{"step": 2', "", "[" * 50_000):
        file.write_text('{"step": 1}\n' + written + "\n")
        with pytest.raises(ValueError, match="a.jsonl:2 is no JSON object"):
            json_lines.read(file)


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    """Wherever it is cut: the line before it is the last one."""
    whole = json.dumps({"step": 12, "nested": {"step": 3}, "text": '}"{\\'})
    for length in range(len(whole)):
        (tmp_path / "a.jsonl").write_text('{"step": 11}\n' + whole[:length])
        assert json_lines.read_tail(tmp_path / "a.jsonl", 1000) == [{"step": 11}]
    (tmp_path / "a.jsonl").write_text('{"step": 11}\n' + whole + "\n")
    assert [row["step"] for row in json_lines.read_tail(tmp_path / "a.jsonl", 1000)] == [11, 12]


def test_the_tail_is_read_from_a_whole_line_on(tmp_path: Path) -> None:
    """However many bytes of the file are looked at: the line that their start cuts is left out."""
    lines = [json.dumps({"step": step, "nested": {"step": 0}}) + "\n" for step in range(100, 105)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    length = len(lines[0])
    for size in range(1, 5 * length + 10):
        steps = [row["step"] for row in json_lines.read_tail(tmp_path / "a.jsonl", size)]
        assert steps == [*range(105 - min(5, size // length), 105)]


ACCEPTED = (
    '\ufeff{"a": 1}',
    '{"a": {"b": [1, -2.5e300, true, null]}, "b": 1}',
    f'{{"a": {-(2**63)}, "b": {2**64 - 1}}}',
    '{"a": "\\ud83d\\ude00", "b": "é"}',
    '{"a": "' + "[" * 1000 + '"}',
    "[" * 100 + "]" * 100,
)
ONLY_LENIENT = {
    '{"a": NaN}': "NaN is no number of JSON",
    '{"a": [-Infinity]}': "-Infinity is no number of JSON",
    '{"a": 1e400}': "1e400 is too large for a float",
    f'{{"model_max_length": {int(1e30)}}}': "an integer has 31 digits",
    '{"a": 1, "b": {"c": 1, "d": 2, "d": 2}}': "the key 'd' is there twice",
    '{"a": "\\ud83d"}': "it is not UTF-8",
}
REFUSED = {
    b"": "Expecting value",
    b'{"a": 1} {}': "Extra data",
    b"[" * 101 + b"]" * 101: "it has more than 100 levels",
    b'{"a": ' * 100_000: "it has more than 100 levels",
    b'{"a": "\xff"}': "it is not UTF-8",
}


def test_what_is_accepted_has_its_value() -> None:
    for text in ACCEPTED:
        wanted = json.loads(text.removeprefix("\ufeff"))
        for lenient in (True, False):
            assert json_objects.value(text.encode(), "here", lenient=lenient) == wanted
    for text in ONLY_LENIENT:
        assert repr(json_objects.value(text, "here", lenient=True)) == repr(json.loads(text))


def test_what_is_refused_is_one_line() -> None:
    def check(content: bytes, why: str, lenient: bool) -> None:
        said = raised(lambda: json_objects.value(content, "here", lenient=lenient))
        assert said.startswith(f"here is not JSON: {why}")

    check_rows([(content, why, lenient) for content, why in REFUSED.items() for lenient in (True, False)], check)
    check_rows([(text.encode(), why, False) for text, why in ONLY_LENIENT.items()], check)
    assert raised(lambda: json_objects.parse("[]", "here")) == "here is not a JSON object, but of type list"
