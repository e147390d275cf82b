"""The commands that README.md, CONTRIBUTING.md and the pages show: each block runs as printed, or says why it does not.

Blocks run in a copy of the repository, in the order of the page, so that a block finds the runs of earlier blocks.
The copy's models are small (`SMALL`), and words such as DIR have a value (`FILLED`). Markers stand before a block:

    <!-- not run here: REASON -->
    <!-- run by FILE -->                                             another test runs it
    <!-- file: NAME -->                                              the block is the content of this file
    <!-- in another terminal after step N; the first ends with C --> the block runs during the block before it
"""

import ast
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import fast_compile
from support.chat_cases import template, write_tokenizer
from support.emulating import NEEDED

from configs import command_line
from lab.benchmarks import compiled
from lab.records import recorded, replace

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ROOT / "training" / "flags.py"  # the options of train.py
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
NOT_RUN, BY, FILE, BESIDE = "not run here: ", "run by ", "file: ", "in another terminal after step "
KNOWN = re.compile(rf"{NOT_RUN}\S.+|{BY}tests/\w+\.py|{FILE}\S+|{BESIDE}\d+; the first ends with \d+")
# pages that take minutes: with the tests for releases only. Hugging Face, as long, runs every time
LONG = tuple(
    f"docs/{name}.md"
    for name in (
        *("clusters", "compression", "concepts", "configs", "elasticity", "emulation", "extending", "gpu", "planner"),
        *("replicas", "results/paper_tables", "results/planner", "strategies", "sweeps", "tpu", "training", "tutorial"),
    )
)
LIMIT_S = 900  # per block, on a busy machine; a run that hangs fails
FENCE, MARKER = re.compile(r" *```(\w*)$"), re.compile(r"<!-- (.+) -->$")
OUTPUT, DATA = "text", ("json", "bibtex")  # languages of blocks that are not commands
UNITS = {"B", "kB", "MB", "GB", "us", "ms", "s"}


# ----------------------------------------------------------------------------------------------------- the blocks


