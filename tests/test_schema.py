"""The schema of the config: the text of each key, refused values, and that files and saved configs stay valid.

`data/configs.json` holds the configs of all files as they were saved before the schema existed: `base.py`
whole, and the differences of the other files. A run that was started then resumes only if they stay as they are; a new
key, or an intended change of a config, changes its line.
"""

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.config_files import values_of
from support.examples import example_methods  # noqa: F401 (fixture)
from support.running import ROOT
from support.tables import every_row

import models
from configs import base, command_line
from configs.schema import (
    GONE,
    MODELS,
    RENAMED,
    CheckpointConfig,
    Config,
    Key,
    OptimizerConfig,
    defaults,
    flat,
    known_keys,
    may_change,
    nearest,
    nested,
    sections,
    with_defaults,
)
from configs.schema.__main__ import page
from models.resnet import EXPANSION
from sharding.scopes import STRATEGIES
from training.resume import check_same_run

RECORD: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "configs.json").read_text())
# keys, or prefixes of keys, that do not change the trained parameters
MAY_CHANGE = (
    *("mesh.", "sharding.", "checkpoint.", "elastic.", "eval.", "sample.", "profile.", "ablation."),
    *("log_every", "sink", "batch.micro_size"),
    *(
        "model.remat",
        "model.unroll",
        "model.attention",
        "model.max_dropped",
        "optimizer.max_skipped",
        "data.prefetch",
        "data.path",
        "data.skip_bad",
        *("data.tokenizer_path", "data.add_bos", "data.eos_token"),
    ),
    *("data.pattern", "data.text_field", "data.cache_gb"),
)


ALL = [(kind, name) for kind in MODELS for name in known_keys(kind)]


def recorded(file: str) -> dict[str, Any]:
    """Returns the config of a file as it was, `{"a.b": value}`."""
    changes, start = RECORD[file], RECORD["configs/base.py"]
    if "model.kind" in changes:
        start = {name: value for name, value in start.items() if not name.startswith("model.")}
    return start | changes


def text(values: dict[str, Any]) -> str:
    """Returns JSON, in which 1, 1.0 and True differ."""
    return json.dumps(values, sort_keys=True)


def test_the_schema_needs_the_standard_library_only_and_reads_no_file() -> None:
    """Without site-packages it can be imported, and it opens nothing but modules."""
    code = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import configs.schema.__main__
