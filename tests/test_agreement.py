"""What the processes agree on: answers and errors of process 0 reach the others, in few calls to the store."""

import json
import subprocess
import sys

import jax
import pytest
from agreeing import FILE_BYTES, FILES
from running import ROOT

from input_pipeline.store import StoreAwayError
from runtime import consensus
from runtime.exit_codes import ResumableError


class Store:
    """The key-value store of `jax.distributed`."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        self._values[key] = value

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        del timeout_ms
        return self._values[key]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("not so"), ValueError),
        (FileExistsError(17, "File exists", "/a"), OSError),
        (StoreAwayError("s3://b: the store has been away for 540 s"), ResumableError),
        (KeyError("a"), RuntimeError),
    ],
)
def test_an_error_of_process_0_is_one_of_the_same_kind_in_the_others(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ValueError or an OSError before training ends the program with 2, a ResumableError with 75, others with 1."""
    store, key = Store(), consensus.new_key("test")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(consensus.multihost, "get_jax_distributed_client", lambda: store)

    def answer() -> None:
        raise raised

    for process, kind in ((0, type(raised)), (1, expected)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with pytest.raises(kind) as caught:
            consensus.broadcast(key, answer)
        assert type(caught.value) is kind and str(caught.value) == str(raised)


def test_four_processes_agree_in_few_calls_and_share_the_hashing() -> None:
    """At most 3 calls per process to gather; each file is hashed once when saved, and once when restored."""
    program = (
        "import json; from tests.agreeing import measure; print(json.dumps(measure(4)))"  # it forks: without threads
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    most = {"broadcast": 1, "all_gather": 3, "gather": 3, "commit": 5, "restore": 4}
    assert {key: max(calls) for key, calls in found["calls"].items()} == most
    own, of_all = FILES * FILE_BYTES, 3 * len("{}")
    assert found["hashed_bytes"]["commit"] == [own + of_all, own, own, own]
    restored = found["hashed_bytes"]["restore"]
    assert sum(restored) == 4 * own + of_all and max(restored) <= own + of_all