@dataclass(frozen=True)
class Block:
    """A block of code on a page: its first line's number, its language, its text, and the marker before it."""

    page: str
    line: int
    language: str
    text: str
    marker: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        return self.language in ("", "sh", "bash")

    @property
    def reason(self) -> str:
        """Why the block is not run by this test; empty if it is."""
        return self.marker if self.marker.startswith((NOT_RUN, BY)) else ""

    @property
    def file(self) -> str:
        """The name of the file whose content the block is, if it is one."""
        return self.marker.removeprefix(FILE) if self.marker.startswith(FILE) else ""

    def commands(self) -> list[list[str]]:
        """Returns the words of each line with a Python program, from `python` on; lines that end in \\ are joined."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines() if self.is_shell else []
        words = (shlex.split(re.sub(r"\[(.*?)\]", r" \1 ", line), comments=True) for line in lines if "python" in line)
        found = (
            (line, [i for i, word in enumerate(line) if Path(word).name in ("python", "python3")]) for line in words
        )
        return [line[starts[0] :] for line, starts in found if starts]


def blocks(page: str) -> Iterator[Block]:
    """Yields the blocks of a page, fenced or indented, but for the tables that lab.pages fills."""
    lines = re.sub(
        r"<!-- table:.*?<!-- end -->", lambda x: "\n" * x[0].count("\n"), (ROOT / page).read_text(), flags=re.S
    )
    lines = lines.splitlines()
    marker, i = "", 0
    while i < len(lines):
        fence, start = FENCE.match(lines[i]), i
        if fence:
            i = next(j for j in range(i + 1, len(lines)) if lines[j].strip() == "```")
            yield Block(page, start + 1, fence[1], _dedented(lines[start + 1 : i]), marker)
            marker = ""
        elif lines[i].startswith("    ") and not lines[i - 1].strip():
            while i + 1 < len(lines) and (lines[i + 1].startswith("    ") or not lines[i + 1].strip()):
                i += 1
            yield Block(page, start + 1, "", _dedented(lines[start : i + 1]), marker)
            marker = ""
        elif lines[i].strip():
            found = MARKER.match(lines[i].strip())
            marker = found[1] if found and found[1] != "end" else ""
        i += 1


def _dedented(lines: list[str]) -> str:
    width = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[width:] for line in lines).strip("\n") + "\n"


# -------------------------------------------------------------------------------------------------- the quick test


@functools.cache
def known_words(program: Path) -> set[str]:
    """Returns the words by which the package of a program declares its options: strings, and names of arguments."""
    found = {"config"}
    for file in (*program.parent.glob("*.py"), *([FLAGS] if program == ROOT / "train.py" else [])):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        found |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        found |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    return {word.lstrip("-") for word in found}


def mistakes(block: Block) -> Iterator[str]:
    """Yields each word of a block's commands that names no program, no config or no option."""
    for words in block.commands():
        program = Path()
        for before, word in pairwise(words):
            if before == "-m" or (Path(before).name.startswith("python") and word.endswith(".py")):
                found = importlib.util.find_spec(word) if before == "-m" else None
                program = Path(found.origin or "") if found else ROOT / word
                if found and found.submodule_search_locations:
                    program = Path(found.submodule_search_locations[0], "__main__.py")
                if not (program.exists() or word in files_of(block.page) or "NAME" in word):
                    yield f"{block.name}: there is no program {word}"
            elif word.startswith("--") and program.is_relative_to(ROOT) and program.exists():
                name = word[2:].partition("=")[0]
                if name and not name.startswith("config.") and name not in known_words(program):
                    yield f"{block.name}: {program.name} has no option --{name}"
        ours = [word for word in words if word.startswith("--config")]
        file = next((word.partition("=")[2].partition(":")[0] for word in ours if word.startswith("--config=")), "")
        if file.startswith("configs/") and "train.py" in words and "DIR" not in f"{ours}" and "..." not in f"{ours}":
            try:
                command_line.parse(["train.py", *ours])
            except ValueError as error:
                if file != "configs/X.py":
                    yield f"{block.name}: {error}"


def files_of(page: str) -> dict[str, str]:
    """Returns the texts of the files that a page shows, by their names."""
    return {block.file: block.text for block in blocks(page) if block.file}


def test_every_block_is_of_a_known_kind_and_names_what_exists() -> None:
    """Programs, options and configs of all blocks, also of those that do not run here."""
    found: list[str] = []
    for page in PAGES:
        inline = re.findall(r"`((?:\S*/)?python3? [^`]+)`", (ROOT / page).read_text())
        found += [mistake for text in inline for mistake in mistakes(Block(page, 0, "", text.replace("\n", " "), ""))]
        for block in blocks(page):
            found += mistakes(block)
            files = [file for file in re.findall(r"tests/\w+\.py", block.reason) if not (ROOT / file).exists()]
            found += [f"{block.name}: there is no {file}, which runs it" for file in files]
            if block.marker and not KNOWN.fullmatch(block.marker):
                found.append(f"{block.name}: {block.marker!r} is not a marker of a block")
            if block.language == "python" and not (block.reason or block.file):
                found.append(f"{block.name}: a block of Python has a marker with the name of its file")
            if not block.is_shell and block.language not in ("python", OUTPUT, *DATA):
                found.append(f"{block.name}: no block is in {block.language}")
    assert not found, "\n".join(found)


