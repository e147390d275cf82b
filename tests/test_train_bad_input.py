"""What a user can get wrong: exit code 2 and one line that names the thing and what would work."""

import re
import socket
from pathlib import Path

import pytest
from support.mistakes import assert_matches, error_of
from support.running import ROOT, SMALL, arguments, run_here
from support.tables import check_rows

from input_pipeline.tokenizers import Bytes
from runtime.heartbeat import Heartbeat

THREE = ("--coordinator=localhost:1234", "--num_processes=2")
BRACKETS = r"^--coordinator=::1:1234 must be .* an IPv6 address needs brackets: \[::1\]:1234$"
FLAGS: list[tuple[tuple[str, ...], str]] = [  # after those of a run, and the line
    (("--config.model.hiden=3",), "model.hiden is not a key; the nearest is model.hidden$"),
    (("--config.model.hidden=many",), "^model.hidden='many' must be a whole number, like"),
    (
        ("--config.sharding.partition_size=3",),
        "^sharding.partition_size=3: .* of 3 devices does not fit 4 nodes of 2; sizes that divide: 1, 2, 4, 8$",
    ),
    (
        ("--config.mesh.num_cpu_devices=100000",),
        "^mesh.num_cpu_devices=100000 is more than a process can run; set it to 1024 at most",
    ),
    (("--wrkdir=x",), "wrkdir"),
    *(
        ((f"--{flag}",), f"^--{flag.partition('=')[0]} is not a flag; did you mean --config.{near}\\?$")
        for flag, near in (("num_steps=3", "num_steps"), ("lr=1", "optimizer.learning_rate"), ("model.hidden",) * 2)
    ),
    (("--num_proceses=2",), "num_proceses'. Did you mean: num_processes"),
    (
        ("--config=configs/elastic.py",),
        "^--config is given 2 times: \\S+quickstart.py, configs/elastic.py; give one of them$",
    ),
    (
        ("--config.model=decoder",),
        "^model is a section; set one of its keys, such as --config.model.kind=...$",
    ),
    (("--config.=3",), "^--config. lacks the name of a key, such as --config.seed$"),
    (("--workdir=",), "^--workdir= names no folder; give one, or leave"),
    (("word",), "unexpected argument 'word'"),
    (("--num_processes=two",), "num_processes"),
    *(((flag,), "give all three") for flag in (*THREE, "--process_id=0")),
    ((*THREE, "--process_id=2"), "--process_id=2 must be from 0 to 1"),
    (("--coordinator=here", THREE[1], "--process_id=0"), "HOST:PORT"),
    (("--coordinator=here:99999", THREE[1], "--process_id=0"), "HOST:PORT"),
    *(
        (("--coordinator=::1:1234", THREE[1], f"--process_id={i}"), BRACKETS) for i in (0, 1)
    ),  # jax would crash, or wait
]


def test_bad_flags_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_rows(FLAGS, lambda flags, said: assert_matches(error_of(capsys, *arguments(tmp_path), *flags), said))
    assert not (tmp_path / "metrics.jsonl").exists()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAX_COORDINATOR_BIND_ADDRESS", "::1:1234")
        said = error_of(capsys, *arguments(tmp_path), *THREE, "--process_id=0")
    assert_matches(said, "^JAX_COORDINATOR_BIND_ADDRESS=::1:1234.* brackets")


MINE = """
from configs import base
def get_config(arg=""):
    config = base.get_config()
    config.sharding.strategy, config.num_steps, config.data.source = "ddp", 1, "synthetic"
"""


def config_file(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"{MINE}{body}\n")
    return str(path)


