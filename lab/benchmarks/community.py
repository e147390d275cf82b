"""Measures this machine or cluster, and writes a record that you can send: one JSON file for results/community.

    python -m lab.benchmarks.community --config=configs/gpu_decoder.py:124m
    python -m lab.benchmarks.community --config=configs/quickstart.py --keys=sharding.partition_size=4,num_steps=20

First train.py trains with the config, then `lab.probe` measures the devices and the links. On several machines start it
once per process, by SLURM, Open MPI, Kubernetes or on Cloud TPU, or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES
and JAX_PROCESS_ID; process 0 writes the record. Without an accelerator the devices are virtual CPU devices, and the
record says so. The command adds no name of a host, user or folder; it refuses absolute paths in --config and --keys,
because the record repeats both. results/community/README.md explains the keys and how to send it. Exit codes: 0 done;
1 a program failed; 2 bad options, changed files, or a run without all numbers.
"""

import itertools
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from configs import command_line
from configs.schema import Config
from configs.schema.sections import MeshConfig
from lab.benchmarks.runner import (
    WORKDIR,
    check_code,
    config_words,
    options_of,
    program,
    shown,
    started,
    train,
    trainer,
)
from lab.probe.__main__ import parse_sizes
from lab.records import RESULTS
from runtime.files import atomic, run_directory
from runtime.launchers import FROM_ENVIRONMENT, find_place, virtual_devices
from training.metrics.environment import environment
from training.metrics.run_files import RunFiles

COMMUNITY = RESULTS / "community"
SIZES = "1k,64k,1m,16m,64m"  # that the probe sends
SKIPPED = 2  # steps at the start, which compile and connect
ABSOLUTE = re.compile(r"(?:^|[\s=:,'\"(\[{])[/~]")  # the start of an absolute path or of an address, in an option
NUMBER = (int, float)
# the keys of a record, each with the types of its value, or the keys of an object
FORMAT: dict[str, Any] = {
    "format": int,
    "date": str,
    "commit": str,
    "command": str,
    "system": {"platform": str, "cpu_count": int, "python": str, "versions": dict},
    "devices": {"platform": str, "kind": str, "count": int, "processes": int, "is_virtual": bool},
    "probe": {"device": dict, "levels": dict},
    "run": {
        "command": str,
        "steps": int,
        "parameters": int,
        "mesh": dict,
        "step_time_s": NUMBER,
        "step_times_s": list,
        "tokens_per_s": (*NUMBER, type(None)),  # null for images
        "examples_per_s": (*NUMBER, type(None)),  # null for text
        "intra_bytes": NUMBER,
        "inter_bytes": NUMBER,
        "losses": list,
    },
    "note": str,
}


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the record; returns the exit code."""
    options = options_of(
        __doc__,
        argv,
        config=("configs/quickstart.py", "the config to train with"),
        keys=("", "keys of the config to change, such as num_steps=20,sharding.partition_size=4"),
        sizes=(SIZES, "bytes that the probe sends"),
        note=("", "words about the machine, such as the cloud's name of it and its network"),
        out=(COMMUNITY, "folder of the record"),
    )
    about = environment({})
    if not about["git_commit"]:
        raise ValueError("the record names the commit: run this in a clone of the repository")
    check_code(about["git_commit"])
    parse_sizes(options.sizes)
    overrides = overrides_of(options.config, options.keys)
    mesh = config_of(options.config, overrides).mesh
    workdir = WORKDIR / "community"
    place = find_place(FROM_ENVIRONMENT)
    if place and place.process:  # process 0 removes and reads the files
        started(trainer(options.config, workdir, overrides))
        run_probe(mesh, options.sizes)
        return 0
    run, command = train(workdir, options.config, overrides)
    measured = json.loads((run_probe(mesh, options.sizes) / "probe.json").read_text())
    own = ["-m", "lab.benchmarks.community", f"--config={options.config}", f"--keys={options.keys}"]
    about |= {"command": shown([sys.executable, *own, f"--sizes={options.sizes}"])}
    record = record_of(about, measured, run, command, options.note)
    check(record)
    devices = record["devices"]
    words = f"{record['date'][:10]} {devices['count']} {devices['kind']} {run.name}"
    file = unused(options.out, re.sub(r"[^a-z0-9.]+", "-", words.lower()))
    atomic.replace(file, json.dumps(record, indent=1) + "\n")
    print(f"written: {file}")
    return 0


def overrides_of(config: str, keys: str) -> dict[str, Any]:
    """Returns the keys of the config that the run changes. ValueError for an absolute path in an option."""
    for option, text in (("config", config), ("keys", keys)):
        if ABSOLUTE.search(text):
            why = "has an absolute path or an address, which the record would show"
            raise ValueError(f"--{option}={text} {why}; give a path that is relative to the repository")
    changed = (pair.partition("=") for pair in keys.split(",") if pair)
    return {"num_steps": 30, "log_every": 1} | {key: value for key, _, value in changed}


def config_of(config: str, overrides: Mapping[str, Any]) -> Config:
    """Returns the config that trains. ValueError if its run would not give all numbers of a record."""
    found = command_line.parse(["train.py", *config_words(config, overrides)])
    if found.num_steps <= SKIPPED:
        why = f"the first {SKIPPED} steps are not timed"
        raise ValueError(f"--keys: num_steps={found.num_steps} is too small, because {why}; set {SKIPPED + 1} at least")
    if found.log_every != 1:
        raise ValueError(f"--keys: log_every={found.log_every}, but the record has every step; set 1, or leave it out")
    return found


def run_probe(mesh: MeshConfig, sizes: str) -> Path:
    """Measures the devices and links on which a config runs; returns the folder of probe.json."""
    per_node = mesh.devices_per_node
    if virtual_devices():
        per_node = 0  # as `use_devices` does
    elif mesh.num_cpu_devices:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(mesh.num_cpu_devices)
    out = WORKDIR / "community_probe"
    options = [f"--out={out}", f"--sizes={sizes}", f"--devices_per_node={per_node}"]
    print(started([sys.executable, "-m", "lab.probe", *options]))
    return out


def unused(folder: Path, stem: str) -> Path:
    """Returns the first of STEM.json, STEM-2.json, STEM-3.json and so on that is not in the folder."""
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(file for name in names if not (file := folder / f"{name}.json").exists())


def record_of(
    about: Mapping[str, Any], probe: Mapping[str, Any], run: RunFiles, command: str, note: str
) -> dict[str, Any]:
    """Returns the record of a run and a probe on the same devices. ValueError if the run's bytes are not known."""
    if problem := run.collectives.get("problem") or run.problems.get(run_directory.COLLECTIVES):
        remedy = "train with the versions in requirements/constraints.txt, or open an issue"
        raise ValueError(f"{run.run_dir / run_directory.COLLECTIVES}: {problem}; {remedy}")
    here = probe["environment"]
    rows = [row for row in run.rows if "loss" in row]
    timed = [row for row in rows if row["step"] > SKIPPED]
    rates = {name: [row[name] for row in timed if name in row] for name in ("tokens_per_s", "examples_per_s")}
    times = [row["step_time_s"] for row in timed]
    return {
        "format": 1,
        "date": about["date"],
        "commit": about["git_commit"],
        "command": about["command"],
        "system": {name: about[name] for name in FORMAT["system"]}
        | {"platform": f"{platform.system()}-{platform.machine()}"},  # without the kernel's build, which names a vendor
        "devices": {
            "platform": here["platform"],
            "kind": here["device_kind"],
            "count": here["devices"],
            "processes": here["processes"],
            "is_virtual": here["platform"] == "cpu" and here["devices"] > here["processes"],
        },
        "probe": {name: probe[name] for name in FORMAT["probe"]},
        "run": {
            "command": command,
            "steps": len(rows),
            "parameters": run.environment["num_params"],
            "mesh": run.environment["mesh"],
            "step_time_s": median(times),
            "step_times_s": times,
            **{name: median(values) if values else None for name, values in rates.items()},
            **{name: run.collectives[name] for name in ("intra_bytes", "inter_bytes")},
            "losses": [row["loss"] for row in rows],
        },
        "note": note,
    }