def test_make_knows_the_targets_of_the_pages() -> None:
    targets = {target for page in PAGES for target in re.findall(r"(?m)^ {4}make (\S+)", (ROOT / page).read_text())}
    assert targets >= {"train", "test"}
    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_make_takes_the_versions_tested_with_the_python_of_the_environment(tmp_path: Path) -> None:
    """For any PYTHON, because other versions would be installed next to the existing ones."""
    for folder, version in (("bin", "312"), ("another", "311")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "python").write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / folder / "python").chmod(0o700)
    show = ["make", "--no-print-directory", "--eval=show: ; @echo $(CONSTRAINTS)", "show"]
    for venv, chosen in (("", "constraints.txt"), ("new", "constraints-py311.txt")):
        words = [f"VENV={tmp_path / venv}", f"PYTHON={tmp_path / 'another' / 'python'}"]
        done = subprocess.run([*show, *words], cwd=ROOT, check=True, timeout=60, capture_output=True, text=True)
        assert done.stdout == f"requirements/{chosen}\n"


def test_make_keeps_the_python_of_an_environment(tmp_path: Path) -> None:
    """A newer Python would leave two in it: one as `python`, one as `pip`."""
    (tmp_path / "bin").mkdir()
    for name, text in (("python", "echo 311"), ("pip", ":"), ("newer", '[ "$1" != -m ] || echo made another')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o700)
    make = ["make", "--silent", f"VENV={tmp_path}", f"PYTHON={tmp_path / 'bin' / 'newer'}", f"{tmp_path}/installed"]
    done = subprocess.run(make, cwd=ROOT, check=True, timeout=60, capture_output=True, text=True)
    assert (tmp_path / "installed").exists() and "made another" not in done.stdout
    (tmp_path / "installed").unlink()
    (tmp_path / "bin" / "python").unlink()
    assert (
        "made another" in subprocess.run(make, cwd=ROOT, check=True, timeout=60, capture_output=True, text=True).stdout
    )


def test_every_config_of_the_compiled_record_is_accepted() -> None:
    for cell in compiled.cells():
        compiled.config_of(cell)


# ---------------------------------------------------------------------------------------------------- the copy

