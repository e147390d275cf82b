"""A real SLURM on emulated nodes: its controller and its users on node 0, a slurmd on each of the others.

One munged serves all nodes, by a socket in the folder that they share.
"""

import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.emulate import namespaces
from launch.emulate.links import Links
from launch.emulate.nodes import EmulatedCluster
from support import emulating
from support.running import ROOT, XLA_FLAGS
from support.waiting import until

WAIT_S = 300
SBATCH = ROOT / "launch" / "slurm" / "train.sbatch"
REPLICAS = SBATCH.with_name("replicas.sbatch")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=namespaces.SEARCH)]
NEEDED = emulating.NEEDED or (f"needs SLURM and munge: {', '.join(MISSING)} missing" if MISSING else "")

# The nodes have the cores and GPUs that the scripts ask for, in SLURM's books only.
FILES = {
    "slurm.conf": """
        ClusterName=lab
        SlurmctldHost=node0
        SlurmUser=root
        SlurmdUser=root
        AuthInfo=socket={folder}/munge.socket
        StateSaveLocation={folder}
        SlurmdSpoolDir={folder}/%n
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/%n.pid
        SlurmdParameters=config_overrides
        SlurmdTimeout=10
        ProctrackType=proctrack/pgid
        TaskPlugin=task/none
        MpiDefault=none
        SelectType=select/cons_tres
        SelectTypeParameters=CR_CPU
        GresTypes=gpu
        NodeName=node[1-{nodes}] CPUs=64 Gres=gpu:8
        PartitionName=lab Nodes=node[1-{nodes}] Default=YES
        """,
    "gres.conf": "Name=gpu File={folder}/gpu[0-7]\n",
    "cgroup.conf": "CgroupPlugin=cgroup/v1\n",  # nodes have none; the other one would look for it
}
MUNGED = """munged --foreground --force --key-file={folder}/munge.key --socket={folder}/munge.socket
    --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munged.seed"""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A running SLURM; `folder` is seen by all its nodes."""

    cluster: EmulatedCluster
    folder: Path

    def start(self, node: int, *command: str) -> None:
        """Starts a program that runs until the emulation ends, with a log."""
        with (self.folder / f"{command[0]}-{node}.log").open("wb") as log:
            self.cluster.start(node, command, self._environment, log)

    def run(self, *command: str) -> str:
        """Returns the output of a user's command, which must succeed."""
        process = self.cluster.start(0, command, self._environment)
        out = process.communicate(timeout=WAIT_S)[0].decode()
        assert process.returncode == 0, (command, out)
        return out.strip()

    def submit(self, program: list[str], *options: str, sbatch: Path = SBATCH) -> str:
        """Submits a script with `program` in the user's place, one task per node; returns the job's id."""
        script = self.folder / sbatch.name
        text = edited(shlex.join(program), sbatch).replace("#SBATCH --ntasks-per-node=8\n", "")  # 1: the default
        script.write_text(text)
        return self.run("sbatch", "--parsable", f"--output={self.folder}/%j.txt", "--time=60", *options, str(script))

    def output(self, job: str) -> str:
        """Returns the output of a job so far, if it has begun."""
        file = self.folder / f"{job}.txt"
        return file.read_text() if file.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job`."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))

    def wait(self, job: str, state: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job` once the job is in a state."""
        return self.until(job, lambda found: found["JobState"] == state)

    def until(self, job: str, condition: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """Returns the fields of `scontrol show job` once they meet a condition, which must be before the job's end."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition(found := self.job(job)):
            assert found["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "SIGNALING"), (found, self.output(job))
            assert time.monotonic() < deadline_s, (found, self.output(job))
            time.sleep(0.5)
        return found

    def go_on(self, job: str, nodes: str = "") -> None:
        """Lets a requeued job start now; `nodes` are its previous nodes, or all.

        SLURM's own time for it is two minutes later, and no setting of 22.05 changes that. Before the batch script has
        ended everywhere its end would be taken for the new one's, and a node refuses what is started in the second in
        which it ended the job: times of credentials are in seconds.
        """
        self.until(job, lambda found: found["JobState"] == "PENDING" and found["Restarts"] != "0")
        self.settle(nodes)
        time.sleep(2)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60")

    def settle(self, nodes: str = "") -> None:
        """Waits until each of some nodes is idle, or down."""
        deadline_s = time.monotonic() + WAIT_S
        ask = ("sinfo", "--noheader", "--format=%T", *([f"--nodes={nodes}"] if nodes else []))
        while states := {*self.run(*ask).split()} - {"idle", "down", "down*"}:
            assert time.monotonic() < deadline_s, states
            time.sleep(0.5)

    @property
    def _environment(self) -> dict[str, str]:
        path = {"PATH": namespaces.SEARCH, "PYTHONPATH": str(ROOT / "tests")}
        return {**os.environ, **path, "SLURM_CONF": str(self.folder / "slurm.conf"), "XLA_FLAGS": XLA_FLAGS}


def edited(program: str, sbatch: Path = SBATCH) -> str:
    """Returns a script with `program` in the user's place."""
    pattern = r"^program=\(.*?\)[^\n)]*$"
    script, found = re.subn(pattern, lambda _: f"program=({program})", sbatch.read_text(), flags=re.M | re.S)
    assert found == 1
    return script


@contextmanager
def running_slurm(nodes: int, rate: str, folder: Path) -> Iterator[Slurm]:
    """Gives a SLURM with idle nodes 1 to `nodes`; it ends with the context, or with this process."""
    for name, text in FILES.items():
        (folder / name).write_text(text.format(folder=folder, nodes=nodes))
    for i in range(8):
        (folder / f"gpu{i}").symlink_to("/dev/null")
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    with EmulatedCluster(nodes + 1, Links(rate=rate), folder) as cluster:
        slurm = Slurm(cluster=cluster, folder=folder)
        slurm.start(0, *MUNGED.format(folder=folder).split())
        until((folder / "munge.socket").exists)
        slurm.start(0, "slurmctld", "-D")
        for node in range(1, nodes + 1):
            slurm.start(node, "slurmd", "-D")
        slurm.run("srun", f"--nodes={nodes}", "true")
        slurm.settle()
        yield slurm
