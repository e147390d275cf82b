"""Train steps compiled for TPU slices by one process: it imports jax once, and forks for each program."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planner.compile import FAST, MODULE, CompiledStep
from planner.targets import LIBTPU, NO_TPU
from sharding.mesh import MeshShape
from support.running import ROOT

FILE = f"--config={ROOT / 'tests' / 'support' / 'compiling.py'}"
Compile = Callable[[str, int, int, Mapping[str, Any]], CompiledStep]  # target, slices, chips of each, changes of keys


@contextmanager
def compiler(folder: Path) -> Iterator[Compile]:
    """Yields a function that compiles the small config of support/compiling.py; its files are in `folder`."""
    paths = [LIBTPU, ROOT, ROOT / "tests"]
    variables = {**os.environ, **NO_TPU, "PYTHONPATH": ":".join(map(str, paths)), "MICS_JAX_CACHE": str(folder)}
    (folder / "programs").mkdir()
    command = [sys.executable, "-m", "support.tpu_programs"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=variables, text=True, **pipes) as server:
        assert server.stdin and server.stdout

        def compiled(target: str, slices: int, chips: int, changes: Mapping[str, Any]) -> CompiledStep:
            changes = dict(changes)
            out = folder / str(len(list(folder.iterdir())))
            out.mkdir()
            words = [f"{FILE}:{changes.pop('model.kind', '')}", f"--target={target}", f"--nodes={slices}"]
            words += [f"--config.{key}={value}" for key, value in changes.items()]
            print(json.dumps([*words, f"--devices_per_node={chips}", f"--out={out}"]), file=server.stdin, flush=True)
            code = int(server.stdout.readline())
            assert code == 0, (out / "stderr.txt").read_text()[-3000:]
            answer = json.loads((out / "step.json").read_text())
            return CompiledStep(shape=MeshShape(**answer["mesh"]), **json.loads(Path(answer["program"]).read_text()))

        yield compiled
        server.stdin.close()


def main() -> None:
    """Compiles in a forked process for each line: the arguments of planner.compile. Prints its exit code."""
    import training.experiment  # noqa: F401 (imports jax, and no devices yet)
    from planner import compile as compiling

    for line in sys.stdin:
        words = json.loads(line)
        child = os.fork()
        if not child:
            out = words[-1].partition("=")[2]
            os.dup2(os.open(f"{out}/stderr.txt", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
            dump = f"--xla_dump_to={out} --xla_dump_hlo_module_re=^{MODULE}$"
            os.environ |= {"XLA_FLAGS": f"{FAST} {dump}", "TMPDIR": out}
            os._exit(compiling.main(["", *words]))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