SMALLER = """

def _smaller(made):
    def get_config(*arg):
        config = made(*arg)
        {lines}
        return config

    return get_config


get_config = _smaller(get_config)
"""
DECODER = "config.model.update({'num_layers': 2, 'hidden': 32, 'intermediate': 64, 'num_heads': 4, 'num_kv_heads': 4})"
SMALL = {  # lines at the end of a config's get_config
    "base": ("config.num_steps = 10", "config.data.seq_len = 64"),
    "quickstart": (
        DECODER,
        "config.data.seq_len = 32",
        "config.num_steps = 60",
        "config.sample.length = 0",
        "config.elastic.silence_s = 10",
    ),
    "tiny": (DECODER, "config.data.seq_len = 32", "config.num_steps = 10"),
    "digits": ("config.num_steps = 20",),
}
SWEEP = """

sweep_batch = lambda: zip_(over("batch.global_size", (16, 32)), over("num_steps", (20, 10)))
sweep_lr = lambda: over("optimizer.learning_rate", (1e-3,))
"""
CHATS_ON_CPU = (
    "--config.num_steps=3 --config.optimizer.warmup_steps=0 --config.batch.global_size=8 --config.data.seq_len=128 "
    "--config.model.compute_dtype=float32"
)
FILLED: dict[str, dict[str, str]] = {  # words of a page and their replacements here, in this order
    "": {
        "--config=...": "--config=configs/quickstart.py",
        "configs/X.py[:arg]": "configs/quickstart.py",
        "configs/X.py": "configs/quickstart.py",
        "s3://BUCKET": "bucket",
        "HOST:PORT --num_processes=N --process_id=I": "localhost:29411 --num_processes=1 --process_id=0",
    },
    "docs/clusters.md": {"[--sizes=1k,64k,1m,16m]": "--sizes=1k,64k"},
    "docs/compression.md": {".inner_steps=25": ".inner_steps=20"},
    "docs/data.md": {
        "=FOLDER": "=bucket/raw",
        "s3://BUCKET/FOLDER": "bucket/raw",
        "folder:/data/wiki, split": "folder:bucket/raw, split",
        "runs/chat --config": f"runs/chat {CHATS_ON_CPU} --config",
    },
    "docs/emulation.md": {
        "launch.emulate --nodes": "launch.emulate --name=documented --nodes",
        " ctl [--name=NAME]": " ctl",
        " ctl ": " ctl --name=documented ",
        "-- PROGRAM": "-- true",
        "runs/four": "runs/four --config.num_steps=2000",  # so that it still runs when a node is lost
    },
    "docs/hugging_face.md": {
        "configs/X.py": "mine.py:DIR",
        "--config=... ": "--config=configs/quickstart.py --config.model.vocab_size=300 ",
        "--to_hugging_face=DIR --workdir=WORKDIR": "--to_hugging_face=runs/merged --workdir=runs/converted",
        "--to_peft=DIR --workdir=WORKDIR": "--to_peft=runs/peft --workdir=runs/fine_tune",
        "WORKDIR": "runs/converted",
    },
    "docs/planner.md": {
        "--nodes=16": "--nodes=2",
        "--nodes=8,16": "--nodes=1,2",
        "--search": "--search --compile=1",
    },
    "docs/results/planner.md": {"--compile=8": "--compile=1"},
    "docs/sweeps.md": {"--search=30": "--search=2"},
    "docs/training.md": {"=PATH": "=bucket/raw", "--workdir=DIR": "--workdir=runs/first"},
    "docs/tutorial.md": {
        "lab.probe  ": "lab.probe --sizes=1k,64k ",
        "runs/emulated": "runs/emulated --config.num_steps=1000",
        "runs/elastic": "runs/elastic --config.num_steps=150",
    },
}
# `make train` runs; other targets, which install or run tests, are only looked up.
PRELUDE = """
make() { if [ "$*" = train ]; then command make train; else command make --dry-run "$@"; fi; }
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with small configs, this environment, and a separate cache."""
    folder = tmp_path_factory.mktemp("documented") / "mics-jax"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "site", "__pycache__", "tests"))
    (folder / ".venv").symlink_to(sys.prefix)
    for file in (folder / "requirements.txt", *folder.glob("requirements/*")):
        os.utime(file, (0, 0))  # older than what is installed
    for name, lines in SMALL.items():
        with (folder / "configs" / f"{name}.py").open("a") as file:
            file.write(SMALLER.format(lines="\n        ".join(lines)))
    with (folder / "configs" / "sweeps" / "learning_rate_by_batch.py").open("a") as file:
        file.write(SWEEP)
    (folder / "bucket" / "raw").mkdir(parents=True)
    for number in range(40):
        (folder / "bucket" / "raw" / f"{number}.txt").write_text(f"file {number}: the quick brown fox\n" * 20)
    write_model(folder / "DIR")
    return folder