def test_config_file_error_names_file_and_cause(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(body: str, message: str) -> None:
        tmp_path = tmp_path_factory.mktemp("row")
        path = config_file(tmp_path, body)
        assert_matches(error_of(capsys, f"--config={path}", f"--workdir={tmp_path / 'run'}"), message)

    check_rows(
        [
            ("    raise SystemExit(3)", r"^/\S+mine.py, line 6, `raise SystemExit\(3\)`: 3 \(SystemExit\)$"),
            ("del get_config", r"^/\S+mine.py: it lacks get_config\(\), which returns the config$"),
            ("    config.model.hiden = 3\n    return config", "model.hiden.*the nearest is model.hidden$"),
            ("    del config.model.hidden\n    return config", "model.hidden is missing"),
            ("    config.batch.global_size = '16'\n    return config", "batch.global_size"),
            ("    return None", "mine.py: get_config must return the config"),
            ("    return 1 / 0", "mine.py.*division"),
            ("    return (", r"^/\S+mine.py, line 6, `return \(`: '\(' was never closed \(SyntaxError\)$"),
            (
                "import missing_one",
                r"^/\S+mine.py, line 6, `import missing_one`: No module named .* \(ModuleNotFoundError\)$",
            ),
            ("    raise ValueError(f'mine.py:{arg}: there is none')", "^mine.py:: there is none$"),
            ("    raise ValueError('choose one')", r"^/\S+mine.py, line 6, `raise .*`: choose one \(ValueError\)$"),
        ],
        check,
    )


def test_a_vocabulary_too_small_is_told_before_anything_is_tokenised(
    corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def check(source: str) -> None:
        tmp_path = tmp_path_factory.mktemp("row")
        monkeypatch.setenv("MICS_JAX_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(Bytes, "document", lambda *_: pytest.fail("it tokenises"))
        data = {"data__source": source, "data__path": corpus} if source != "mixture" else {}
        data |= {} if data else {"data__mixture": f"1 folder:{corpus}, 1 shards:{corpus}"}
        args = arguments(tmp_path / "run", model__vocab_size=200, **data)
        assert run_here(*args) == 2
        assert capsys.readouterr().err == (
            "error: model.vocab_size=200 is less than the 256 ids of data.tokenizer=bytes; set model.vocab_size=256\n"
        )
        assert not (tmp_path / "cache").exists()

    check_rows([(source,) for source in ["folder", "shards", "mixture"]], check)


def test_missing_config_file_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("")
    rows = [
        ((), "^give --config=configs/NAME.py; experiments are .*quickstart"),
        (("--config=configs/qqq.py",), "configs/qqq.py: .*; experiments are .*quickstart"),
        (
            ("--config=mics_papers.py",),
            "^--config=mics_papers.py: there is no such file; did you mean configs/mics_paper.py\\?$",
        ),
        ((f"--config={tmp_path}",), str(tmp_path)),
        ((f"--config={empty}",), "empty.py: .*get_config"),
        ((f"--config={empty}", "--config.num_steps=3"), "empty.py: .*get_config"),
        (("--config", "missing.py:arg"), "^--config=missing.py: there is no such file; experiments are .*quickstart"),
        (("--config",), "config"),
    ]
    check_rows(rows, lambda flags, message: assert_matches(error_of(capsys, *flags), message))


def test_coordinator_port_in_use_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also by another run's coordinator, whose port gRPC would share."""
    for shared in (False, True):
        with socket.create_server(("", 0), reuse_port=shared) as other:
            coordinator = f"--coordinator=localhost:{other.getsockname()[1]}"
            message = error_of(capsys, *arguments(tmp_path), coordinator, "--num_processes=2", "--process_id=0")
        assert_matches(message, f"{coordinator}: process 0 cannot listen at port .* in use; give all .* another port$")


def test_config_flag_accepts_a_separate_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, *rest = arguments(tmp_path / "run", num_steps=0)
    for flag in ("--config", "-config"):
        assert error_of(capsys, flag, config.partition("=")[2], *rest).startswith("num_steps=0 must be")


def test_an_error_is_shown_whole_with_debug_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # debug shows the traceback
    assert run_here(*arguments(tmp_path, num_steps=0), "--debug") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("error: num_steps=0")

    # long error is shortened in the middle
    long = f"model.hidden=32 in {tmp_path}: {'f32[8,8] fusion(...)  ' * 1000}; set model.hidden=64"
    failures: list[str] = []
    end = Heartbeat.end
    monkeypatch.setattr(Heartbeat, "end", lambda self, code, why="": failures.append(why) or end(self, code, why))

    def fail(error: Exception, *args: str) -> str:
        code = run_here(*arguments(tmp_path), *args, make=lambda config: (_ for _ in ()).throw(error))
        assert code == (2 if isinstance(error, ValueError) else 1)
        return capsys.readouterr().err

    said = fail(ValueError(long))
    assert said.startswith(f"error: model.hidden=32 in {tmp_path}: ") and said.endswith("; set model.hidden=64\n")
    assert said.count("\n") == 1 and len(said) < 1000
    left_out = int(re.search(r"\[\.\.\. (\d+) characters, which --debug shows \.\.\.\]", said)[1])
    assert left_out > 15_000 and long in fail(ValueError(long), "--debug")
    assert long in fail(RuntimeError(long))  # of jax, for example: with its traceback
    assert len(failures) == 3 and all(len(failure) < 1000 for failure in failures)  # which all other processes print


def test_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # help shows flags and keys
    for flag in ("--help", "-h"):
        assert run_here(flag) == 0
        out = capsys.readouterr().out
        assert "python train.py --config=configs/quickstart.py --workdir=" in out and "[--config.a.b=value ...]" in out
        for name in ("config", "workdir", "coordinator", "num_processes", "process_id", "debug"):
            assert f"\n  --{name}" in out
        assert {f"--config.{key}" for key in SMALL} <= set(re.findall(r"--config\.[\w.]+", out))
        assert "\n  --config.optimizer.learning_rate=0.001\n" in out and "values by default" in out
    args = arguments(tmp_path / "run", "digits", seed=7)
    del args[3:-1]  # keys of another model
    assert run_here(args[0], "--help", *args[1:]) == 0
    out = capsys.readouterr().out
    assert "values in " in out and "digits.py (docs/config.md" in out and "\n  --config.seed=7\n" in out
    assert "\n  '--config.model.stage_blocks=(1, 1, 1)'\n" in out and "--config.model.positions" not in out
    assert not (tmp_path / "run").exists()
    assert "seeed is not a key; the nearest is seed" in error_of(capsys, "--help", args[0], "--config.seeed=3")

    # help works with an invalid config
    config = f"--config={ROOT}/configs/quickstart.py"
    assert run_here(config, "--config.sharding.strategy=zero3", "--help") == 0  # and a partition size of 2
    assert "\n  --config.sharding.strategy=zero3\n" in capsys.readouterr().out
