"""Conversations in the forms that other projects write: their tokens, and the answers in the loss."""

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from support.chat_cases import CHATML, write_tokenizer
from support.shard_texts import own_cache  # noqa: F401 (a fixture)
from support.tables import check_rows, raised

from configs.schema import DataConfig
from input_pipeline import chats, load
from input_pipeline.chat_records import conversation_of
from input_pipeline.chats import ChatDataset
from input_pipeline.dataset import Split
from input_pipeline.store import Item, LocalStore

TOOLS = [{"function": {"name": "f", "parameters": {"x": 1}}, "type": "function"}]  # in the order of pyarrow's structs
CALL = {"function": {"arguments": {"x": 1}, "name": "f"}, "type": "function"}
WITH_TOOLS = "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}" + CHATML.replace(
    "message['content'] +", "message.content + (message.tool_calls | tojson if message.tool_calls else '') +"
)
Record = dict[str, Any]


def turn(role: str, content: Any, **others: Any) -> Record:
    return {"role": role, "content": content, **others}


NO = turn("assistant", "no")
ASKED, ANSWERED = turn("user", "q"), turn("assistant", "a")
PARTS = [{"type": "text", "text": "q"}], [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]


def loaded(path: Path | str, model: Path, split: Split = "all", **changes: Any) -> ChatDataset:
    if not model.exists():
        write_tokenizer(model, WITH_TOOLS)
    settings: dict[str, Any] = {"source": "chats", "path": str(path), "seq_len": 300, "packing": "whole"}
    settings |= {"tokenizer": "hugging_face", "tokenizer_path": str(model / "tokenizer.json")}
    data = load(DataConfig(**settings | changes), split, 0)
    assert isinstance(data, ChatDataset)
    return data


def texts(data: ChatDataset) -> tuple[str, list[str]]:
    """Returns the text of the only conversation, and the pieces of it that the loss includes."""
    row = data[0]
    ids = np.append(row["tokens"], row["targets"][-1:])
    size = int((row["segments"] == 0).sum())
    is_trained = np.append(False, row["weights"] > 0)[:size]
    cuts = np.flatnonzero(np.diff(is_trained.astype(int))) + 1
    pieces = zip(np.split(ids[:size], cuts), np.split(is_trained, cuts), strict=True)
    return data.tokenizer.decode(ids[:size]), [data.tokenizer.decode(piece) for piece, has in pieces if has.all()]


def chatml(*turns: Record) -> str:
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in turns)


def end(text: str) -> str:
    return f"{text}<|im_end|>\n"


SYSTEM = turn("system", "s")
FORMS: list[tuple[Record, tuple[Record, ...], list[str]]] = [  # a record, its messages and its answers
    ({"messages": [turn("user", PARTS[0]), turn("assistant", PARTS[1])]}, (ASKED, ANSWERED), ["a"]),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, (ASKED, ANSWERED), ["a"]),
    (
        {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 1}]},
        (SYSTEM, ASKED, ANSWERED),
        ["a"],
    ),
    ({"conversations": [ASKED, ANSWERED]}, (ASKED, ANSWERED), ["a"]),
    ({"instruction": "q", "input": "", "output": "a"}, (ASKED, ANSWERED), ["a"]),
    ({"instruction": "q", "input": "b", "output": "a"}, (turn("user", "q\nb"), ANSWERED), ["a"]),
    ({"prompt": [ASKED], "completion": [ANSWERED]}, (ASKED, ANSWERED), ["a"]),
    (
        {"prompt": [ASKED, NO, ASKED], "answer": "a"},
        (ASKED, NO, ASKED, ANSWERED),
        ["a"],
    ),
    ({"prompt": "q", "completion": [ANSWERED, ASKED, ANSWERED]}, (ASKED, ANSWERED) * 2, ["a", "a"]),
    ({"prompt": "q", "completion": "a", "answer": None}, (ASKED, ANSWERED), ["a"]),
]


def test_forms_are_rendered_as_messages(tmp_path: Path) -> None:
    def check(record: Record, messages: tuple[Record, ...], answers: list[str]) -> None:
        file = tmp_path / f"{len([*tmp_path.iterdir()])}.jsonl"
        file.write_text(json.dumps(record) + "\n")
        data = loaded(file, tmp_path / "model")
        assert texts(data) == (chatml(*messages), [end(answer) for answer in answers])
        assert "without effect" not in data.summary

    check_rows(FORMS, check)


