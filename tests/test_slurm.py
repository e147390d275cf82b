"""launch/slurm and sweeps on a real SLURM, over links with a rate: `make slurm`."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import slurm_cluster
from support.running import TRAIN, arguments, finish, losses, rows, run_here, start, steps_logged
from support.slurm_cluster import Slurm
from support.sweeping import FAILS, STOPS_ONCE, seeds, started, sweep_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(slurm_cluster.NEEDED), reason=slurm_cluster.NEEDED),
]
NODES, RATE, NUM_STEPS = 4, "10mbit", 30
SHAPES = {"model__num_layers": 1, "model__hidden": 48, "model__intermediate": 96}  # which 3 nodes divide, too
SMALL = {"num_steps": NUM_STEPS, **SHAPES}


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm_cluster.running_slurm(NODES, RATE, folder) as slurm:
        yield slurm


def train(slurm: Slurm, *options: str, **changes: Any) -> tuple[str, Path]:
    """Submits a small run on all nodes; returns the job's id, and the run's directory."""
    workdir = slurm.folder / "run"
    words = arguments(workdir, **SMALL, mesh__num_cpu_devices=0, mesh__devices_per_node=0, **changes)
    return slurm.submit([sys.executable, str(TRAIN), *words], *options), workdir


def check_losses(workdir: Path, reference: Path) -> None:
    """Compares a run, step by step, with a run of a single process."""
    assert run_here(*arguments(reference, **SMALL)) == 0
    np.testing.assert_allclose(losses(workdir), losses(reference), rtol=1e-5)


def test_a_run_goes_on_after_its_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """Four tasks join by SLURM's variables; TERM by --signal as shipped, 180 s before the limit."""
    job, workdir = train(slurm)
    running = slurm.until(job, lambda _: steps_logged(workdir) >= 3)
    slurm.cluster.slow(1, "1mbit")  # SLURM looks at time limits every 30 s
    minutes = int(running["RunTime"].split(":")[1])
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 3}")
    slurm.go_on(job)
    slurm.cluster.slow(1, RATE)
    assert 3 <= steps_logged(workdir) < NUM_STEPS
    assert slurm.wait(job, "COMPLETED")["Restarts"] == "1"

    out = slurm.output(job)
    assert "train.sbatch: exit code 75; the job queues up again and resumes" in out
    assert "from its checkpoint; steps done again: 0" in out  # it saved at the step where it stopped
    assert json.loads((workdir / "environment.json").read_text())["processes"] == NODES
    check_losses(workdir, tmp_path / "reference")
    needed = sum(row["collective_inter_bytes"] for row in rows(workdir))
    assert [node.node for node in slurm.cluster.traffic() if node.tx_bytes > needed] == [1, 2, 3, 4]


def test_a_run_goes_on_without_a_node_that_died(slurm: Slurm, tmp_path: Path) -> None:
    """The others notice and end with 75; SLURM finds the node down, requeues, and takes the remaining nodes.

    Without a checkpoint they continue from the snapshots in their memory.
    """
    in_memory = {"checkpoint__every": 0, "elastic__snapshot_every": 1}
    job, workdir = train(slurm, "--nodes=2-4", sharding__strategy="zero3", sharding__partition_size=0, **in_memory)
    slurm.until(job, lambda _: steps_logged(workdir) >= 3)
    slurm.cluster.kill(NODES)
    slurm.go_on(job)
    ended = slurm.wait(job, "COMPLETED")
    assert (ended["Restarts"], ended["NumNodes"], ended["NodeList"]) == ("1", "3", "node[1-3]")

    out = slurm.output(job)
    assert all(f"node{i}: task {i - 1}: Exited with exit code 75" in out for i in (1, 2, 3))
    assert "DUE TO NODE FAILURE" in out and "from memory (3 of 3 nodes had it)" in out
    assert json.loads((workdir / "environment.json").read_text())["processes"] == NODES - 1
    check_losses(workdir, tmp_path / "reference")


def test_a_mistake_is_not_requeued(slurm: Slurm) -> None:
    job, workdir = train(slurm, model__num_heads=3)
    failed = slurm.wait(job, "FAILED")
    assert (failed["ExitCode"], failed["Restarts"]) == ("2:0", "0")
    assert "queues up again" not in slurm.output(job) and not (workdir / "metrics.jsonl").exists()


TWO_STEPS = """#!/bin/bash
srun --overlap env -u SLURM_NTASKS {first} &
srun --overlap {second} &
wait -n && wait -n
"""


def test_two_runs_in_one_allocation(slurm: Slurm, tmp_path: Path) -> None:
    """Two steps of a job train at once, on the same nodes: neither meets the other, without SLURM_NTASKS too."""
    workdirs = [slurm.folder / "one", slurm.folder / "two"]
    sizes = {**SMALL, "mesh__num_cpu_devices": 0, "mesh__devices_per_node": 0, "seed": 0}
    first, second = (
        shlex.join([sys.executable, str(TRAIN), *arguments(workdir, **sizes | {"seed": seed})])
        for seed, workdir in enumerate(workdirs)
    )
    script = slurm.folder / "two_steps.sbatch"
    script.write_text(TWO_STEPS.format(first=first, second=second))
    options = (f"--output={slurm.folder}/%j.txt", "--time=60", "--nodes=2", "--ntasks-per-node=1")
    job = slurm.run("sbatch", "--parsable", *options, str(script))
    slurm.wait(job, "COMPLETED")
    for workdir in workdirs:
        assert steps_logged(workdir) == NUM_STEPS, slurm.output(job)
        assert json.loads((workdir / "environment.json").read_text())["processes"] == 2
    check_losses(workdirs[0], tmp_path / "reference")