def check(record: Any) -> None:
    """ValueError with the place and the remedy if a record is not of the format."""
    check_keys(record, FORMAT, "the record")
    run = record["run"]
    if record["format"] != 1:
        raise ValueError(f"format is {record['format']}; this version reads 1")
    if not re.fullmatch("[0-9a-f]{40}", record["commit"]):
        raise ValueError(f"commit is {record['commit']!r}; give the 40 digits of `git rev-parse HEAD`")
    if not re.fullmatch(r"\w+-\w+", system := record["system"]["platform"]):
        raise ValueError(f"system.platform is {system!r}; give system and architecture alone, such as Linux-x86_64")
    if len(run["losses"]) != run["steps"] or len(run["step_times_s"]) != run["steps"] - SKIPPED:
        raise ValueError(f"run has {run['steps']} steps: losses has one number each, step_times_s {SKIPPED} fewer")
    values = [*run["losses"], *run["step_times_s"], run["intra_bytes"], run["inter_bytes"]]
    if not all(isinstance(x, NUMBER) and math.isfinite(x) and x >= 0 for x in values):
        raise ValueError("run has numbers that are negative or not finite; record a run that trains")
    if run["step_time_s"] != median(run["step_times_s"]):
        raise ValueError(f"run.step_time_s is {run['step_time_s']}, not the median of step_times_s")


def check_keys(value: Any, wanted: Mapping[str, Any], name: str) -> None:
    """ValueError unless a value is an object with the wanted keys alone, whose values have the wanted types."""
    if not isinstance(value, dict) or set(value) != set(wanted):
        raise ValueError(f"{name} must be an object with the keys {', '.join(wanted)}")
    for key, kind in wanted.items():
        if isinstance(kind, Mapping):
            check_keys(value[key], kind, key)
        elif not isinstance(value[key], kind) or (isinstance(value[key], bool) and kind is not bool):
            raise ValueError(f"{name}: {key} is {value[key]!r}, which has the wrong type")


if __name__ == "__main__":
    sys.exit(main())
