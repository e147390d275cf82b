"""Agreement among the processes of a run: `broadcast` what process 0 finds, `all_gather` what each has, `barrier`.

Goes through the key-value store of `jax.distributed`, not through a collective: it works in background threads, waits
as long as the disk needs, and carries an error as well as an answer. Of n processes each makes one call to the store
for a broadcast, and at most three for an all-gather.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from orbax.checkpoint import multihost

_TIMEOUT_S = 3600  # hashing a large checkpoint takes minutes; a process that died ends the wait long before this
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "OSError": OSError}  # they decide the exit code
_numbers = itertools.count()


@dataclass(frozen=True)
class Key:
    """Names one agreement in the store."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"consensus/{self.number}/{self.topic}"


def new_key(topic: str) -> Key:
    """Returns the key of one agreement. Every process must make its keys in the same order."""
    return Key(topic, next(_numbers))


def broadcast(key: Key, answer: Callable[[], Any]) -> Any:
    """Returns `answer()` (a JSON value) as computed by process 0; an Exception of it is raised in every process.

    Raises ValueError or OSError in the others if it was one in process 0, and RuntimeError with its text otherwise.
    """
    if jax.process_count() == 1:
        return answer()
    client = multihost.get_jax_distributed_client()
    if jax.process_index() != 0:
        message = json.loads(client.blocking_key_value_get(str(key), _TIMEOUT_S * 1000))
        if message["error"] is not None:
            raise _KINDS.get(message["kind"], RuntimeError)(message["error"])
        return message["value"]
    try:
        value = answer()
    except Exception as error:
        text = str(error) or type(error).__name__
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
        message = {"error": text, "kind": kind, "value": None}
        client.key_value_set(str(key), json.dumps(message))
        raise
    client.key_value_set(str(key), json.dumps({"error": None, "value": value}))
    return value


def all_gather(key: Key, value: Any) -> list[Any]:
    """Returns the value (JSON) that each process gave, in their order. A None costs no message to the store."""
    if jax.process_count() == 1:
        return [json.loads(json.dumps(value))]
    client = multihost.get_jax_distributed_client()
    if value is not None:
        client.key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
    barrier(key.topic)  # behind it all values are there, and one call gets them
    given = {name.rpartition("/")[2]: text for name, text in client.key_value_dir_get(f"{key}/")}
    return [json.loads(given.get(str(process), "null")) for process in range(jax.process_count())]


def barrier(topic: str) -> None:
    """Returns when every process has come here as often as this one."""
    if jax.process_count() > 1:  # a name that is used again takes no more memory of the service, which keeps all names
        multihost.get_jax_distributed_client().wait_at_barrier(f"consensus/{topic}", _TIMEOUT_S * 1000)
