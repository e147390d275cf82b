"""Sweeps for the tests: sweep files, and a short program that runs instead of train.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import sweep
from support.running import ROOT, wait_until

BASE = """
'''A sweep of the tests.

    the second line
'''
from configs import base
from configs.overrides import *

def get_config(arg=""):
    config = base.get_config()
    config.num_steps = {num_steps}
    config.sharding.strategy = "ddp"
    return config
"""
# The behaviour of the program by its seed; with any other seed it finishes.
FAILS, STOPS_ONCE, STOPS_ALWAYS, WAITS, DIVERGES, WAITS_FOR_TWO_SIGNALS = MODES = range(101, 107)
TRAIN = """
import json, signal, sys, time
from pathlib import Path
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
folder, seed = Path(flags["workdir"]), int(flags.get("config.seed", 0))
FAILS, STOPS_ONCE, STOPS_ALWAYS, WAITS, DIVERGES, WAITS_FOR_TWO_SIGNALS = MODES
folder.mkdir(parents=True, exist_ok=True)
def log(event):
    with open(folder.parent / "events.jsonl", "a") as file:
        file.write(json.dumps([event, seed, time.monotonic()]) + "\\n")
signals = [signal.SIGINT] * (2 if seed == WAITS_FOR_TWO_SIGNALS else 1)
def stop(*_):
    log("signal")
    signals.pop()
    if not signals:
        time.sleep(0.3)
        log("end")
        sys.exit(75)
signal.signal(signal.SIGINT, stop)
earlier = (folder / "started").exists()
(folder / "started").touch()
(folder / "arguments.json").write_text(json.dumps(sys.argv[1:]))
log("start")
print("config", flags["config"])
if seed == FAILS:
    print("error: the loss is not a number\\na warning at exit", file=sys.stderr)
if seed in (WAITS, WAITS_FOR_TWO_SIGNALS) and not earlier:
    time.sleep(60)
time.sleep({pause_s})
log("end")
if seed == FAILS:
    sys.exit(1)
if seed == STOPS_ALWAYS or (seed == STOPS_ONCE and not earlier):
    sys.exit(75)
rate = float(flags.get("config.optimizer.learning_rate", 0.001))
loss = "NaN" if seed == DIVERGES else 1000 * rate + seed
rows = [dict(step=1, loss=9.0, gib=4.0), dict(step=2, loss=loss, gib=6.0)]
rows += [dict(step=3, loss=loss, gib=50.0, validation_loss=loss)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(folder / "report.html").write_text("the run's page")
summary = dict(exit_reason="finished", steps=3, validation_loss=loss, final_loss=loss, wall_time_s=65.0)
(folder / "summary.json").write_text(json.dumps(summary))
"""


def sweep_file(folder: Path, body: str, *, num_steps: int = 20, name: str = "mine") -> str:
    """Writes a sweep file and returns its path."""
    path = folder / f"{name}.py"
    path.write_text(BASE.format(num_steps=num_steps) + body)
    return str(path)


def seeds(*values: int) -> str:
    """Returns a sweep over seeds as source."""
    return f"def sweep_seed(): return over('seed', {values})\n"


def program(folder: Path, pause_s: float = 0.0) -> str:
    """Writes the program and returns its path."""
    path = folder / "train_in_play.py"
    path.write_text(TRAIN.replace("{pause_s}", str(pause_s)).replace("= MODES", f"= {[*MODES]}"))
    return str(path)


def run_sweep(folder: Path, config: str, *flags: str, pause_s: float = 0.0, script: str = "") -> int:
    """Runs sweep.py in this process into folder/runs, with `script` or the tests' program instead of train.py."""
    argv = ["sweep.py", f"--config={config}", f"--workdir={folder / 'runs'}", *flags]
    return sweep.main(argv, program=script or program(folder, pause_s))


def events(folder: Path) -> list[tuple[str, int, float]]:
    """Returns the (event, seed, time) that the programs logged."""
    path = folder / "runs" / "events.jsonl"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def started(folder: Path) -> list[int]:
    """Returns the seeds of the runs in the order in which they were started."""
    return [seed for event, seed, _ in events(folder) if event == "start"]


# sweep.py in its own process, with the tests' program instead of train.py
PROGRAM = "import sys; import sweep; sys.exit(sweep.main(sys.argv[1:], program=sys.argv[1]))"


def start_sweep(folder: Path, config: str, *flags: str) -> subprocess.Popen[str]:
    """Starts a sweep in its own session with Ctrl-C ignored, like a background job of a shell."""
    words = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    words += [sys.executable, "-c", PROGRAM, program(folder), f"--config={config}", f"--workdir={folder / 'runs'}"]
    return subprocess.Popen(
        [*words, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def wait_for(folder: Path, event: tuple[str, int], process: subprocess.Popen[str]) -> None:
    """Waits until a program has logged an event."""
    wait_until(lambda: event in [(name, seed) for name, seed, _ in events(folder)], process)
