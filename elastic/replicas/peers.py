"""`Peer`: the record by which a replica describes itself to its peers, and the file with its address."""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from runtime.blobs import BlobAddress
from runtime.files import atomic, json_objects
from runtime.files.json_objects import JsonMapping, JsonObject

FILE_NAME = "address-{}.json"
NEVER = 1 << 62  # a step
CONNECT_S = 5.0
MOST_BYTES = 1 << 20  # limit of the records that a peer sends
STALE_S = 600.0  # age of an address that its replica no longer writes again


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A replica (one partition group, a separate JAX program), which computes units of the steps `first` to `last`."""

    number: int
    host: str
    port: int
    step: int = 0  # steps done
    begun: bool = False  # its loop
    first: int = NEVER
    last: int = NEVER
    run: str = ""  # hash of all settings that the replicas of one run have in common
    rate: float = 0.0  # units per second; 0: not known yet
    version: int = 0  # of this record

    @property
    def address(self) -> BlobAddress:
        """The address at which it serves."""
        return BlobAddress(process=self.number, host=self.host, port=self.port)

    def takes_part(self, step: int) -> bool:
        """Whether it computes units of a step."""
        return self.first <= step <= self.last

    @property
    def trains(self) -> bool:
        """Whether it does the steps, or is about to do its first one."""
        return self.begun or self.takes_part(self.step)

    def changed(self, **changes: Any) -> Self:
        """Returns the next version of the record, with some fields changed."""
        return replace(self, **changes, version=self.version + 1)

    def as_dict(self) -> JsonObject:
        """Returns the record as a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: JsonMapping) -> Self:
        """Returns the record in a JSON object. ValueError if `as_dict` did not make it."""
        kinds: dict[str, tuple[type, ...]] = dict.fromkeys(
            ("number", "port", "step", "first", "last", "version"), (int,)
        )
        kinds |= {"host": (str,), "run": (str,), "begun": (bool,), "rate": (int, float)}
        if not (
            isinstance(values, Mapping)
            and values.keys() == kinds.keys()
            and all(type(values[name]) in kind for name, kind in kinds.items())
            and 0 <= values["rate"] < sys.float_info.max
            and 0 < values["port"] < 1 << 16
            and min(values["number"], values["step"]) >= 0
        ):
            raise ValueError("that describes no replica")
        return cls(**values)


def write_address(folder: Path, peer: Peer, process: int) -> None:
    """Writes to the run's folder where process `process` of a replica serves the same-numbered processes of others."""
    text = json.dumps({"number": peer.number, "host": peer.host, "port": peer.port})
    file = _file(folder, peer.number, process)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace(file, text)


def read_address(folder: Path, number: int, process: int) -> BlobAddress | None:
    """Returns the last address of a replica's process; None if its file is missing or cannot be read."""
    return _read(_file(folder, number, process))


def remove_address(folder: Path, address: BlobAddress, process: int) -> None:
    """Removes a replica's address, unless the file has a newer one."""
    if read_address(folder, address.process, process) == address:
        with suppress(OSError):
            _file(folder, address.process, process).unlink()


def read_addresses(folder: Path, but: int, process: int) -> tuple[list[BlobAddress], list[BlobAddress]]:
    """Returns the fresh and the stale addresses of all replicas' processes of that number, except replica `but`.

    A replica writes its address again each minute. A stale file is STALE_S older than the newest one, by the clock of
    the file system: its replica is gone, or cannot write. A file that cannot be read, while it is replaced or removed,
    is left out, because other replicas will send that address.
    """
    ages: dict[Path, float] = {}
    for file in sorted(folder.glob(f"*/{FILE_NAME.format(process)}")):
        with suppress(OSError):
            ages[file] = file.stat().st_mtime
    newest_s, fresh, stale = max(ages.values(), default=0.0), list[BlobAddress](), list[BlobAddress]()
    for file, written_s in ages.items():
        if (address := _read(file)) and address.process != but:
            (fresh if newest_s - written_s <= STALE_S else stale).append(address)
    return fresh, stale


def _file(folder: Path, number: int, process: int) -> Path:
    return folder / str(number) / FILE_NAME.format(process)


def _read(file: Path) -> BlobAddress | None:
    with suppress(OSError, ValueError, LookupError):
        values = json_objects.read(file)
        if [type(values[name]) for name in ("number", "host", "port")] == [int, str, int]:
            return BlobAddress(process=values["number"], host=values["host"], port=values["port"])
    return None