def test_tools_and_calls_are_given_to_the_template(tmp_path: Path) -> None:
    """Tools as a list or, as in columns of `datasets`, as its JSON; a template without tools makes them a line."""
    turns = [ASKED, turn("assistant", None, tool_calls=[CALL]), turn("tool", "3"), ANSWERED]
    shown = [ASKED, turn("assistant", json.dumps([CALL])), turn("tool", "3"), ANSWERED]
    for number, tools in enumerate((TOOLS, json.dumps(TOOLS))):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps({"messages": turns, "tools": tools}))
        text, answers = texts(loaded(file, tmp_path / "model"))
        assert text == f"[{json.dumps(TOOLS[0])}]{chatml(*shown)}" and answers == [end(json.dumps([CALL])), end("a")]
    write_tokenizer(tmp_path / "other", CHATML)
    file.write_text(json.dumps({"messages": [ASKED, ANSWERED], "tools": TOOLS}))
    data = loaded(file, tmp_path / "other")
    assert texts(data)[0] == chatml(ASKED, ANSWERED) and data.summary.endswith("; without effect: tools in 1 lines")


ODD: list[tuple[Record, str]] = [
    ({"conversations": [{"from": ["human"], "value": "q"}]}, "message 1 has the role ['human']; known are "),
    ({"conversations": "q"}, "its messages are no list of objects"),
    ({"messages": [ASKED, ANSWERED], "tools": "[" * 100_000}, "its field tools is not JSON: it has more than "),
    ({"messages": [ASKED, ANSWERED], "tools": "5"}, "its tools are no list of objects"),
    ({"messages": [turn("user", [{"type": "text"}])]}, "message 1 has a content part of type 'text' without"),
    ({"instruction": 1, "output": "a"}, "message 1 has a content part of type 'int': only text is trained"),
]


def test_odd_records_are_one_line() -> None:
    check_rows(ODD, lambda record, message: raised(lambda: conversation_of(record)).index(message))


RECORDS = [{"messages": [turn("user", f"{n}"), turn("assistant", f"the {n}")]} for n in range(40)]


def written(folder: Path, name: str, records: list[Record]) -> Path:
    """Writes a file in the format of its name."""
    folder.mkdir(exist_ok=True, parents=True)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pa.Table.from_pylist(records), folder / name)
        return folder / name
    lines = json.dumps(records) if ".json." in f"{name}." else "".join(json.dumps(one) + "\n" for one in records)
    if name.endswith(".zst"):
        with pa.output_stream(str(folder / name), compression="zstd") as file:
            file.write(lines.encode())
        return folder / name
    packers = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    pack = packers.get(name.rpartition(".")[2], lambda text: text)
    (folder / name).write_bytes(pack(lines.encode()))
    return folder / name


def test_every_format_has_the_same_conversations(tmp_path: Path) -> None:
    """In parquet with the nulls of fields that other rows have, which no template sees."""
    plain = loaded(written(tmp_path, "a.jsonl", RECORDS), tmp_path / "model")
    for name in ("a.jsonl.gz", "a.NDJSON", "a.json", "a.json.bz2", "a.jsonl.xz", "a.jsonl.zst", "a.parquet"):
        assert loaded(written(tmp_path, name, RECORDS), tmp_path / "model").fingerprint == plain.fingerprint, name
    other = {"messages": [turn("user", "x"), turn("assistant", "y", name="z", tool_calls=[CALL])], "tools": TOOLS}
    mixed = loaded(written(tmp_path, "b.parquet", [other, *RECORDS]), tmp_path / "model")
    assert mixed.fingerprint == loaded(written(tmp_path, "b.jsonl", [other, *RECORDS]), tmp_path / "model").fingerprint


SPLITS = ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test-00000-of-00001")


def test_a_folder_of_hugging_face_has_its_own_splits(tmp_path: Path) -> None:
    for number, name in enumerate(SPLITS):
        written(tmp_path / "set" / "data", f"{name}.parquet", RECORDS[10 * number : 10 * number + 10])
    (tmp_path / "set" / "dataset_infos.json").write_text("{}")
    rows: list[tuple[Split, list[Record]]] = [
        ("train", RECORDS[:20]),
        ("validation", RECORDS[20:30]),
        ("all", RECORDS[30:] + RECORDS[:30]),  # by the names of the files
    ]
    for split, records in rows:
        expected = loaded(written(tmp_path, f"{split}.jsonl", records), tmp_path / "model")
        assert loaded(tmp_path / "set", tmp_path / "model", split).fingerprint == expected.fingerprint


class Remote:
    """A store whose files have no path here."""

    can_list = True

    def __init__(self, folder: Path) -> None:
        self.url, self._local = "s3://bucket/set", LocalStore(str(folder))

    def list(self) -> list[Item]:
        return self._local.list()

    def item(self, name: str) -> Item:
        return self._local.item(name)

    def read(self, name: str) -> bytes:
        return self._local.read(name)

    def fetch(self, name: str, to: Path) -> Item:
        return self._local.fetch(name, to)

    def close(self) -> None: ...


