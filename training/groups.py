"""Which of the independent replicas this process is."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from configs.schema import Config
from replicas import membership
from replicas.transport import Sockets
from runtime.consensus import broadcast, new_key
from runtime.handshake import shared_token
from training.independent import FOLDER

VARIABLE = "SLURM_ARRAY_TASK_ID"


def number(config: Config, given: int | None) -> int | None:
    """Returns the replica's number: `--group`, or that of a task of an array of SLURM; None in one world.

    ValueError if there is none, or for one that nothing reads.
    """
    if config.sharding.replicas != "independent":
        if given is not None:
            raise ValueError(f"--group={given} is only read with --config.sharding.replicas=independent")
        return None
    found = os.environ.get(VARIABLE, "") if given is None else str(given)
    if found.isdecimal():
        return int(found)
    raise ValueError(
        f"{f'--group={found}' if found else 'no --group'}: with sharding.replicas=independent each replica is started "
        f"by itself, with a number of its own from 0 on (a task of an array of SLURM has one)"
    )


def of_group(config: Config, workdir: Path, group: int | None) -> tuple[Config, Path]:
    """Returns the config of a replica, without snapshots: the others have its state; and its own directory."""
    if group is None:
        return config, workdir
    return replace(config, elastic=replace(config.elastic, snapshot_every=0)), workdir / FOLDER / str(group)


def check_number_is_free(workdir: Path, group: int) -> None:
    """Raises in all processes of a replica if another program trains under its number, on another host.

    To be called before anything in the replica's directory is changed.
    """
    transport = Sockets(number=group, token=shared_token(workdir), silence_s=membership.CONNECT_S)
    check = partial(membership.check_number_is_free, workdir / FOLDER, group, 0, transport)
    broadcast(new_key("number"), check)
