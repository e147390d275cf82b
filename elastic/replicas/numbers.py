"""Whether another program trains under a replica's number, asked before the replica joins the others."""

from pathlib import Path

from elastic.replicas.peers import CONNECT_S, MOST_BYTES, NEVER, Peer, read_address
from elastic.replicas.transport import Transport
from runtime.blobs import BlobAddress, PeerError
from runtime.exit_codes import ResumableError
from runtime.files import json_objects


def find_running(folder: Path, transport: Transport) -> Peer | None:
    """Returns the replica that answers at the last address of the transport's number; None if the number is free."""
    previous: BlobAddress | None = None
    while (address := read_address(folder, transport.number, transport.process)) and address != previous:
        previous = address
        try:
            with transport.connect(address, CONNECT_S) as link:
                record = json_objects.parse(link.ask({"op": "self"}, MOST_BYTES), "a replica's record")
            running = Peer.from_dict(record)
        except (PeerError, ValueError):  # it is gone, or starts as this one does
            continue
        if running.number == transport.number:
            return running
    return None


def check_number_is_free(folder: Path, transport: Transport) -> None:
    """ValueError if a program trains under the transport's number; ResumableError if that program is about to end."""
    if running := find_running(folder, transport):
        where = f"replica {running.number} runs at {running.host}:{running.port} already"
        if running.last < NEVER:
            raise ResumableError(f"{where}, and is about to end; run the same command again")
        raise ValueError(f"{where}; give this one another number (--group), or end that one first")
