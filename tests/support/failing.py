"""Functions that fail, in place of system functions."""

from collections.abc import Callable
from typing import Any


def fails(kind: type[BaseException], *args: Any) -> Callable[..., Any]:
    """Returns a function that raises a new error of a kind for any arguments."""

    def fail(*_: object, **__: object) -> Any:
        raise kind(*args)

    return fail


no_room = fails(OSError, 28, "No space left on device")
no_locks = fails(OSError, 38, "Function not implemented")
