"""`python -m launch.emulate`: a program's environment, the end of a job, `ctl`, and the remains of a killed job."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.emulating import (
    EMULATED,
    ROOT,
    STARTED,
    ctl,
    emulate,
    finish,
    networks_in_use,
    networks_of,
    python,
    running_with,
    unique,
)
from support.tables import every_row
from support.waiting import until

from launch.emulate import control, job, namespaces
from launch.emulate.__main__ import main
from launch.emulate.delay_line import DelayQueue
from launch.emulate.delays import DelayLine
from launch.emulate.links import Links
from runtime.progress import StepProgress, read_progress

ENVIRONMENT = """
import json, os
names = ["JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES"]
names += ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NPROC"]
print(json.dumps([os.environ[name] for name in names]).replace('"', ""))
"""
RANK = "import os, signal, sys, time; rank = int(os.environ['RANK']); print('up')\n"
SLEEP = RANK + "time.sleep(1000)"


@pytest.fixture(autouse=True)
def none_lives_on() -> Iterator[None]:
    """Ends processes that a failed test has started."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def sleeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The name and the folder of an emulation that runs until a signal ends it."""
    name, folder = unique("test-sleeping"), tmp_path_factory.mktemp("sleeping")
    process = emulate(folder, SLEEP, f"--name={name}")
    STARTED.remove(process)
    assert process.stdout and process.stdout.readline() == "up\n"
    yield name, folder
    process.terminate()
    assert finish(process)[0] == 128 + signal.SIGTERM


@pytest.mark.slow
@EMULATED
def test_what_the_program_finds(tmp_path: Path) -> None:
    """Process 0's output comes through; everyone's is in the log of its node."""
    code, out, err = finish(emulate(tmp_path, ENVIRONMENT, "--processes_per_node=2"))
    assert code == 0, err
    first = "10.77.0.1:29400, 4, {0}, 1, 10.77.0.1, 29500, {0}, 4, {1}, 2, 1"
    assert out == f"[{first.format(0, 0)}]\n"
    for node in (0, 1):
        lines = (tmp_path / f"node{node}.log").read_text().splitlines()
        assert sorted(lines) == [f"[{first.format(2 * node + local, local)}]" for local in (0, 1)]


@pytest.mark.slow
@EMULATED
def test_nodes_that_are_worlds_of_their_own(tmp_path: Path) -> None:
    """Each has a separate coordinator and number, and outlives a node that fails."""
    program = (
        ENVIRONMENT
        + """
import sys, time
number = os.environ["SLURM_ARRAY_TASK_ID"]
if number == "1": time.sleep(3)
print(number, flush=True)
sys.exit(4 * (number == "0"))
"""
    )
    code, _, err = finish(emulate(tmp_path, program, "--independent", "--grace_s=0"))
    assert code == 4, err
    for node in (0, 1):
        address = f"10.77.0.{node + 1}"
        found = (tmp_path / f"node{node}.log").read_text().splitlines()
        assert found == [f"[{address}:29400, 1, 0, 2, {address}, 29500, 0, 1, 0, 1, 2]", str(node)]


@pytest.mark.slow
@EMULATED
@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("sys.exit(3 * (rank == 1))", 3, ""),
        (
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(74))\nif rank == 0: sys.exit(75)\ntime.sleep(1000)",
            *(75, "process 0 on node0 ended with exit code 75"),
        ),
        ("if rank == 0: sys.exit(4)\ntime.sleep(1000)", 4, "process 0 on node0 ended with exit code 4"),
        ("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(1000)", 137, "process 1 on node1 ended with exit code 137"),
    ],
)
def test_exit_codes(tmp_path: Path, program: str, code: int, said: str) -> None:
    """That of the process that failed first; after the grace the others are ended."""
    outcome = finish(emulate(tmp_path, RANK + program, "--grace_s=1"))
    assert outcome[0] == code, outcome
    assert said in outcome[2] and "Traceback" not in outcome[2]