def write_model(folder: Path) -> None:
    """Writes a small Llama 3 with a tokenizer of 281 ids and a chat template, as Hugging Face publishes one."""
    source = ROOT / "tests" / "data" / "hugging_face" / "llama3"
    write_tokenizer(folder, template("llama 3", marks=False))
    config = json.loads((source / "config.json").read_text())
    config |= {"vocab_size": 288, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.resize(tensors[name], (288, 16))
    save_file(tensors, folder / "model.safetensors")


def filled(block: Block) -> str:
    """Returns the text of a block with values for its placeholders, without what is optional, of flags the command."""
    text = block.text
    of_page = FILLED.get(block.page, {})
    for word, value in (of_page | FILLED[""] | of_page).items():  # a page's words come first
        text = text.replace(word, value)
    text = re.sub(r" \[.*?\]", "", text).replace("--workdir=...", f"--workdir=runs/line_{block.line}")
    start = f"python train.py --config=configs/quickstart.py --workdir=runs/line_{block.line} "
    return f"{start}{text}" if text.startswith("--config.") else text


def start(block: Block, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts the commands of a block; returns the process, and the file with its output."""
    output = folder / "runs" / f"{block.name.replace('/', '_')}.txt"
    output.parent.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
        "MICS_JAX_CACHE": str(folder / "cache"),
        "XLA_FLAGS": fast_compile.FLAGS,
        "COLUMNS": "200",
    }
    command = ["timeout", "--kill-after=10", f"{LIMIT_S}", "bash", "-euo", "pipefail", "-c", PRELUDE + filled(block)]
    with output.open("wb") as file:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT), output


def check_end(block: Block, process: subprocess.Popen[bytes], output: Path, code: int = 0) -> None:
    said = process.wait()
    assert said == code, f"{block.name}: exit code {said}\n{filled(block)}\n{output.read_text()[-3000:]}"


def pattern(word: str) -> str:
    """Returns the pattern of a word of shown output: a number matches any, a unit any, `...` any text."""
    if word.strip("()") in UNITS:
        return r"\S+"
    return re.sub(r"(\\.){3}", ".*", re.sub(r"\d(\d|,\d|\\.\d)*", r"[\\d.,]+", re.escape(word)))


def check_output(block: Block, printed: str) -> None:
    """Checks that each line of a block was printed, but for the numbers in it."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for line in filter(None, block.text.splitlines()):
        wanted = " ".join(map(pattern, line.split()))
        assert any(re.search(wanted, other) for other in lines), f"{block.name}: nothing printed {line!r}\n{printed}"


def steps_done(block: Block, folder: Path) -> int:
    """Returns the number of steps that the run of a block has logged."""
    workdir = folder / re.findall(r"--workdir=(\S+)", filled(block))[-1]
    return max((file.read_bytes().count(b"\n") for file in workdir.rglob("metrics.jsonl")), default=0)


def run(block: Block, after: Block, folder: Path) -> str:
    """Runs a block, with the next block at the same time if that is for another terminal; returns its output."""
    process, output = start(block, folder)
    try:
        code = 0
        if after.marker.startswith(BESIDE):
            step, code = map(int, re.findall(r"\d+", after.marker))
            while process.poll() is None and steps_done(block, folder) < step:
                time.sleep(0.1)
            check_end(after, *start(after, folder))
        check_end(block, process, output, code)
    finally:
        process.terminate()  # of `timeout`, which ends its group
        process.wait()
    return output.read_text()


def run_page(page: str, folder: Path) -> None:
    """Writes the files of a page, runs its blocks without earlier runs, and compares the output that it shows."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    for name, text in files_of(page).items():
        (folder / name).write_text(text)
    shown, printed = [block for block in blocks(page) if not (block.reason or block.file)], ""
    for block, after in pairwise([*shown, Block(page, 0, "text", "", "")]):
        if block.language == OUTPUT:
            check_output(block, printed)
        elif block.is_shell and not block.marker.startswith(BESIDE):
            printed += run(block, after, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.release] * (page in LONG))
        for page in PAGES
        if any(not block.reason for block in blocks(page))
    ],
)
def test_the_blocks_of_a_page_run(page: str, copy: Path) -> None:
    if NEEDED and "-m launch.emulate" in (ROOT / page).read_text():
        pytest.skip(NEEDED)
    run_page(page, copy)


@pytest.mark.slow
def test_deleted_lines_of_a_record_are_computed_again(copy: Path) -> None:
    """As docs/results/paper_tables.md shows: lines of states, whose programs are not compiled."""
    record = copy / compiled.RESULTS.relative_to(ROOT)
    before = states(record)
    replace(record, (line for line in recorded(record) if line["kind"] != "state"))
    command = [sys.executable, "-m", "lab.benchmarks.compiled", "--only=state"]
    subprocess.run(command, cwd=copy, check=True, timeout=LIMIT_S)
    assert states(record) == before


def states(record: Path) -> dict[str, dict[str, Any]]:
    """Returns the lines of states by their names, without commit and machine."""
    lines = [line for line in recorded(record) if line["kind"] == "state"]
    return {line["name"]: {k: v for k, v in line.items() if k not in ("commit", "machine", "jax")} for line in lines}
