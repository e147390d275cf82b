"""The members of a run with independent replicas, as they tell each other of themselves."""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from runtime.blobs import Address
from runtime.files import atomic, json_objects

FILE_NAME = "address-{}.json"
NEVER = 1 << 62  # a step
STALE_S = 600.0  # age of an address that its member no longer writes again


@dataclass(frozen=True, kw_only=True)
class Member:
    """A partition group: a world of its own that takes part in the steps from `first` to `last`."""

    number: int
    host: str
    port: int
    step: int = 0  # steps done
    begun: bool = False  # its loop
    first: int = NEVER  # the first step of which it computes shares
    last: int = NEVER
    run: str = ""  # what members of one run have in common
    rate: float = 0.0  # shares per second; 0: not known yet
    version: int = 0  # of what it says of itself

    @property
    def address(self) -> Address:
        """Where it serves."""
        return Address(process=self.number, host=self.host, port=self.port)

    def takes_part(self, step: int) -> bool:
        """Whether it computes shares of a step."""
        return self.first <= step <= self.last

    @property
    def trains(self) -> bool:
        """Whether it does the steps, or is about to do its first one."""
        return self.begun or self.takes_part(self.step)

    def changed(self, **changes: Any) -> Self:
        """Returns it with some fields changed, as its next version."""
        return replace(self, **changes, version=self.version + 1)

    def as_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Returns the member that a peer describes. ValueError for anything else than `as_dict` gives."""
        kinds: dict[str, Any] = dict.fromkeys(("number", "port", "step", "first", "last", "version"), (int,))
        kinds |= {"host": (str,), "run": (str,), "begun": (bool,), "rate": (int, float)}
        if not (
            isinstance(values, Mapping)
            and values.keys() == kinds.keys()
            and all(type(values[name]) in kind for name, kind in kinds.items())
            and 0 <= values["rate"] < sys.float_info.max
            and 0 < values["port"] < 1 << 16
            and min(values["number"], values["step"]) >= 0
        ):
            raise ValueError("that describes no member")
        return cls(**values)


def write_address(folder: Path, member: Member, process: int) -> None:
    """Writes into the run's folder where one of a member's processes serves the same-numbered ones of the others."""
    text = json.dumps({"number": member.number, "host": member.host, "port": member.port})
    file = _file(folder, member.number, process)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace(file, text)


def read_address(folder: Path, number: int, process: int) -> Address | None:
    """Returns where a member's process serves, or served once; None if its file is missing or cannot be read."""
    return _read(_file(folder, number, process))


def remove_address(folder: Path, address: Address, process: int) -> None:
    """Removes a member's address, unless it has another one by now."""
    if read_address(folder, address.process, process) == address:
        with suppress(OSError):
            _file(folder, address.process, process).unlink()


def read_addresses(folder: Path, but: int, process: int) -> tuple[list[Address], list[Address]]:
    """Returns where the members' processes of that number serve, all but one member's: the fresh and the stale ones.

    A member writes its address again each minute. A stale file is STALE_S older than the newest one, by the clock of
    the file system: its member is gone, or cannot write. A file that cannot be read, while it is replaced or removed,
    is left out: other members will tell of that member.
    """
    ages: dict[Path, float] = {}
    for file in sorted(folder.glob(f"*/{FILE_NAME.format(process)}")):
        with suppress(OSError):
            ages[file] = file.stat().st_mtime
    newest_s, fresh, stale = max(ages.values(), default=0.0), list[Address](), list[Address]()
    for file, written_s in ages.items():
        if (address := _read(file)) and address.process != but:
            (fresh if newest_s - written_s <= STALE_S else stale).append(address)
    return fresh, stale


def _file(folder: Path, number: int, process: int) -> Path:
    return folder / str(number) / FILE_NAME.format(process)


def _read(file: Path) -> Address | None:
    with suppress(OSError, ValueError, LookupError):
        values = json_objects.read(file)
        if [type(values[name]) for name in ("number", "host", "port")] == [int, str, int]:
            return Address(process=values["number"], host=values["host"], port=values["port"])
    return None