def test_after_a_failure_the_others_get_sigterm_and_10_s_later_sigkill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, signals = [100.0], []
    monkeypatch.setattr(job.time, "monotonic", lambda: now[0])
    cluster = SimpleNamespace(workdir=tmp_path, nodes=[])
    started = job.ClusterJob(cast("Any", cluster), [], devices=1, processes_per_node=1, grace_s=5.0)
    cluster.nodes = [SimpleNamespace(marks=set())] * 2
    for rank, code in enumerate((6, None)):
        handle = SimpleNamespace(
            poll=lambda code=code: code, send_signal=lambda number: signals.append((now[0], number))
        )
        started.processes.append(job.EmulatedProcess(rank=rank, node=rank, handle=cast("Any", handle)))
    for _ in range(24):
        started.watch()
        now[0] += 1.0
    assert signals == [(106.0, signal.SIGTERM), (117.0, signal.SIGKILL)] and started.exit_code() == 6


@pytest.mark.slow
@EMULATED
def test_a_killed_emulation_leaves_nothing(tmp_path: Path) -> None:
    """No process, not even in its networks; the next emulation removes its name. A concurrent emulation lives."""
    lives, killed = unique("test-lives"), unique("test-killed")
    other = emulate(tmp_path / "other", SLEEP, f"--name={lives}")
    process = emulate(tmp_path / "killed", SLEEP, f"--name={killed}")
    assert process.stdout and process.stdout.readline() == "up\n"
    assert other.stdout and other.stdout.readline() == "up\n"
    with networks_of(running_with(str(tmp_path / "killed" / "hosts"))) as networks:
        assert len(networks & networks_in_use()) == 3  # two nodes and the switch
        process.kill()
        finish(process)
        until(lambda: not running_with(str(tmp_path / "killed")))
        until(lambda: not networks & networks_in_use())  # a process that ends loses its arguments before its network
        assert not any(network in Path("/proc/self/mountinfo").read_text() for network in networks)
    assert killed not in control.running()
    assert finish(emulate(tmp_path / "next", "print(1)"))[:2] == (0, "1\n")
    assert lives in control.running() and other.poll() is None
    other.terminate()
    assert finish(other)[0] == 128 + signal.SIGTERM
    assert lives not in control.running()