def test_conversations_come_from_stores(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fetched files are removed, and a broken line is named by its URL."""
    written(tmp_path / "set", "a.jsonl.gz", RECORDS[:20])
    written(tmp_path / "set", "b.parquet", RECORDS[20:])
    local = loaded(tmp_path / "set", tmp_path / "model")
    monkeypatch.setattr(chats, "open_store", lambda path: Remote(tmp_path / "set"))
    assert loaded("s3://bucket/set", tmp_path / "model").fingerprint == local.fingerprint
    assert sorted(path.name for path in cache_folder.iterdir()) == ["chats", "rows"]
    written(tmp_path / "set", "a.jsonl.gz", [{"text": 1}])
    assert raised(lambda: loaded("s3://bucket/set", tmp_path / "model")).startswith(
        "s3://bucket/set/a.jsonl.gz, line 1: it has"
    )


LONG = [
    turn("user", "1"),
    turn("assistant", "x"),
    turn("user", "2"),
    turn("assistant", "y"),
    turn("tool", "3"),
    turn("assistant", "z"),
]
LOSS_ON: list[tuple[str, list[Record], list[str]]] = [  # data.loss_on, masks by message, pieces in the loss
    ("assistant", [{}] * 6, ["x", "y", "z"]),
    ("last", [{}] * 6, ["y", "z"]),
    ("last", [{}, {}, {}, {}, {}, {"weight": 0}], ["y"]),
    ("marked", [{}, {"train": True}, {}, {}, {}, {"weight": 1}], ["x", "z"]),
    ("marked", [{"weight": 1}, {"train": False}, {}, {}, {}, {}], ["1"]),
    ("user", [{}] * 6, ["1", "2"]),
    ("user,tool", [{}, {}, {"train": False}, {}, {}, {}], ["1", "3"]),
]


def test_one_key_says_which_messages_count(tmp_path: Path) -> None:
    marked = CHATML.replace("{{ message['content'] +", "{% generation %}{{ message['content'] +", 1)
    marked = marked.replace("{% else %}", "{% endgeneration %}{% else %}", 1)
    assert marked.count("generation") == 3
    write_tokenizer(tmp_path / "marked", marked)

    def check(loss_on: str, masks: list[Record], pieces: list[str]) -> None:
        file = tmp_path / f"{len([*tmp_path.iterdir()])}.jsonl"
        messages = [message | mask for message, mask in zip(LONG, masks, strict=True)]
        file.write_text(json.dumps({"messages": messages}))
        for model in ("model", "marked"):
            data = loaded(file, tmp_path / model, loss_on=loss_on)
            text, found = texts(data)
            assert text == chatml(*LONG) and found == [end(piece) for piece in pieces], model
            assert "without effect" not in data.summary

    check_rows(LOSS_ON, check)
    for loss_on in ("gpt", "user, assistant", "", "last,user"):
        with pytest.raises(ValueError, match="must be last, marked, or roles of system, developer, user, "):
            DataConfig(loss_on=loss_on)


def test_a_short_question_is_found_between_header_and_end(tmp_path: Path) -> None:
    for number, content in enumerate(("e", "user", "im_end", "|>", " a ")):
        file = written(tmp_path, f"{number}.jsonl", [{"messages": [turn("user", content), NO]}])
        assert texts(loaded(file, tmp_path / "model", loss_on="user"))[1] == [end(content)]


def test_a_template_that_changes_earlier_turns_can_train_the_last(tmp_path: Path) -> None:
    """As templates do that leave out the reasoning of earlier turns."""
    shown = "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}|"
    write_tokenizer(
        tmp_path / "last",
        "{% for m in messages %}{{ m.role }}:"
        + shown
        + "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    )
    file = written(tmp_path, "a.jsonl", [{"messages": LONG[:4]}])
    assert "in another way before other messages" in raised(lambda: loaded(file, tmp_path / "last"))
    assert texts(loaded(file, tmp_path / "last", loss_on="last")) == ("user:1|assistant:|user:2|assistant:y|", ["y|"])


def test_broken_conversations_are_skipped(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", [*RECORDS[:3], {"messages": []}, {"text": 1}])
    assert raised(lambda: loaded(file, tmp_path / "model", skip_bad=1)).startswith(
        "document 2 that is broken, more than "
    )
    data = loaded(file, tmp_path / "model", skip_bad=2)
    assert [line.partition(":")[0] for line in data.skipped] == [f"{file}, line 4", f"{file}, line 5"]
    clean = loaded(written(tmp_path, "b.jsonl", RECORDS[:3]), tmp_path / "model")
    assert clean.fingerprint == data.fingerprint
    assert raised(lambda: loaded(file, tmp_path / "model")).startswith(f"{file}, line 4: it has no answer: no message ")
    file = written(tmp_path, "c.jsonl", [{"text": 1}, {"text": 2}])
    message = f"data.path {file}: every conversation of a split is broken, such as {file}, line 1: it has text, "
    assert raised(lambda: loaded(file, tmp_path / "model", skip_bad=2)).startswith(message)
