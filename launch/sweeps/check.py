"""`check_runs`: checks the runs of a sweep, beyond keys and values, before the first one starts."""

import json
import subprocess
import sys
from collections.abc import Iterable

from launch.sweeps.plan import ROOT, Run, describe
from launch.sweeps.records import is_finished


def check_runs(runs: Iterable[Run]) -> None:
    """Raises ValueError for a run that the emulator, or train.py on its devices, would refuse.

    The devices are known on an emulated cluster and with mesh.num_cpu_devices. The program that checks them loads jax,
    which takes some seconds for all runs together.
    """
    runs = list(runs)
    for run in {tuple(run.emulate.items()): run for run in runs if run.emulate}.values():
        _check_emulated(run)
    known = [(run, devices) for run in runs if not is_finished(run) and (devices := _devices(run))]
    if not known:
        return
    requests = [
        {"argv": [word for word in run.train_command[2:] if not word.startswith("--workdir=")], **devices}
        for run, devices in known
    ]
    done = subprocess.run(
        [sys.executable, "-m", "training.check"],
        cwd=ROOT,
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"the runs could not be checked: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    for (run, _), complaint in zip(known, json.loads(done.stdout.splitlines()[-1]), strict=True):
        if complaint:
            raise ValueError(f"{describe(run.overrides) or 'the base config'}: {complaint}")


def _check_emulated(run: Run) -> None:
    """Raises ValueError for options that the emulator refuses.

    The emulator is a separate program, not imported here.
    """
    options = run.command[: run.command.index("--")]
    done = subprocess.run([*options, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "no output").splitlines()[-1].removeprefix("error: ")
        raise ValueError(f"{describe(run.overrides) or 'the base config'}: {said}")


def _devices(run: Run) -> dict[str, object] | None:
    """Returns the numbers of nodes and of devices per node: zeros if the config sets them, None if they are unknown."""
    if run.emulate:
        return {name: int(run.emulate[name]) for name in ("nodes", "devices_per_node")}
    return {"nodes": 0, "devices_per_node": 0} if run.values["mesh.num_cpu_devices"] else None