@pytest.mark.slow
@EMULATED
def test_ctl(tmp_path: Path) -> None:
    """A node that was killed on purpose has not failed: the other nodes determine the job's code."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 41}\n{"step": 42}\n{"step"')
    program = RANK + f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.05)"
    command = [*python(program), f"--workdir={metrics.parent}"]
    me = f"--name={unique('test-ctl')}"
    process = emulate(tmp_path, command, "--rate=1gbit", me)
    assert process.stdout and process.stdout.readline() == "up\n"
    code, out, _ = ctl(me, "status")
    assert code == 0 and out.splitlines()[1].split() == ["0", "node0", "1gbit", "up", "42", "0.0", "0.0"]
    assert ctl(me, "slow", "0", "5mbit")[:2] == (0, "node0 has a link of 5mbit\n")
    assert ctl(me, "cut", "0")[:2] == (0, "node0: cut\n")
    assert ctl(me, "kill", "1")[:2] == (0, "node1: kill\n")
    assert ctl(me, "add", "--", "sh", "-c", "hostname; grep -c node /etc/hosts")[:2] == (0, "node2 is up\n")
    until(lambda: (tmp_path / "node2.log").read_text() == "node2\n3\n")
    until(lambda: ctl(me, "status")[1].splitlines()[3].split()[3:6] == ["exit", "code", "0"])
    rows_now = [line.split()[2:4] for line in ctl(me, "status")[1].splitlines()[1:3]]
    assert rows_now == [["5mbit", "cut"], ["1gbit", "killed"]]
    for words, said in (
        (["stop", "1"], "node 1 was killed"),
        (["cut", "3"], "there is no node 3; they are 0 to 2"),
        (["slow", "0", "5mb"], "--rate=5mb: give a number and its unit"),
    ):
        code, _, err = ctl(me, *words)
        assert code == 2 and err.startswith(f"error: {said}") and err.count("\n") == 1, err
    (tmp_path / "end").touch()
    assert finish(process)[0] == 0


REQUESTS = [
    b"",  # the requesting process was killed in between
    b'{"verb": "sta',
    b"hello\n",
    b"{}\n",
    b"5\n",
    b'{"verb": "cut"}\n',
    b'{"verb": "dance", "node": 0}\n',
    b'{"verb": [], "node": 0}\n',
    b'{"verb": "cut", "node": "0"}\n',
    b'{"verb": "slow", "node": 0, "rate": 5}\n',
    b'{"verb": "add", "command": 5}\n',
    b'{"verb": "add", "command": [5]}\n',
    b"\xff\xfe\xff\n",
    b"[" * 50_000 + b"\n",
    b"9" * 5_000 + b"\n",
]


@pytest.mark.slow
@EMULATED
def test_requests_that_are_none(sleeping: tuple[str, Path]) -> None:
    """A `ctl` that is killed in between, and a foreign client, leave the job alone."""
    name, answers, before = sleeping[0], [], control.ask(sleeping[0], {"verb": "status"})
    for said in REQUESTS:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{control.PREFIX}{name}")
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            answers.append(connection.makefile().readline())
    assert [said for said, answer in zip(REQUESTS, answers) if not answer.startswith('{"error": "')] == []
    assert control.ask(name, {"verb": "status"}) == before  # none was added, cut or slowed


@pytest.mark.slow
@EMULATED
@pytest.mark.parametrize("word", ["a\0b", "a" * (1 << 18)], ids=["null byte", "too long"])
def test_an_added_node_whose_program_cannot_start(word: str, sleeping: tuple[str, Path]) -> None:
    """It is not up, and whoever asked for it hears why; the others stay."""
    name, _ = sleeping
    number = control.ask(name, {"verb": "status"}).count("\n")
    with pytest.raises(ValueError, match=f"node{number} is killed, its program cannot be started: "):
        control.ask(name, {"verb": "add", "command": ["true", word]})
    rows = control.ask(name, {"verb": "status"}).splitlines()[1:]
    assert [row.split()[3] for row in rows] == [*[row.split()[3] for row in rows[:number]], "killed"]
    assert control.ask(name, {"verb": "add", "command": []}) == f"node{number + 1} is up"


def test_metrics_of_another_program_are_no_progress(tmp_path: Path) -> None:
    """For any content that the program writes there, the table has no step."""
    for text in ("[]", "5", '{"step": null}', '{"step": 1e999}', '{"step": "x"}', "\xff", "[" * 50_000):
        (tmp_path / "metrics.jsonl").write_text(text + "\n", encoding="latin-1")
        assert read_progress(tmp_path) == StepProgress()


def test_another_user_is_neither_asked_nor_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may take the name of a socket; who is at its other end, the kernel says."""
    name, own = unique("test-users"), os.geteuid()
    with control.Control(name) as served, socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{control.PREFIX}{name}")
        client.sendall(b"5\n")
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        served.answer(lambda request: pytest.fail("it is answered"))
        with pytest.raises(ValueError, match=f"the cluster named {name} is another user's"):
            control.ask(name, {"verb": "status"})
        monkeypatch.undo()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(100) == b""
    assert name not in control.running()


@pytest.mark.slow
@EMULATED
def test_a_crash_after_an_interruption_ends_the_others(tmp_path: Path) -> None:
    """They would wait for the crashed one for ever, and the interruption was the last word of the user."""
    handler = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(1) if rank else None)\nprint('ready')\n"
    process = emulate(tmp_path, RANK + handler + "while True: time.sleep(1)", "--grace_s=0.5")
    logs = [tmp_path / "node0.log", tmp_path / "node1.log"]
    until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs))
    process.terminate()
    code, _, err = finish(process)
    assert code == 1 and "process 1 on node1 ended with exit code 1" in err, err


