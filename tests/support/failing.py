"""Functions that fail, in the place of those of the system."""

from collections.abc import Callable
from typing import Any


def fails(kind: type[BaseException], *args: Any) -> Callable[..., Any]:
    """Returns a function that raises a new error of a kind, whatever its arguments are."""

    def fail(*_: object, **__: object) -> Any:
        raise kind(*args)

    return fail


no_room = fails(OSError, 28, "No space left on device")
no_locks = fails(OSError, 38, "Function not implemented")