print([name for name in opened if not name.endswith((".py", ".pyc", ".so"))])
print(sorted({name for name in sys.modules if name.startswith("configs.")} - set(sys.argv[1:])))
"""
    files = (ROOT / "configs" / "schema").glob("*.py")
    modules = ["configs.schema", *(f"configs.schema.{file.stem}" for file in files)]
    command = [sys.executable, "-S", "-B", "-c", code, *modules]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["[]", "[]", ""]


@pytest.mark.document
def test_every_key_has_a_user() -> None:
    """A config file or a benchmark sets it, published weights do, or a page shows it with a reason."""
    code = [*(ROOT / "configs").glob("**/*.py"), *(ROOT / "lab").glob("**/*.py"), *(ROOT / "lab").glob("**/*.toml")]
    code = [file for file in code if "schema" not in file.parts]
    pages = [file for file in (ROOT / "docs").glob("**/*.md") if file.name != "config.md"]
    words = {word for file in (*code, *pages) for word in re.findall(r"\w+", file.read_text())}
    assert sorted({name for _, name in ALL if name.rpartition(".")[2] not in words}) == []


def test_every_key_has_a_meaning_and_an_allowed_default() -> None:
    for kind, name in ALL:
        key = known_keys(kind)[name]
        assert len(key.meaning) > 5 and key.meaning == key.meaning.strip(" .") and "|" not in key.meaning, name
        assert key.type_name in ("bool", "int", "float", "str", "tuple of int"), name
        key.check(name, key.default)
        if key.type in (int, float):
            assert key.choices or key.range or name == "compression.block", name  # a multiple of 8


def test_defaults_lack_only_the_partition_size() -> None:
    values = defaults()
    with pytest.raises(ValueError, match="mics needs sharding.partition_size"):
        Config.from_dict(values)
    values["sharding"]["partition_size"] = 2
    assert Config.from_dict(values).optimizer == OptimizerConfig()


def wrong_values(key: Key) -> list[Any]:
    if key.type is str or key.type == str | int:
        wrong: list[Any] = [1.5] + ([f"{key.choices[-1]}_x", "", key.choices[0] * 2] if key.choices else [])
    else:
        wrong = ["some"]
    wrong += [True, None] if key.type is not bool else [1]
    wrong += [float("nan")] if key.type is float else [1.0] if key.type is int else []
    wrong += [bound for bound in (key.above, key.below) if bound is not None]
    wrong += [key.least - 1] if key.least is not None else []
    return wrong + ([key.most + 1] if key.most is not None else [])


def test_the_error_of_a_bad_choice_type_or_number_names_the_key() -> None:
    for kind, name in ALL:
        for value in wrong_values(known_keys(kind)[name]):
            if value != "tfds:NAME_x":  # is a name
                with pytest.raises(ValueError, match=rf"\A{name}=[^\n]*\Z"):
                    known_keys(kind)[name].check(name, value)


@pytest.mark.usefixtures("example_methods")
@every_row(
    ("changes", "message"),
    [
        ({"optimizer.nam": "sgd"}, "optimizer.nam is not a key; the nearest is optimizer.name"),
        ({"modell": {}}, "modell is not a key; the nearest is model"),
        *(
            (
                {"model.kind": kind},
                rf"^the model section has model.kind={kind} and .*kind=decoder; .* base.model\('{kind}'\)$",
            )
            for kind in ("resnet", "moe")
        ),
        ({"model.num_experts": 8}, r"not a key of model.kind=decoder, but of moe; .* base.model\('moe'\)$"),
        ({"model.kind": "decodr"}, "model.kind=decodr is not known; one of decoder, .*; did you mean decoder"),
        ({"model.kind": ["decoder"]}, "model.kind=.* must be a string, like 'decoder'"),
        ({"data.objective": "masked"}, "data.objective=masked does not fit model.kind=decoder; it must be causal"),
        ({"data.seq_len": 257}, "data.seq_len=257 is longer than model.max_len=256; raise model.max_len, or"),
        (
            {"compression.all_reduce": "one_bit_adam", "compression.warmup_steps": 100},
            "^compression.warmup_steps=100 must be less than num_steps=100: .*all_reduce=one_bit_adam .*end$",
        ),
        (
            {"compression.all_reduce": "one_bit_adam", "compression.warmup_steps": 10, "local_sgd.inner_steps": 10},
            "^compression.warmup_steps=10 must be less than 10, the meetings in num_steps=100 with one every 10 steps:",
        ),
        (
            {
                "compression.all_reduce": "one_bit_adam",
                "compression.warmup_steps": 10,
                "local_sgd.inner_steps": 10,
                "local_sgd.interval": "utilisation",  # for a slow link
            },
            "must be less than 10, the meetings in num_steps=100 with one every 10 steps:",
        ),
        (
            {"local_sgd.inner_steps": 2, "local_sgd.interval": "utilisation"},
            "chooses intervals from 2 to local_sgd.inner_steps, which is 2; set it to the longest that the loss allows",
        ),
        (
            {
                "num_steps": 1,
                "optimizer.warmup_steps": 1,
                "local_sgd.inner_steps": 4,
                "local_sgd.interval": "utilisation",
            },
            "^num_steps=1 ends before the first meeting of local_sgd.interval=utilisation; set it to 2 at least$",
        ),
        ({"optimizer.b1": "0.9"}, "optimizer.b1='0.9' must be a number, like 0.9"),
        ({"num_steps": True}, "num_steps=True must be a whole number, like 100"),
        ({"checkpoint.keep_best": 1, "eval.every": 30}, "keep_best=1 needs a validation at every checkpoint"),
        ({"checkpoint.keep_best": 1, "eval.every": 0}, "keep_best=1 needs a validation at every checkpoint"),
        ({"checkpoint.keep_best": 1, "checkpoint.every": 0}, "eval.every=50 and checkpoint.every=0; set both above 0"),
        ({"data.source": "folder"}, "data.path is empty"),
        ({"model.num_heads": 5}, "the nearest divisor is 4"),
    ],
)
def test_unknown_keys_and_bad_combinations_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.from_dict(nested(flat(defaults()) | {"sharding.partition_size": 2} | changes))


@every_row(("name", "today"), sorted(RENAMED.items()))
def test_a_renamed_key_is_read_in_saved_configs_and_named_on_the_command_line(name: str, today: str) -> None:
    value = "a" if isinstance(known_keys("decoder")[today].default, str) else False
    saved = flat(defaults()) | {name: value}
    del saved[today]
    read = flat(with_defaults(nested(saved)))
    assert read == flat(defaults()) | {today: value}
    with pytest.raises(ValueError, match=rf"^{name} is not a key any more; it is {today} now$"):
        command_line.parse(["train.py", f"--config={ROOT}/configs/quickstart.py", f"--config.{name}={value}"])


@every_row(("name", "value"), sorted(GONE.items()))
def test_a_key_that_is_gone_is_read_with_the_value_that_runs_have(name: str, value: Any) -> None:
    config = Config.from_dict(nested(flat(defaults()) | {"sharding.partition_size": 2}))
    saved = flat(config.to_dict()) | {name: value}
    check_same_run(nested(saved), config, Path("run"))
    now = f"every run is as with {name}={value}"
    with pytest.raises(ValueError, match=f"^run holds a run with {name}=other, but {now} now; finish it with"):
        check_same_run(nested(saved | {name: "other"}), config, Path("run"))
    with pytest.raises(ValueError, match=f"^{name} is not a key any more; {now}$"):
        command_line.parse(["train.py", f"--config={ROOT}/configs/quickstart.py", f"--config.{name}={value}"])


def test_missing_key_error_names_key_and_default() -> None:
    for name, key in known_keys("decoder").items():
        values = flat(defaults())
        del values[name]
        with pytest.raises(ValueError) as error:
            Config.from_dict(nested(values))
        assert str(error.value) == f"{name} is missing from the config; its default is {key.default!r}"


def test_resumable_keys_are_the_documented_ones() -> None:
    for kind, name in ALL:
        documented = name in MAY_CHANGE or f"{name.partition('.')[0]}." in MAY_CHANGE
        assert known_keys(kind)[name].resumable == may_change(name) == documented, name
    # keys of another version
    assert may_change("sharding.gone") and not may_change("optimizer.gone") and not may_change("gone")


FILES = sorted({name.partition(":")[0] for name in RECORD} - {"configs/base.py"})


def test_every_config_file_is_recorded_and_says_what_came_of_it() -> None:
    """Its command, its hardware, and a result that was obtained, or that it was not run."""
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "configs").rglob("*.py")}
    assert sorted(file for file, text in texts.items() if "\ndef get_config(" in text) == ["configs/base.py", *FILES]
    for file in FILES:
        about = ast.get_docstring(ast.parse(texts[file])) or ""
        assert f"--config={file}" in about or "python -m lab.benchmarks." in about, file
        assert "Hardware: " in about and ("Expected" in about or "Not run yet" in about), file


@every_row("file", RECORD)
def test_config_files_match_their_record(file: str) -> None:
    values = values_of(file)
    assert text(flat(values)) == text(recorded(file))
    if values["sharding"]["strategy"] == "mics" and not values["sharding"]["partition_size"]:
        values["sharding"]["partition_size"] = 2  # which the runs choose
    config = Config.from_dict(values)
    assert text(config.to_dict()) == text(values)
    assert Config.from_dict(json.loads(text(config.to_dict()))) == config
    assert config.model.kind == values["model"]["kind"] and type(config.model) is MODELS[config.model.kind]


@every_row("file", FILES)
def test_config_files_reject_unknown_arguments(file: str) -> None:
    with pytest.raises(ValueError, match=r"takes no :arg; remove :nonsense$|nonsense'? is not .*"):
        command_line.parse(["train.py", f"--config={ROOT / file}:nonsense"])


@every_row("word", ["--config.num_steps", "--noconfig.num_steps", "--config.data.path"])
def test_only_a_boolean_key_needs_no_value(word: str) -> None:
    with pytest.raises(ValueError, match=r"^--config\.([a-z._]+) needs a value, such as --config\.\1="):
        command_line.parse(["train.py", f"--config={ROOT}/configs/quickstart.py", word])


@every_row(
    ("words", "name", "value"),
    [
        (["--config.compression.delayed"], "compression.delayed", True),
        (["--config.compression.delayed", "--config.seed=1"], "compression.delayed", True),
        (["--noconfig.ablation.two_hop"], "ablation.two_hop", False),
        (["-config.ablation.two_hop=f"], "ablation.two_hop", False),
        (["--config.seed", "3"], "seed", 3),
        (["--config.seed=0x1F"], "seed", 31),
        (["--config.optimizer.learning_rate=1"], "optimizer.learning_rate", 1.0),
        (["--config.elastic.stall_s=inf"], "elastic.stall_s", float("inf")),
        (["--config.sharding.experts=2"], "sharding.experts", "2"),
        (["--config.sample.prompt=a=b, c"], "sample.prompt", "a=b, c"),
        (["--config.model.stage_blocks=(2, 1, 1)"], "model.stage_blocks", [2, 1, 1]),
    ],
)
def test_the_command_line_sets_a_value_of_the_key_s_type(words: list[str], name: str, value: Any) -> None:
    file = "digits" if name.startswith("model.") else "quickstart"
    found = flat(command_line.parse(["train.py", *words, f"--config={ROOT}/configs/{file}.py"]).to_dict())[name]
    assert (found, type(found)) == (value, type(value))


def test_typed_config_is_frozen() -> None:
    section = base.get_config()
    section.sharding.update(strategy="ddp")
    section.optimizer.clip_norm = 2
    config = base.typed(section)
    assert config.optimizer.clip_norm == 2.0 and config.checkpoint == CheckpointConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert len({config, base.typed(section), dataclasses.replace(config, seed=1)}) == 2


def test_choices_match_the_implementations() -> None:
    assert known_keys("decoder")["sharding.strategy"].choices == (*STRATEGIES, "mics", "custom")
    assert known_keys("resnet")["model.block"].choices == tuple(EXPANSION)
    assert known_keys("decoder")["model.kind"].choices == tuple(MODELS) == tuple(models.KINDS)
    assert [section.SECTION for section in sections("decoder").values()] == [*sections("decoder")]


@pytest.mark.document
def test_config_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == page(), "python -m configs.schema > docs/config.md"


@every_row(
    ("word", "meant"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("optimizer.wd", "optimizer.weight_decay"),
        ("optimizer.warmup", "optimizer.warmup_steps"),
        ("model.n_layers", "model.num_layers"),
        ("layers", "model.num_layers"),
        ("model.vocab", "model.vocab_size"),
        ("model.num_steps", "num_steps"),
        ("model.hiden", "model.hidden"),
        ("optimizer.beta1", "optimizer.b1"),
        ("data.seq_length", "data.seq_len"),
    ],
)
def test_the_nearest_key_is_the_one_that_is_meant(word: str, meant: str) -> None:
    """First a name that the word abbreviates, by initials or beginnings of its words, then a similar spelling."""
    assert nearest(word, [*known_keys("decoder")]) == meant