@pytest.mark.slow
@EMULATED
def test_paths_that_lead_elsewhere(tmp_path: Path) -> None:
    """A program with `=` in its path, and a link, both in a folder that nodes do not share by itself."""
    folder = tmp_path / "a=b"
    folder.mkdir()
    (folder / "program").write_text("#!/bin/sh\ncat $1\n")
    (folder / "program").chmod(0o755)
    (tmp_path / "text").write_text("found\n")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    command = [str(folder / "program"), str(tmp_path / "link")]
    assert finish(emulate(tmp_path / "run", command)) == (0, "found\n", "")


@pytest.mark.slow
@EMULATED
def test_a_workdir_and_a_name_are_for_one_emulation(tmp_path: Path, sleeping: tuple[str, Path]) -> None:
    name, folder = sleeping
    code, _, err = finish(emulate(folder, "0"))
    assert (code, err) == (2, f"error: another emulation uses --workdir={folder}; give another one\n")
    code, _, err = finish(emulate(tmp_path, "0", f"--name={name}"))
    said = f"error: a cluster named {name} is running; end it, or give another --name\n"
    assert (code, err) == (2, said)


SIZE = ["--nodes=2", "--devices_per_node=2"]
BAD = [
    (["--rate=1gb"], "--rate=1gb: give a number and its unit, such as 1gbit, 200mbit, 500kbit or none"),
    (["--rate=9kbit"], "--rate=9kbit is too slow for packets; give 100kbit or more"),
    (["--latency=1"], "--latency=1: give a number and its unit, such as 1ms or 50us"),
    (["--jitter=1ms"], "--jitter=1ms must not be more than --latency=0ms"),
    (["--loss=100%"], "--loss=100% leaves nothing; `ctl cut NODE` silences a node"),
    (["--nodes=255"], "--nodes=255: from 1 to 254 have an address"),
    (["--nodes=two"], "argument --nodes: invalid int value: 'two'"),
    (["--processes_per_node=3"], "--devices_per_node=2 must be a multiple of --processes_per_node=3"),
    (["--name=../../evil"], "--name=../../evil: up to 40 letters"),
    (["--"], "no program; give it after --"),
    (["--", "no-such-program"], "there is no program no-such-program; give its path"),
]
BAD_CTL = [
    (["--name=nobody", "status"], "no cluster named nobody is running; running: "),
    (["status", "--", "true"], "status takes no program"),
]


