"""The agent of a node, called as Ray would, and the process that waits for its arguments."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.ray_agent import STANDBY, Agent, News

pytestmark = pytest.mark.slow  # each starts processes
WAIT_S = 180
# Says that it is imported, then does what its arguments say; SIGTERM makes it stop in good order.
PROGRAM = """
import os, signal, sys, time
print("imported as", __name__)
def main(argv):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    print("started with", *argv[1:])
    if "--wait" in argv:
        time.sleep(1000)
    return int(argv[1])
if __name__ == "__main__":
    sys.exit(main(sys.argv))
"""


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """Agents handle it; pytest gets its own handler back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def agent(program: Path) -> Iterator[Agent]:
    agent = Agent([sys.executable, str(program), "3"], str(program.parent), {})
    yield agent
    for process in (agent._running, agent._warm):
        if process and process.poll() is None:
            process.kill()
            process.communicate()


def collect(agent: Agent, text: str = "", *, ended: bool = False) -> tuple[News, list[str]]:
    """Waits for a line with a text, or for the end of the program; returns the last news and all lines."""
    lines: list[str] = []
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        news = agent.news(0.2)
        lines += news.lines
        if (news.code is not None) if ended else any(text in line for line in lines):
            return news, lines
    raise AssertionError(f"no {text or 'end'} in {lines}")


def test_a_program_is_imported_before_it_is_started(agent: Agent) -> None:
    # the warm process' output is read from its start on
    agent.start(1, ["--process_id=0"])
    news, lines = collect(agent, ended=True)
    assert lines == ["imported as standby", "imported as __main__", "started with 3 --process_id=0"]
    assert (news.attempt, news.code) == (1, 3)
    assert 20000 <= news.free_port < 32000  # outside of what Linux gives to connections


def test_an_attempt_is_stopped_and_the_next_one_starts(agent: Agent) -> None:
    """Signals for an attempt that has ended change nothing."""
    agent.start(1, ["--wait"])
    collect(agent, "started")
    agent.send(1, signal.SIGTERM)
    news, _ = collect(agent, ended=True)
    assert (news.attempt, news.code) == (1, 75)
    agent.start(2, ["--wait"])
    collect(agent, "started")
    agent.send(1, signal.SIGKILL)
    agent.send(2, signal.SIGTERM)
    news, _ = collect(agent, ended=True)
    assert (news.attempt, news.code) == (2, 75)


def test_a_kill_that_overtakes_its_start_holds(agent: Agent) -> None:
    agent.send(1, signal.SIGKILL)
    agent.start(1, [])
    assert agent.news(0.0).code == -signal.SIGKILL
    agent.start(2, [])
    news, lines = collect(agent, ended=True)
    assert (news.attempt, news.code) == (2, 3) and lines[-1] == "started with 3"


def test_a_killed_warm_process_is_replaced(agent: Agent) -> None:
    assert agent._warm
    agent._warm.kill()
    agent._warm.wait(WAIT_S)
    agent._warm.communicate()
    agent.start(1, [])
    assert collect(agent, ended=True)[0].code == 3


def test_sigterm_says_that_the_node_goes(agent: Agent) -> None:
    assert not agent.news(0.0).is_leaving
    os.kill(os.getpid(), signal.SIGTERM)
    assert agent.news(0.0).is_leaving


def test_words_of_other_launchers_are_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "7")
    path = tmp_path / "program.py"
    path.write_text("import os\nprint(sorted(k for k in os.environ if k.startswith('JAX_')))\n")
    agent = Agent([sys.executable, str(path)], str(tmp_path), {"JAX_PLATFORMS": "cpu"})
    agent.start(1, [])
    _, lines = collect(agent, ended=True)
    assert lines[0] == "['JAX_PLATFORMS']"


def test_a_missing_python_is_a_mistake(tmp_path: Path) -> None:
    agent = Agent([str(tmp_path / "python"), "train.py"], str(tmp_path), {})
    agent.start(1, [])
    news, lines = collect(agent, ended=True)
    assert news.code == 2 and "No such file" in lines[0]


def standby(program: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-u", str(STANDBY), str(program)], stdin=pipe, stdout=pipe, text=True)


def test_nothing_stays_when_the_agent_is_gone(program: Path) -> None:
    """A waiting one ends; a running one stops in good order."""
    waiting = standby(program)
    assert waiting.communicate(timeout=WAIT_S)[0] == "imported as standby\n" and waiting.returncode == 0
    running = standby(program)
    assert running.stdin and running.stdout
    print(json.dumps(["0", "--wait"]), file=running.stdin, flush=True)
    assert any("started" in line for line in iter(running.stdout.readline, ""))
    try:
        running.communicate(timeout=WAIT_S)  # closes its stdin
    finally:
        running.kill()
    assert running.returncode == 75
