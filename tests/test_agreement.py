"""What the processes agree on: errors of process 0 reach the others; how many calls: test_state_processes.py."""

from typing import Any

import jax
import pytest
from support.tables import every_row

from input_pipeline.patience import StoreAwayError
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


@every_row(
    ("raised", "expected"),
    [
        (ValueError("not so"), ValueError),
        (FileExistsError(17, "File exists", "/a"), OSError),
        (StoreAwayError("s3://b: the store has been away for 540 s"), ResumableError),
        (KeyError("a"), RuntimeError),
    ],
)
def test_an_error_of_process_0_is_one_of_the_same_kind_in_the_others(
    raised: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ValueError or an OSError before training ends the program with 2, a ResumableError with 75, others with 1."""
    store, key = Store(), consensus.new_key("test")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(consensus.multihost, "get_jax_distributed_client", lambda store=store: store)

    def answer(raised: Exception = raised) -> None:
        raise raised

    for process, kind in ((0, type(raised)), (1, expected)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with pytest.raises(kind) as caught:
            consensus.broadcast(key, answer)
        assert type(caught.value) is kind and str(caught.value) == str(raised)