@every_row(
    ("args", "said"),
    [
        *((SIZE + args, said) for args, said in BAD),
        *((["ctl", *args], said) for args, said in BAD_CTL),
    ],
)
def test_mistakes_are_one_line_and_make_nothing(
    args: Any, said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = [] if "--" in args or args[0] == "ctl" else ["--", "true"]
    assert main(["emulate", *args, *program]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {said}") and err.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_options_are_checked_without_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    """As sweep.py does before the first run."""
    assert main(["emulate", *SIZE, "--rate=1gbit", "--check"]) == 0
    assert capsys.readouterr().out == "the options are right\n"
    assert main(["emulate", *SIZE, "--rate=1gb", "--check"]) == 2
    assert capsys.readouterr().err.startswith("error: --rate=1gb: give a number")


def test_missing_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Found out before anything is made: without iproute2 in the PATH or where Debian keeps it."""
    monkeypatch.setattr(namespaces, "SEARCH", str(tmp_path))
    assert main(["emulate", *SIZE, f"--workdir={tmp_path}", "--", "true"]) == 2
    assert capsys.readouterr().err == "error: `ip` is missing; install iproute2\n"


# The tests' own may lie where others may not read; nothing but the standard library is needed.
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or ""


def as_nobody(folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """Runs an emulation as a user without rights, in a folder with a copy of its imports."""
    user = ["setpriv", "--reuid=65534", "--clear-groups", "env", "-u", "XDG_RUNTIME_DIR", "PYTHONDONTWRITEBYTECODE=1"]
    emulator = [PYTHON, "-m", "launch.emulate", "--nodes=2", "--devices_per_node=2"]
    program = ["--workdir=run", "--", "sh", "-c", "hostname; ls /sys/class/net; exit 5"]
    command = [*user, *before, *emulator, *program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@EMULATED
@pytest.mark.skipif(not PYTHON, reason="no python3 that all users may run")
def test_without_root() -> None:
    """By a user namespace; one line if none is available."""
    with tempfile.TemporaryDirectory() as name:  # which others may reach, unlike tmp_path
        folder = Path(name)
        for package in ("launch", "runtime"):
            shutil.copytree(ROOT / package, folder / package)
        folder.chmod(0o777)
        refused = as_nobody(folder, "unshare", "--user")  # a user namespace without rights, nor a way to get some
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
        assert refused.stderr.startswith("error: not enough privileges: run as root, or allow user namespaces (")
        if not Path("/proc/sys/user/max_user_namespaces").read_text().strip("0\n"):
            pytest.skip("this kernel allows no user namespaces")
        done = as_nobody(folder)
        assert (done.returncode, done.stdout) == (5, "node0\neth0\nlo\n"), done.stderr
        assert (folder / "run" / "traffic.json").stat().st_uid == 65534


def test_a_latency_is_above_the_queue_of_the_rate() -> None:
    """Below it netem would take the place of tbf's queue, to which alone its limit applies: a burst and 100 ms."""
    links = Links(rate="8mbit", latency="20ms", jitter="1ms", loss="0.5%")
    tbf = "handle 1: tbf rate 8mbit burst 131072b limit 231072b"
    netem = "qdisc replace dev eth0 root handle 2: netem limit 100000 delay 20ms 1ms loss 0.5%"
    assert links.leaving("eth0") == [netem, f"qdisc replace dev eth0 parent 2:1 {tbf}"]
    assert links.arriving("p0") == [f"qdisc replace dev p0 root {tbf}"]  # once, at the sending end
    assert Links(rate="8mbit").leaving("eth0") == [f"qdisc replace dev eth0 root {tbf}"]
    lifted = replace(links, rate="none").leaving("eth0")
    assert lifted == ["qdisc replace dev eth0 root noqueue", netem]  # without the tbf that was there


def test_a_delay_line_keeps_the_order_and_bounds_its_memory() -> None:
    queue = DelayQueue(0.02, 0.01, 0.0, max_bytes=1000)
    frames = [bytes([i]) * 100 for i in range(12)]
    for i, frame in enumerate(frames):
        queue.put(frame, 0.001 * i)
    assert not [*queue.pop_due(0.0099)] and 0 < (queue.wait_s(0.0099) or 0) < 0.03
    times, out = [], list[bytes]()
    for now_ms in range(10, 50):
        for frame in queue.pop_due(now_ms / 1000):
            times.append(now_ms)
            out.append(frame)
    assert out == frames[:10]  # 1000 bytes
    assert all(10 + i <= time <= 31 + i for i, time in enumerate(times)) and len(set(times)) >= 3
    assert queue.wait_s(0.05) is None
    queue.put(frames[11], 0.05)  # again with space
    assert [*queue.pop_due(0.09)] == [frames[11]]


def test_a_delay_line_loses_the_fraction() -> None:
    queue = DelayQueue(0.0, 0.0, 0.1)
    for _ in range(10_000):
        queue.put(b"frame", 0.0)
    assert len([*queue.pop_due(0.0)]) == pytest.approx(9000, abs=150)  # 5 sigma


@every_row("links", [{"rate": "none"}, {"rate": "2gbit"}, {"rate": "1gbit", "latency": "0.5s"}])
def test_a_delay_line_refuses_what_it_cannot_carry(links: dict[str, str]) -> None:
    line = DelayLine(0)
    assert line.leaving(fast := Links(rate="1gbit", latency="100ms")) == fast.arriving("eth0")
    with pytest.raises(ValueError, match=f"--rate={links['rate']}: this kernel has no netem"):
        line.leaving(Links(**{"latency": "20ms"} | links))
