"""Runs of train.py on a store that is not there, or gives damaged objects: the exit code, and one line."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.ports import free_port
from support.running import arguments, changed, run_here
from support.shard_texts import a_folder, own_cache  # noqa: F401 (fixtures)
from support.stores import Server, of_folder

from input_pipeline import prepare, store
from input_pipeline.store import RemoteStore


@pytest.fixture(name="web")
def a_server(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server of the prepared set of the texts, and an empty cache."""
    assert prepare.main([f"--path={texts}", f"--out={tmp_path / 'set'}"]) == 0
    monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "another"))
    with of_folder(tmp_path / "set") as server:
        yield server


def flags(workdir: Path, url: str, **changes: Any) -> list[str]:
    return arguments(workdir, data__source="shards", data__path=url, data__shuffle_shards=1, **changes)


def error(capfd: pytest.CaptureFixture[str]) -> str:
    """Returns the only line on stderr."""
    said = capfd.readouterr().err
    assert said.count("\n") == 1, said
    return said


@pytest.mark.slow  # waits for real time
def test_store_that_was_never_reached_is_exit_code_2(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """But a run that has begun waits for it, as for a store that goes away."""
    monkeypatch.setattr(store, "FIRST_S", 0.3)
    monkeypatch.setattr(RemoteStore.__init__, "__defaults__", (0.6,))
    url = f"http://127.0.0.1:{free_port()}/set"
    assert run_here(*flags(tmp_path / "run", url)) == 2
    never = rf"error: {url}/index\.json: the store was never reached, in \d+ s \(no connection to "
    assert re.match(never, error(capfd))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text("")
    assert run_here(*flags(tmp_path / "begun", url)) == 75
    away = rf"error: {url}/index\.json: the store has been away for \d+ s \(no connection to "
    assert re.search(away, error(capfd))


def test_damage_in_the_first_batch_is_told_before_the_step_is_compiled(web: Server, tmp_path: Path, capfd: Any) -> None:
    answer = web.answer

    def damaged(method: str, path: str, *rest: Any) -> Any:
        status, headers, content = answer(method, path, *rest)
        return status, headers, bytes([content[0] ^ 1]) + content[1:] if path.endswith(".tokens") else content

    web.answer = damaged
    compiles_nothing = changed(compile_train_step=lambda: pytest.fail("the step is compiled"))
    assert run_here(*flags(tmp_path / "run", web.url), make=compiles_nothing) == 2
    said = error(capfd)
    named = [path for path in web.gets if f"{web.url}{path}: the tokens of part" in said]
    assert len(named) == 1 and f"bytes with {named[0][1:65]}, {store.FETCHES} times; restore" in said
    assert max(count for path, count in web.gets.items()) == store.FETCHES  # and not again for who waits
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
