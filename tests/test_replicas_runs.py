"""Independent replicas in processes of their own: whatever happens to them, all learn the same, to the last bit."""

import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.replica_runs import NUM_STEPS, PAUSE_S, REPLICAS, SETTINGS, Run
from support.running import (
    arguments,
    arrays,
    finish,
    rows,
    start_together,
    steps_logged,
    wait_until,
)

from runtime.events import EventReader

pytestmark = pytest.mark.slow
KINDS = ("kill", "freeze", "leave", "kill_joining")
FROZEN_S = 4.0  # longer than the others wait

# as soon as a file of that name is there
HANGS = """
def make(config):
    from pathlib import Path
    ex = running.make_experiment(config)
    well = ex.batches.to_devices
    def hang(rows):
        while Path({file!r}).exists():
            time.sleep(1)
        return well(rows)
    vars(ex.batches)["to_devices"] = hang
    return ex
parts["make"] = make
"""


def disturb(run: Run, kind: str, victim: int, chance: random.Random) -> None:
    """Causes an event at a replica; it takes part again when this returns."""
    time.sleep(chance.uniform(0, 2 * PAUSE_S))  # anywhere in a step
    if kind == "freeze":
        run.processes[victim].send_signal(signal.SIGSTOP)
        time.sleep(FROZEN_S)
        run.processes[victim].send_signal(signal.SIGCONT)
    elif kind == "leave":
        run.stop(victim, signal.SIGTERM, 75)
        run.start(victim)
    else:
        run.stop(victim, signal.SIGKILL, -signal.SIGKILL)
        run.start(victim)
    if kind == "kill_joining":
        address = run.folder(victim) / "address-0.json"
        before = address.stat().st_mtime_ns
        # it is about to meet the others
        wait_until(lambda: address.stat().st_mtime_ns != before, run.processes[victim])
        time.sleep(chance.uniform(0, 3 * PAUSE_S))
        run.stop(victim, signal.SIGKILL, -signal.SIGKILL)
        run.start(victim)
    run.until(victim, 3)


@pytest.mark.parametrize(
    ("codec", "how", "kinds"),
    [
        ("none", {}, ("freeze", "kill_joining")),
        pytest.param(
            *("bf16", {"local_sgd__inner_steps": 2, "checkpoint__every": 16}, ("leave", "freeze")),
            marks=pytest.mark.slow,
        ),
        pytest.param("none", {"compression__delayed": True}, ("kill", "leave"), marks=pytest.mark.slow),
        *(pytest.param(x, {}, KINDS, marks=pytest.mark.slow) for x in ("bf16", "int8")),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x) or "each step",
)
def test_replicas_that_come_and_go_learn_what_one_does(
    tmp_path: Path, codec: str, how: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    chance = random.Random(f"events of {codec}")
    how = {"compression__all_reduce": codec, **how}
    delayed = "compression__delayed" in how
    alone, run = (Run(tmp_path / name, **how) for name in ("alone", "run"))
    alone.start(0)
    assert finish(alone.processes[0])[0][0] == 0
    run.slowly.touch()
    for group in range(REPLICAS):
        run.start(group)
    try:
        for group in range(REPLICAS):
            run.until(group, 2)
        for kind in chance.sample(kinds, len(kinds)):
            disturb(run, kind, chance.randrange(REPLICAS), chance)
        assert max(map(run.last, range(REPLICAS))) < NUM_STEPS  # else the last events came too late
    finally:
        run.slowly.unlink()
        ended = finish(*run.processes.values())
    assert [code for code, _, _ in ended] == [0] * REPLICAS, ended

    expected = alone.losses(0)
    for group in range(REPLICAS):
        found = run.losses(group)
        assert found[NUM_STEPS] and sum(loss is None for loss, _ in found.values()) <= delayed * (1 + len(kinds))
        assert found == {step: (loss and expected[step][0], expected[step][1]) for step, (loss, _) in found.items()}
    one, two = (arrays(each.workdir, NUM_STEPS) for each in (alone, run))
    assert one.keys() == two.keys()
    assert [name for name in one if one[name].tobytes() != two[name].tobytes()] == []


def test_a_replica_whose_main_thread_hangs_ends_alone(tmp_path: Path) -> None:
    """Its other threads answer all others that it will take longer: they wait, and that is no hang of theirs."""
    run, hangs = Run(tmp_path / "run", num_steps=30, elastic__stall_s=10.0, checkpoint__every=0), tmp_path / "hangs"
    run.slowly.touch()
    run.start(0)
    run.start(1, HANGS.format(file=str(hangs)))
    try:
        for group in range(2):
            run.until(group, 2)
        hangs.touch()
        (hung,) = finish(run.processes[1])
        assert hung[0] == 75 and "error: no progress for 10 s (elastic.stall_s): every process is in a step" in hung[2]
        assert "in hang" in hung[2]  # the stacks
    finally:
        run.slowly.unlink()
        (stays,) = finish(run.processes[0])
    assert stays[0] == 0 and run.last(0) == 30, stays
    assert rows(run.folder(0))[-1]["replicas"] == 1
    about_1 = [event["event"] for event in EventReader(run.folder(0)).new() if event.get("replica") == 1]
    assert about_1 == ["replica_joined", "replica_lost"] and "replica 1 is lost in step" in stays[1]
    assert sum(row["collective_inter_bytes"] for row in rows(run.folder(0))) > 0


@pytest.mark.release
def test_a_group_of_two_nodes_is_lost_alone_and_comes_back(tmp_path: Path) -> None:
    """One of its nodes is killed: the other one ends with 75, and the other group goes on."""
    steps = 60
    settings = {name: x for name, x in SETTINGS.items() if not name.startswith("mesh")}
    settings |= {"num_steps": steps, "elastic__silence_s": 20}
    slowly = tmp_path / "slowly"

    def group(workdir: Path, number: int) -> list[subprocess.Popen[str]]:
        first = f"parts['hooks'].append(running.pause({PAUSE_S}, while_there={str(slowly)!r}))"
        return start_together([*arguments(workdir, **settings), f"--group={number}"], 2, 1, first=first)

    def folder(number: int) -> Path:
        return tmp_path / "run" / "replicas" / str(number)

    alone = finish(*group(tmp_path / "alone", 0))
    assert [code for code, _, _ in alone] == [0, 0], alone
    slowly.touch()
    stays, lost = group(tmp_path / "run", 0), group(tmp_path / "run", 1)
    comes: list[subprocess.Popen[str]] = []
    try:
        wait_until(lambda: steps_logged(folder(1)) >= 3, lost[0])
        lost[1].kill()
        assert finish(lost[0])[0][0] == 75
        before = steps_logged(folder(0))
        comes = group(tmp_path / "run", 1)
        wait_until(lambda: steps_logged(folder(1)) >= 6, comes[0])
        assert steps_logged(folder(0)) > before
    finally:
        slowly.unlink()
        ended = finish(*stays, *comes)
        finish(*lost)
    assert [code for code, _, _ in ended] == [0] * 4, ended
    expected = {row["step"]: row["loss"] for row in rows(tmp_path / "alone" / "replicas" / "0")}
    for number in range(2):
        assert all(row["loss"] == expected[row["step"]] for row in rows(folder(number)))
    assert len(expected) == steps == len(rows(folder(0)))
