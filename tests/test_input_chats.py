"""Conversations: ids and masks against transformers, whole in their rows, split by line; what is refused."""

import json
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import chat_cases
import numpy as np
import pytest
from chat_cases import messages, template, write_tokenizer
from shard_texts import own_cache  # noqa: F401 (a fixture)

from configs.schema import DataConfig
from input_pipeline import Batches, MixedDataset, load
from input_pipeline.chat_template import ChatTemplate
from input_pipeline.chats import ChatDataset, encode, messages_of
from input_pipeline.dataset import Split
from input_pipeline.tokenizers import HuggingFace

CASES = [json.loads(line) for line in chat_cases.FILE.read_text().splitlines()]
CHATML = template("chatml", marks=False)
NEED_A_QUESTION = ("llama 3", "gemma")  # before an answer, or they do not begin as they should
LENGTH = 48


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "prefixes"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['template']}: {case['chat']}")
def test_ids_and_answers_are_those_of_transformers(case: dict[str, Any], marks: bool, tmp_path: Path) -> None:
    """Whether the template marks them by `{% generation %}`, which transformers needs, or not."""
    path = write_tokenizer(tmp_path, template(case["template"], marks=marks))
    arguments = messages(case["chat"]), HuggingFace(path), ChatTemplate(path)
    if "refused" in case:
        with pytest.raises(ValueError) as refused:
            encode(*arguments)
        assert str(refused.value) == f"the chat template refuses it: {case['refused']}"
        return
    if case["chat"] == "assistant first" and case["template"] in NEED_A_QUESTION and not marks:
        with pytest.raises(ValueError, match=r"mark the answers in the template|refuses it: .* no element 0"):
            encode(*arguments)
        return
    ids, is_answer, _ = encode(*arguments)
    np.testing.assert_array_equal(ids, case["ids"])
    np.testing.assert_array_equal(is_answer, case["mask"])
    assert 0 < is_answer.sum() < len(ids)


def test_a_template_may_be_a_file_or_one_of_several_and_has_a_fixed_date(tmp_path: Path) -> None:
    dated = "{{ strftime_now('%d %b %Y') }} {{ messages[0]['content'] }}{{ mask_token }}{{ bos_token }}"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": dated}]
    token = {"content": "<s>", "lstrip": False}
    path = write_tokenizer(tmp_path, "", chat_template=several, bos_token=token, mask_token=None)
    one = ChatTemplate(path)
    assert one.render(messages("one turn")) == "01 Jan 2026 the one?<s>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}")
    other = ChatTemplate(path)
    assert other.render([{"role": "user", "content": "<é>", "name": None}]) == '[{"role": "user", "content": "<é>"}]'
    assert one.identity != other.identity


def test_the_sandbox_keeps_templates_from_the_program(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "{{ messages.append(1) }}{{ raise_exception.__globals__ }}")
    with pytest.raises(ValueError, match="the chat template refuses it: access to attribute 'append'"):
        ChatTemplate(path).render(messages("one turn"))


def test_a_template_that_changes_earlier_turns_must_mark_the_answers(tmp_path: Path) -> None:
    """As templates do that leave out what a model thought in earlier turns."""
    shown = "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}"
    last = "{% for m in messages %}{{ m.role }}" + shown + "{% endfor %}"
    path = write_tokenizer(tmp_path, last)
    with pytest.raises(ValueError, match=r"renders message 3 in another way .*: mark the answers .*endgeneration %}"):
        ChatTemplate(path).answers(messages("three turns"))
    assert ChatTemplate(path).answers(messages("one turn"))[1] == [
        (len("userthe one?"), len("userthe one?assistantthe two"))
    ]


def test_the_first_token_of_a_conversation_is_no_answer(tmp_path: Path) -> None:
    """Nothing predicts it."""
    path = write_tokenizer(tmp_path, "{% generation %}{{ messages[0].content }}{% endgeneration %}")
    ids, is_answer, text_bytes = encode(messages("three turns"), HuggingFace(path), ChatTemplate(path))
    assert is_answer.tolist() == [False] + [True] * (len(ids) - 1) and text_bytes == len("Is the user on?")


