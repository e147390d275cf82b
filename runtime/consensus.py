"""Lets process 0 decide for all: what it reads from a disk, and the errors it finds there, reach every process.

Goes through the key-value store of `jax.distributed`, not through a collective: it works in background threads, waits
as long as the disk needs, and carries an error as well as an answer.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
from orbax.checkpoint import multihost

_TIMEOUT_S = 3600  # hashing a large checkpoint takes minutes; a process that died ends the wait long before this
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "OSError": OSError}  # they decide the exit code
_tickets = itertools.count()


def new_ticket(topic: str) -> str:
    """Returns a name for one question. Every process must ask for its tickets in the same order."""
    return f"state/{next(_tickets)}/{topic}"


def from_process_zero(ticket: str, answer: Callable[[], Any]) -> Any:
    """Returns `answer()` (a JSON value) as computed by process 0; an Exception of it is raised in every process.

    Raises ValueError or OSError in the others if it was one in process 0, and RuntimeError with its text otherwise.
    """
    if jax.process_count() == 1:
        return answer()
    client = multihost.get_jax_distributed_client()
    if jax.process_index() != 0:
        message = json.loads(client.blocking_key_value_get(ticket, _TIMEOUT_S * 1000))
        if message["error"] is not None:
            raise _KINDS.get(message["kind"], RuntimeError)(message["error"])
        return message["value"]
    try:
        value = answer()
    except Exception as error:
        text = str(error) or type(error).__name__
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
        message = {"error": text, "kind": kind, "value": None}
        client.key_value_set(ticket, json.dumps(message))
        raise
    client.key_value_set(ticket, json.dumps({"error": None, "value": value}))
    return value


def from_all(ticket: str, value: Any) -> list[Any]:
    """Returns the value (JSON) that each process gave, in their order."""
    if jax.process_count() == 1:
        return [json.loads(json.dumps(value))]
    client = multihost.get_jax_distributed_client()
    client.key_value_set(f"{ticket}/{jax.process_index()}", json.dumps(value))
    return [
        json.loads(client.blocking_key_value_get(f"{ticket}/{process}", _TIMEOUT_S * 1000))
        for process in range(jax.process_count())
    ]


def wait_for_all(topic: str) -> None:
    """Returns when every process has come here as often as this one."""
    if jax.process_count() > 1:
        multihost.get_jax_distributed_client().wait_at_barrier(f"state/{topic}", _TIMEOUT_S * 1000)


def hear_all(topic: str, word: str = "") -> list[str]:
    """Waits as `wait_for_all` does, and returns what those processes said that had something to say.

    Cheaper than `from_all` where most have nothing to say.
    """
    ticket = new_ticket(topic)
    if jax.process_count() == 1:
        return [word] if word else []
    client = multihost.get_jax_distributed_client()
    if word:
        client.key_value_set(f"{ticket}/{jax.process_index()}", word)
    wait_for_all(topic)
    return [said for _, said in client.key_value_dir_get(f"{ticket}/")]
