"""Measures what text in a slow store costs: the wait for data in a step, and the time to start at a late step.

    python -m benchmarks.data_tiers           # 3 repetitions with and without the store, alternating; then the starts

A run trains the model of configs/standard.py on 2 devices (1024 tokens per step), once from a full cache on the local
disk and once from an empty one, with an HTTP server that sends all connections together twice the bytes per second that
the run before needed. The first step waits for the first block of shards, whatever the rate: it is recorded apart. A
start is the time from opening a prepared set of 2000 shards, which are on the disk, to the first batch.

Adds lines to results/measured/data_tiers.jsonl.
"""

import argparse
import http.server
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.records import MEASURED, add, machine
from configs.schema import DataConfig
from files.cache import ENVIRONMENT_KEY
from input_pipeline import Batches, load, prepare
from input_pipeline.shard_order import ShardOrder
from input_pipeline.shards import ShardSet

ROOT = Path(__file__).parents[1]
RESULTS = MEASURED / "data_tiers.jsonl"
ROWS, SEQ_LEN, STEPS, SHARDS_PER_BLOCK = 4, 256, 9, 2
STEP_BYTES = ROWS * SEQ_LEN * 2  # of tokens, 16 bits each
SHARD_STEPS = 2
LATE_STEP = 10_000


class Store:
    """An HTTP server of a folder, which sends `bytes_per_s` over all connections together."""

    def __init__(self, folder: Path) -> None:
        self.bytes_per_s = 1e9
        self._lock, self._free_s = threading.Lock(), 0.0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                content = (folder / self.path.lstrip("/")).read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                for start in range(0, len(content), 256):
                    outer.wait(len(content[start : start + 256]))
                    self.wfile.write(content[start : start + 256])

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait(self, size: int) -> None:
        """Returns when `size` more bytes may be sent."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + size / self.bytes_per_s
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.monotonic()))


def make_texts(folder: Path, count: int, num_bytes: int) -> None:
    """Writes files of printable random text."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        (folder / f"{number:05d}.txt").write_bytes(random.integers(32, 127, num_bytes, np.uint8).tobytes())


def make_set(texts: Path, out: Path, cache: Path) -> None:
    """Prepares a set."""
    os.environ[ENVIRONMENT_KEY] = str(cache)
    assert prepare.main(["--path", str(texts), "--out", str(out)]) == 0


def train(workdir: Path, path: str, cache: Path) -> dict[str, Any]:
    """Trains, and returns the times of its steps."""
    config = {
        "num_steps": STEPS,
        "data.source": "shards",
        "data.path": path,
        "data.seq_len": SEQ_LEN,
        "data.shuffle_shards": SHARDS_PER_BLOCK,
        "batch.global_size": ROWS,
        "mesh.num_cpu_devices": 2,
    }
    flags = [f"--config.{key}={value}" for key, value in config.items()]
    command = [sys.executable, "train.py", "--config=configs/standard.py", f"--workdir={workdir}", *flags]
    subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env={**os.environ, ENVIRONMENT_KEY: str(cache)}
    )
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS
    times, waits = [row["step_time_s"] for row in rows[1:]], [row["data_wait_s"] for row in rows]
    counters = {key: rows[-1][key] for key in rows[-1] if key.startswith("data_") and key != "data_wait_s"}
    return {
        "step_time_s": times,  # of all steps but the first, whose data_wait_s is first_wait_s
        "data_wait_s": waits[1:],
        "first_wait_s": waits[0],
        "wait_share": sum(waits[1:]) / sum(times),
        **counters,
    }


def steps(folder: Path, repeats: int, about: dict[str, str]) -> None:
    """Measures the steps with and without the store, in turn."""
    make_texts(folder / "texts", 40, SHARD_STEPS * ROWS * SEQ_LEN)
    make_set(folder / "texts", folder / "set", folder / "full")
    store = Store(folder / "set")
    for repeat in range(repeats):
        near = train(folder / f"near{repeat}", str(folder / "set"), folder / "full")
        add(RESULTS, {"what": "step", "from": "disk", "repeat": repeat} | near | about)
        store.bytes_per_s = 2 * STEP_BYTES / median(near["step_time_s"])
        far = train(folder / f"far{repeat}", store.url, folder / f"empty{repeat}")
        rate = {"store_bytes_per_s": store.bytes_per_s}
        add(RESULTS, {"what": "step", "from": "store", "repeat": repeat} | rate | far | about)
        for name, found in (("disk", near), ("store", far)):
            shown = f"{found['wait_share']:.2%} of the step waits for data (first step: {found['first_wait_s']:.1f} s)"
            print(f"{name}: step {median(found['step_time_s']):.2f} s; {shown}", flush=True)


def starts(folder: Path, repeats: int, about: dict[str, str]) -> None:
    """Measures the start at step 0 and at a late step, in turn."""
    make_texts(folder / "many", 2000, 40 * SEQ_LEN)
    make_set(folder / "many", folder / "many set", folder / "many cache")
    config = DataConfig(source="shards", path=str(folder / "many set"), seq_len=SEQ_LEN)
    for repeat in range(repeats):
        for step in (0, LATE_STEP):
            before_s = time.perf_counter()
            with ShardSet(config) as shards:
                dataset = load(config, "train", 0, [shards])
                with Batches(dataset, global_size=32, rows=range(32), start_step=step, prefetch=4) as batches:
                    next(batches)
                    spent_s = time.perf_counter() - before_s
            line = {"what": "start", "step": step, "repeat": repeat, "shards": 2000, "first_batch_s": spent_s}
            add(RESULTS, line | about)
            print(f"step {step}: first batch after {spent_s:.3f} s", flush=True)
    for shards_count in (2000, 200_000):
        before_s = time.perf_counter()
        ShardOrder([1000] * shards_count, 0, 4)(LATE_STEP * 4096)
        spent_s = time.perf_counter() - before_s
        add(RESULTS, {"what": "order", "shards": shards_count, "first_example_s": spent_s} | about)
        print(f"{shards_count} shards: first example of an epoch after {spent_s:.4f} s", flush=True)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("steps", "starts"))
    options = parser.parse_args()
    about = machine() | {"command": shlex.join(["python", "-m", "benchmarks.data_tiers", *sys.argv[1:]])}
    about["load"] = f"{os.getloadavg()[0]:.1f}"  # other programs run on the machine
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "starts":
            steps(Path(folder), options.repeats, about)
        if options.only != "steps":
            starts(Path(folder), options.repeats, about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