def test_records_of_prompt_and_answer() -> None:
    wanted = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name in ("answer", "completion", "response"):
        assert messages_of({"prompt": "a", name: "b", "id": 3}) == (wanted, ["id"])
    assert messages_of({"prompt": "x", "messages": wanted}) == (wanted, ["prompt"])


def write_chats(file: Path, count: int = 60) -> list[dict[str, Any]]:
    """Writes conversations of different lengths, one twice, and returns them."""
    records = []
    for number in range(count):
        turns = [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": "the" * (number % 5)}]
        records.append(
            {"messages": turns * (1 + number % 2)} if number % 3 else {"prompt": "on", "answer": f"{number}"}
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n\n" for record in [*records, records[0]]))
    return [*records, records[0]]


def config_of(chats: Path, vocabulary: Path, **changes: Any) -> DataConfig:
    settings = {"source": "chats", "path": str(chats), "seq_len": LENGTH, "packing": "whole"}
    settings |= {"tokenizer": "hugging_face", "tokenizer_path": str(vocabulary)}
    return DataConfig(**settings | changes)


def dataset(path: Path, split: Split = "train", **changes: Any) -> ChatDataset:
    tokenizer = path.parent / "model"
    if not tokenizer.exists():
        write_tokenizer(tokenizer, CHATML)
    found = load(config_of(path, tokenizer / "tokenizer.json", **changes), split, 0)
    assert isinstance(found, ChatDataset)
    return found


def conversations(data: ChatDataset) -> Counter[tuple[str, tuple[str, ...]]]:
    """Returns the conversations of all rows: text, and the pieces whose next token counts."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for row in (data[i] for i in range(len(data))):
        for number in range(row["segments"].max() + 1):
            here = row["segments"] == number
            ids, weights = row["tokens"][here], row["weights"][here]
            text = data.tokenizer.decode(ids)
            if text.startswith("<|im_start|>"):
                answers = row["targets"][here][weights > 0]
                found[text, tuple(data.tokenizer.decode(answers).split("<|im_end|>\n"))] += 1
            else:  # padding
                assert set(ids) <= {data.tokenizer.separator} and not weights.any()
    return found


def in_rows(record: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Returns a conversation as ChatML, and its answers."""
    turns, _ = messages_of(record)
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    return text, (*(turn["content"] for turn in turns if turn["role"] == "assistant"), "")


def test_rows_hold_whole_conversations_and_count_their_answers(tmp_path: Path) -> None:
    records = write_chats(tmp_path / "chats.jsonl")
    held_out = [int(sha256(json.dumps(record).encode()).hexdigest(), 16) for record in records]
    hashes = [int(sha256(f"{one:064x}".encode()).hexdigest()[:16], 16) / 2**64 for one in held_out]
    for split in ("train", "validation"):
        data = dataset(tmp_path / "chats.jsonl", split)
        chosen = [r for r, one in zip(records, hashes, strict=True) if (one < 0.05) == (split == "validation")]
        assert 0 < len(chosen) < len(records)
        assert conversations(data) == Counter(map(in_rows, chosen))
        rows = [data[i] for i in range(len(data))]
        answers, tokens = sum(row["weights"].sum() for row in rows), data.filled * len(rows) * (LENGTH + 1)
        assert data.summary.endswith(
            f": {len(chosen)} conversations, {answers:.0f} of their {tokens:.0f} tokens are answers"
        )
        lengths = [len("".join(f"{text}<|im_end|>\n" for text in in_rows(record)[1][:-1])) for record in chosen]
        assert data.bytes_per_token == pytest.approx(sum(lengths) / answers)
        for row in rows:
            assert {name: (x.dtype, x.shape) for name, x in row.items()} == {
                name: (array.dtype, array.shape) for name, array in data.row_arrays.items()
            }
            np.testing.assert_array_equal(row["targets"][:-1], row["tokens"][1:])
            assert row["weights"].any()
    assert conversations(dataset(tmp_path / "chats.jsonl", "all")) == Counter(map(in_rows, records))


def test_batches_depend_on_nothing_but_seed_and_step(tmp_path: Path) -> None:
    """Not on the processes, on the step they begin with, on the file's name, or on the day."""
    write_chats(tmp_path / "one" / "chats.jsonl")
    write_chats(tmp_path / "two" / "others.jsonl")
    one, two = dataset(tmp_path / "one" / "chats.jsonl"), dataset(tmp_path / "two")
    assert one.fingerprint == two.fingerprint
    with Batches(one, global_size=6, rows=range(6), start_step=0, prefetch=2) as batches:
        whole = [next(batches) for _ in range(4)]
    with Batches(two, global_size=6, rows=(1, 4, 7), start_step=3, prefetch=1) as batches:
        part = next(batches)
    for name, values in part.items():
        np.testing.assert_array_equal(values[:2], whole[3][name][[1, 4]])
        assert not values[2].any()
    assert dataset(tmp_path / "two", seq_len=LENGTH + 1).fingerprint != one.fingerprint
    marked = " + '\\n' }}{% endgeneration %}"
    fewer = template("chatml", marks=True).replace(marked, " }}{% endgeneration %}{{ '\\n' }}")
    (tmp_path / "model" / "chat_template.jinja").write_text(fewer)
    other = dataset(tmp_path / "two")  # the same ids, of which fewer count
    np.testing.assert_array_equal(other[0]["tokens"], two[0]["tokens"])
    assert other.fingerprint != two.fingerprint


def test_where_conversations_end_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """ChatML of two turns is that of two conversations."""
    turns = [messages("one turn"), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    prints = []
    for name, chats in {"one": [turns[0] + turns[1]], "two": turns}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        data = dataset(tmp_path / f"{name}.jsonl", "all")
        prints.append((data[0]["tokens"].tolist(), data.fingerprint))
    assert prints[0][0] == prints[1][0] and prints[0][1] != prints[1][1]


def test_long_conversations_are_cut_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    long = {"prompt": "short", "answer": "x" * 100}
    hopeless = {"prompt": "x" * 100, "answer": "short", "id": 1}
    file.write_text("".join(json.dumps(one | {"n": n}) + "\n" for n, one in enumerate([long, hopeless, long])))
    assert len(dataset(file, "all", seq_len=1000)) == 1
    data = dataset(file, "all")
    assert len(data) == 2 and data.filled == 1
    assert all(row["tokens"].tolist() == data[0]["tokens"].tolist() for row in (data[0], data[1]))
    assert data[0]["weights"].sum() == data.tokenizer.decode(data[0]["targets"]).count("x") > 20
    assert data.summary == (
        f"data.path {file}: 2 conversations, {2 * int(data[0]['weights'].sum())} of their {2 * (LENGTH + 1)} tokens "
        "are answers; 2 longer than a row were cut; 1 more had no answer within a row and were left out; fields not "
        "read: id, n"
    )
    with pytest.raises(ValueError, match=r"no answer begins within data.seq_len=4 tokens; raise data.seq_len\Z"):
        dataset(file, "all", seq_len=4)


def test_a_mixture_with_text(tmp_path: Path, corpus: Path) -> None:
    write_chats(tmp_path / "chats.jsonl")
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    mixture = f"3 chats:{tmp_path / 'chats.jsonl'}, 1 folder:{corpus}"
    data = load(config_of(Path(), tokenizer, source="stdlib_text", path="", mixture=mixture), "train", 0)
    assert isinstance(data, MixedDataset)
    chats = dataset(tmp_path / "chats.jsonl")
    is_chat = [(data[i]["tokens"] == chats.tokenizer.vocabulary["<|im_start|>"]).any() for i in range(64)]
    assert sum(is_chat) == 48 and data.summary == chats.summary


LINE = json.dumps({"prompt": "a", "answer": "b"})
GPT = '{"messages": [{"role": "gpt", "content": ""}]}'
ASKED = '{"messages": [{"role": "user", "content": "a"}]}'
BAD = {
    "no JSON": ("{", " is not JSON: .*"),
    "no object": ("[1]", " is not a JSON object, but of type list; write each conversation as an object on a line .*"),
    "other fields": (
        '{"text": 1}',
        ": it has text, but neither messages nor prompt and answer, completion or response",
    ),
    "no field": ("{}", ": it has nothing, but neither .*"),
    "no list": ('{"messages": "a"}', ": its messages are no list of objects"),
    "another role": (GPT, ": message 1 has the role 'gpt'; known are system, .*"),
    "no text": ('{"prompt": 3, "answer": "b"}', ": message 1 has a content of type int, and no text"),
    "no answer": (ASKED, ": it has no answer: no message has the role assistant"),
    "a mark": (LINE.replace("a", "\ufdd0", 1), ": a message has one of the noncharacters .*"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_named_and_nothing_is_kept(line: str, message: str, tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(f"{LINE}\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"\A{tmp_path}/chats.jsonl, line 3{message}\Z"):
        dataset(tmp_path / "chats.jsonl", "all")
    assert [path.suffix for path in (cache_folder / "chats").iterdir()] == [".lock"]


def rewritten(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


TEMPLATE = "model/chat_template.jinja"
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (rewritten("chats.jsonl", "\n"), "has 0 different conversations; training and validation need one each"),
    "one line": (rewritten("chats.jsonl", f"{LINE}\n{LINE}\n"), "has 1 different conversations; training and .*"),
    "missing": (lambda folder: (folder / "chats.jsonl").unlink(), "does not exist; set it to a file of JSON lines, .*"),
    "no template": (
        rewritten("model/tokenizer_config.json", "{}"),
        "/model has no chat template: data.source=chats .*",
    ),
    "nobody names its tokens": (
        lambda folder: (folder / "model/tokenizer_config.json").rename(folder / TEMPLATE).write_text("{{ bos_token }}"),
        "/model has no tokenizer_config.json, and the chat template uses its bos_token",
    ),
    "no such syntax": (rewritten(TEMPLATE, "{% x %}"), "the chat template in .* cannot be read: .*'x'.*"),
    "refuses": (rewritten(TEMPLATE, "{{ raise_exception('No!') }}"), "line 2: the chat template refuses it: No!"),
    "shows no answer": (
        rewritten(TEMPLATE, "{% generation %}{% endgeneration %}a"),
        "line 2: it has no answer: the chat template makes no token of one",
    ),
}


@pytest.mark.parametrize(("change", "message"), FILES.values(), ids=FILES.keys())
def test_bad_files_are_one_line(change: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(f"{LINE}\n{LINE.replace('b', 'c')}\n")
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    change(tmp_path)
    with pytest.raises(ValueError, match=message + r"\Z"):
        load(config_of(tmp_path / "chats.jsonl", tokenizer), "train", 0)


def test_a_folder_without_chats_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"folder has no files that end with .jsonl\Z"):
        dataset(tmp_path / "folder")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": ""}, "data.path is empty: data.source='chats' needs a file of conversations, one JSON object per .*"),
        (
            {"tokenizer": "bytes", "tokenizer_path": ""},
            "'bytes': .* needs data.tokenizer='hugging_face', a tokenizer.*",
        ),
        ({"packing": "documents"}, "data.packing='documents': data.source='chats' needs data.packing='whole', rows .*"),
        ({"objective": "masked"}, "data.objective='masked': data.source='chats' needs data.objective='causal', .*"),
        ({"pattern": "*"}, r"data.pattern is '\*' but data.source='chats' reads no files by name: .*"),
    ],
)
def test_settings_that_do_not_go_with_chats(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message + r"\Z"):
        config_of(Path("chats.jsonl"), Path("tokenizer.json"), **changes)