def test_a_chain_of_jobs_ends_with_the_run(slurm: Slurm) -> None:
    """Without requeueing: the next task of the array continues, and the rest is cancelled at the end."""
    program = ["bash", "-c", "exit $((SLURM_ARRAY_TASK_ID == 1 ? 75 : 0))", f"--workdir={slurm.folder}/run"]
    job = slurm.submit(program, "--array=1-3%1")
    slurm.wait(f"{job}_3", "CANCELLED")
    slurm.wait(f"{job}_2", "COMPLETED")
    first = slurm.job(f"{job}_1")
    assert (first["JobState"], first["ExitCode"], first["Restarts"]) == ("FAILED", "75:0", "0")


SLOWLY = "import sys, train; from support import running; file = sys.argv.pop(1)\n"
SLOWLY += "sys.exit(train.main(sys.argv, hooks=[running.pause(2.0, while_there=file)]))"


def test_replicas_come_and_go_by_themselves(slurm: Slurm, tmp_path: Path) -> None:
    """Four jobs: the first is cancelled, the second asked to stop, the third loses its node; the fourth never waits.

    The last one that starts has the id of the whole array; only it is requeued.
    """
    workdir, steps = slurm.folder / "run", 100
    independent = {"sharding__replicas": "independent", "sharding__strategy": "zero3", "sharding__partition_size": 0}
    sizes = {"mesh__num_cpu_devices": 2, "mesh__devices_per_node": 2, "checkpoint__every": 50}
    changes = {**SMALL, "num_steps": steps, **independent, **sizes, "elastic__silence_s": 5}
    slowly = slurm.folder / "slowly"
    slowly.touch()  # else the others would have finished before SLURM has found the node down
    program = [sys.executable, "-c", SLOWLY, str(slowly), *arguments(workdir, **changes)]
    output = f"--output={slurm.folder}/%A_%a.txt"
    job = slurm.submit(program, "--array=0-3", output, sbatch=slurm_cluster.REPLICAS)
    of = lambda replica: workdir / "replicas" / str(replica)
    done = lambda replica: max((row["step"] for row in rows(of(replica))), default=0)
    slurm.until(f"{job}_2", lambda _: all(steps_logged(of(replica)) >= 3 for replica in range(4)))
    node = {replica: slurm.job(f"{job}_{replica}")["NodeList"] for replica in range(4)}
    alone = start([*arguments(tmp_path / "alone", **changes), "--group=0"])

    slurm.run("scancel", f"{job}_0")
    slurm.cluster.kill(int(node[1].removeprefix("node")))
    slurm.run("scancel", "--signal=TERM", f"{job}_3")
    free = {node[0], node[3]}  # SLURM chooses which of them the first gets
    for replica in (3, 1):
        slurm.go_on(f"{job}_{replica}", ",".join(free))
        step = done(2)
        slurm.until(f"{job}_2", lambda _, replica=replica, step=step: done(replica) > step)
        free -= {slurm.job(f"{job}_{replica}")["NodeList"]}
    slowly.unlink()
    restarts = [slurm.wait(f"{job}_{replica}", "COMPLETED")["Restarts"] for replica in (1, 2, 3)]
    assert restarts == ["1", "0", "1"] and slurm.job(f"{job}_0")["JobState"] == "CANCELLED"
    assert "replicas.sbatch: exit code 75; replica 3 queues up again" in slurm.output(f"{job}_3")
    assert not free
    assert "replica 0 is lost" not in slurm.output(f"{job}_2")  # scancel announces it

    assert finish(alone)[0][0] == 0
    expected = losses(tmp_path / "alone" / "replicas" / "0")
    assert losses(of(2)) == expected and len(expected) == steps
    for replica in range(4):
        assert all(row["loss"] == expected[row["step"] - 1] for row in rows(of(replica)))
    assert rows(of(1))[-1]["step"] == rows(of(3))[-1]["step"] == steps


SWEEP = "import sys, pathlib; from support import sweeping\n"
SWEEP += "sys.exit(sweeping.run_sweep(pathlib.Path(sys.argv[1]), *sys.argv[2:]))"


def test_a_sweep_is_an_array(slurm: Slurm) -> None:
    """Of three runs one finishes, one fails, and one stops with 75 once; sbatch reads every directive as meant."""
    folder = slurm.folder / 'it\'s 50%j # "a"'
    folder.mkdir()
    comment = "it's 5 \\ \"o'clock\" # now"
    flags = [
        sweep_file(folder, seeds(0, FAILS, STOPS_ONCE)),
        f"--slurm=--comment={shlex.quote(comment)}",
        "--workers=2",
    ]
    sweep = (sys.executable, "-c", SWEEP, str(folder), *flags)
    job = (folder / "runs" / "slurm_job.txt").read_text().strip() if slurm.run(*sweep) else ""
    assert f"Comment={comment} \n" in slurm.run("scontrol", "show", "job", f"{job}_1")
    slurm.wait(f"{job}_1", "COMPLETED")
    assert slurm.wait(f"{job}_2", "FAILED")["Restarts"] == "0"
    assert f"job {job} is in the queue" in slurm.run(*sweep)
    slurm.go_on(f"{job}_3")
    assert slurm.wait(f"{job}_3", "COMPLETED")["Restarts"] == "1"
    assert sorted(started(folder)) == [0, FAILS, STOPS_ONCE, STOPS_ONCE]
    assert {file.name for file in (folder / "runs" / "slurm").iterdir()} == {f"{job}_{i}.txt" for i in (1, 2, 3)}

    report = slurm.run(*sweep)
    assert f"failed: seed={FAILS}-" in report and "submitted 1 runs" in report
