"""Agreement among the processes of a run: `broadcast` from process 0, `all_gather`, `gather` to process 0, `barrier`.

These use the key-value store of `jax.distributed` instead of collectives. They therefore work in background threads,
wait as long as the disk needs, and can carry an error in place of an answer. Each process calls the store once for a
broadcast, at most three times for an all-gather (process 0 four times), and twice for a gather (process 0 three times).
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from orbax.checkpoint import multihost

from runtime.exit_codes import ResumableError

Json = TypeVar("Json")  # a JSON value
TIMEOUT_S = 86_400  # a large file to tokenise or a slow disk takes hours; the loss of a process ends the wait sooner
_KINDS = {kind.__name__: kind for kind in (ValueError, OSError, ResumableError)}  # they determine the exit code
_numbers = itertools.count()
_latest: dict[str, "AgreementKey"] = {}  # key of the latest all-gather, by topic


@dataclass(frozen=True)
class AgreementKey:
    """The name of one agreement in the store."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"consensus/{self.number}/{self.topic}"


def new_key(topic: str) -> AgreementKey:
    """Returns the key of the next agreement. Every process must create its keys in the same order."""
    return AgreementKey(topic, next(_numbers))


def broadcast(key: AgreementKey, answer: Callable[[], Json]) -> Json:
    """Returns process 0's `answer()`, a JSON value, in every process. If `answer` raises, every process raises.

    The other processes raise ValueError, OSError or ResumableError if process 0 does, and RuntimeError with its text
    otherwise.
    """
    if jax.process_count() == 1:
        return answer()
    client = multihost.get_jax_distributed_client()
    if jax.process_index() != 0:
        message = json.loads(client.blocking_key_value_get(str(key), TIMEOUT_S * 1000))
        if message["error"] is not None:
            raise _KINDS.get(message["kind"], RuntimeError)(message["error"])
        return message["value"]
    try:
        value = answer()
    except Exception as error:
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
        message = {"error": str(error) or type(error).__name__, "kind": kind}
        client.key_value_set(str(key), json.dumps(message))
        raise
    client.key_value_set(str(key), json.dumps({"error": None, "value": value}))
    return value


def all_gather(key: AgreementKey, value: object) -> list[Any]:
    """Returns the values (JSON) of all processes, in their order. A None costs no message to the store.

    The values stay in the store until the next all-gather with this topic.
    """
    return _gather(key, value, to_all=True)


def gather(key: AgreementKey, value: object) -> list[Any]:
    """Returns the values (JSON) of all processes in their order in process 0, and an empty list in the others.

    In contrast to `all_gather`, large values neither go to every process nor stay in the store.
    """
    return _gather(key, value, to_all=False)


def _gather(key: AgreementKey, value: object, *, to_all: bool) -> list[Any]:
    own = json.dumps(value)
    if jax.process_count() == 1:
        return [json.loads(own)]
    client, me = multihost.get_jax_distributed_client(), jax.process_index()
    if value is not None and (to_all or me):
        client.key_value_set(f"{key}/{me}", own)
    barrier(key.topic)  # after it the store has all values, so one call gets them; all have read the previous values
    if to_all:
        before, _latest[key.topic] = _latest.get(key.topic), key
        if before and not me:
            client.key_value_delete(f"{before}/")
    if me and not to_all:
        return []
    given = {name.rpartition("/")[2]: text for name, text in client.key_value_dir_get(f"{key}/")} | {str(me): own}
    if not to_all:
        client.key_value_delete(f"{key}/")
    return [json.loads(given.get(str(process), "null")) for process in range(jax.process_count())]


def barrier(topic: str) -> None:
    """Returns when every process has called it with this topic the same number of times as this process."""
    if jax.process_count() > 1:  # the service never forgets a name, so names are reused
        multihost.get_jax_distributed_client().wait_at_barrier(f"consensus/{topic}", TIMEOUT_S * 1000)
