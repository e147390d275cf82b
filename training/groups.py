"""The number of an independent replica, and a check that it is free."""

import os
import sys
import time
from pathlib import Path

from configs.schema import Config
from elastic.replicas import numbers, peers
from elastic.replicas.transport import Sockets
from runtime.consensus import broadcast, new_key
from runtime.files.run_directory import REPLICAS as FOLDER
from runtime.handshake import shared_token

VARIABLES = ("SLURM_ARRAY_TASK_ID", "MEGASCALE_SLICE_ID")  # the second numbers a TPU slice among several
WAIT_S, LOOK_S = 90.0, 2.0  # for the previous attempt: `launch/ray_standby.py` kills an orphaned one after 60 s


def number(config: Config, given: int | None) -> int | None:
    """Returns the replica's number: `--group`, or the index of a SLURM array's task or a TPU slice; None in one world.

    ValueError if a replica has no number, or if one world has a number.
    """
    if config.sharding.replicas != "independent":
        if given is not None:
            raise ValueError(f"--group={given} is only read with --config.sharding.replicas=independent")
        return None
    by_launcher = (os.environ[name] for name in VARIABLES if name in os.environ)
    found = next(by_launcher, "") if given is None else str(given)
    if found.isdecimal():
        return int(found)
    raise ValueError(
        f"{f'--group={found}' if found else 'no --group'}: with sharding.replicas=independent each replica is started "
        f"by itself, with a number of its own from 0 on (a task of a SLURM array or a TPU slice among several has one)"
    )


def check_number_is_free(workdir: Path, group: int) -> None:
    """Waits for a program on another host that trains under a replica's number; raises in all processes if it stays.

    To be called before anything in the replica's directory is changed.
    """
    token = shared_token(workdir)
    broadcast(new_key("number"), lambda: _await_number(workdir / FOLDER, group, token))


def _await_number(folder: Path, group: int, token: str) -> None:
    transport = Sockets(number=group, token=token, silence_s=peers.CONNECT_S)
    until_s, seen = time.monotonic() + WAIT_S, None
    while (running := numbers.find_running(folder, transport)) and time.monotonic() < until_s:
        if running.address != seen:
            seen = running.address
            where = f"replica {group} runs at {seen.host}:{seen.port} already"
            print(f"{where}: waiting up to {WAIT_S:g} s for its end", file=sys.stderr)
        time.sleep(LOOK_S)
    numbers.check_number_is_free(folder, transport)
