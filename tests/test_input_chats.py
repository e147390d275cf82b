"""Conversations: ids and masks against transformers, whole in their rows, split by line; refusals."""

import json
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from support import chat_cases
from support.chat_cases import CHATML, messages, template, write_chats, write_tokenizer
from support.shard_texts import own_cache  # noqa: F401 (a fixture)
from support.tables import check_rows, every_row, raised

from configs.schema import DataConfig
from input_pipeline import Batches, MixedDataset, chat_template, load
from input_pipeline.chat_records import candidates, conversation_of
from input_pipeline.chat_template import ChatTemplate
from input_pipeline.chats import ChatDataset, encode, unused_fields
from input_pipeline.dataset import Split
from input_pipeline.tokenizers import HuggingFace

CASES = [json.loads(line) for line in chat_cases.FILE.read_text().splitlines()]
NEED_A_QUESTION = ("llama 3", "gemma")  # before an answer, or they do not begin as they should
LENGTH = 48
Message = dict[str, Any]


def user(content: str, **others: Any) -> Message:
    return {"role": "user", "content": content, **others}


def answer(content: str | None, **others: Any) -> Message:
    return {"role": "assistant", "content": content, **others}


def encoded_with(path: Path, turns: list[Message], loss_on: str = "assistant") -> tuple[np.ndarray, np.ndarray, int]:
    """Returns ids, mask and bytes of a conversation with the tokenizer and the template at a path."""
    return encode(turns, candidates(turns, loss_on), HuggingFace(path), ChatTemplate(path))


@every_row(
    ("name", "chat", "marks", "case"),
    ((case["template"], case["chat"], marks, case) for case in CASES for marks in (True, False)),
)
def test_ids_and_answers_are_those_of_transformers(
    name: str, chat: str, marks: bool, case: dict[str, Any], tmp_path: Path
) -> None:
    """Whether the template marks them by `{% generation %}`, which transformers needs, or not."""
    path = write_tokenizer(tmp_path, template(name, marks=marks))
    encoded = lambda: encoded_with(path, messages(chat))
    if "refused" in case:
        assert raised(encoded) == f"the chat template refuses it: {case['refused']}"
    elif chat == "assistant first" and name in NEED_A_QUESTION and not marks:
        assert any(text in raised(encoded) for text in ("mark the answers in the template", "no element 0"))
    else:
        ids, is_answer, _ = encoded()
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
    assert other.render([user("<é>", name=None)]) == '[{"role": "user", "content": "<é>"}]'
    assert one.identity != other.identity


def test_a_template_that_changes_earlier_turns_must_mark_the_answers(tmp_path: Path) -> None:
    """As templates do that leave out the reasoning of earlier turns."""
    shown = "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}"
    last = "{% for m in messages %}{{ m.role }}" + shown + "{% endfor %}"
    one = ChatTemplate(write_tokenizer(tmp_path, last))
    assert "message 3 in another way" in raised(lambda: one.spans(messages("three turns"), [2, 4, 6]))
    begins = ChatTemplate(write_tokenizer(tmp_path, last.replace("loop.last", "loop.last or loop.index < 5")))
    assert "message 6 in another way" in raised(lambda: begins.spans(messages("one turn") * 20, range(1, 40, 2)))
    assert one.spans(messages("one turn"), [1])[1] == [(len("userthe one?"), len("userthe one?assistantthe two"))]


def test_the_first_token_of_a_conversation_is_no_answer(tmp_path: Path) -> None:
    """Nothing predicts it."""
    path = write_tokenizer(tmp_path, "{% generation %}{{ messages[0].content }}{% endgeneration %}")
    ids, is_answer, text_bytes = encoded_with(path, messages("three turns"))
    assert is_answer.tolist() == [False] + [True] * (len(ids) - 1) and text_bytes == len("Is the user on?")


def test_a_long_conversation_is_rendered_in_time_that_grows_with_its_length(tmp_path: Path, monkeypatch: Any) -> None:
    """Not with the square of it, and with the spans that rendering every prefix gives."""
    rendered: list[int] = []
    render = chat_template.RENDERER.render

    def counted(source: str, variables: Any) -> str:
        rendered.append(len(variables["messages"]))
        return render(source, variables)

    monkeypatch.setattr(chat_template.RENDERER, "render", counted)
    turns = [{"role": "system", "content": "the"}]
    turns += [one for n in range(40) for one in (user(f"{n}"), answer(f" the {n} \n"), user("on"), answer("is"))]
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    for name in ("chatml", "llama 3", "words"):
        one = ChatTemplate(write_tokenizer(tmp_path, template(name, marks=False)))
        rendered.clear()
        text, spans = one.spans(turns, answers)
        assert sum(rendered) < 20 * len(turns)
        with monkeypatch.context() as patched:
            patched.setattr(chat_template, "LONG", len(turns))
            assert one.spans(turns, answers) == (text, spans) and len(spans) == 80


def test_weight_and_train_exclude_an_answer_from_the_loss(tmp_path: Path) -> None:
    turns = [user("the"), answer("on"), user("is"), answer("the two"), user("a"), answer("b")]
    for marks in (True, False):
        path = write_tokenizer(tmp_path, template("chatml", marks=marks))

        def counted(*masks: dict[str, Any], path: Path = path) -> list[str]:
            masked = [turn | mask for turn, mask in zip(turns, masks, strict=True)]
            ids, is_answer, size = encoded_with(path, masked)
            text = HuggingFace(path).decode(ids[is_answer])
            assert size == len(text)
            return text.split("<|im_end|>\n")[:-1]

        assert counted({}, {"weight": 1}, {}, {"train": True}, {}, {"weight": None}) == ["on", "the two", "b"]
        assert counted({}, {"weight": 0}, {}, {}, {}, {"train": False}) == ["the two"]
        assert counted({}, {"weight": 0, "train": True}, {}, {"weight": 0.0}, {}, {}) == ["b"]
        assert counted({}, {"weight": 0}, {}, {"weight": 0}, {}, {"weight": 0}) == []
    path = write_tokenizer(tmp_path, "{% generation %}{{ messages | tojson }}{% endgeneration %}")
    encoded = lambda: encoded_with(path, [*turns[:-1], answer("b", weight=0)])
    assert "marks 1 answers in 3 messages of the assistant" in raised(encoded)


LAST_REASONING = """{% for m in messages %}{{ m.role }}
{% if loop.last %}{{ m.reasoning }}{% endif %}{{ m.content | upper }}{{ m.calls }}{% endfor %}"""


def test_a_field_without_effect_is_counted(tmp_path: Path) -> None:
    """Whatever the template does not render, for each role; a field may be left out of earlier messages alone."""
    called = [user("a", name="x"), answer(None, calls=[1], reasoning="r"), user("b"), answer("c", reasoning="s")]
    rows: list[tuple[str, list[Message], dict[str, int]]] = [
        (CHATML, messages("three turns"), {}),
        (CHATML, [user("a", weight=1), answer("b", reasoning="r", id=7, none=None, weight=0)], {"weight of user": 1}),
        (CHATML, [user("a"), answer("b", reasoning="r")] * 20, {"reasoning of assistant": 20}),
        (LAST_REASONING, called, {"name of user": 1, "reasoning of assistant": 1}),
        (LAST_REASONING, [user("a"), answer("b", reasoning="s")] * 9, {"reasoning of assistant": 8}),
        (template("words", marks=False), [{"role": "system", "content": "z"}, *messages("one turn")], {}),
    ]
    rows[1][2].update({"reasoning of assistant": 1, "id of assistant": 1})
    rows[5][2].update({"content of system": 1})

    def check(source: str, turns: list[Message], expected: dict[str, int]) -> None:
        template = ChatTemplate(write_tokenizer(tmp_path, source))
        assert unused_fields(turns, candidates(turns, "assistant"), template) == expected

    check_rows(rows, check)


def test_a_token_of_spaces_at_the_edge_of_an_answer_counts(tmp_path: Path) -> None:
    """Also if the tokenizer's post-processor leaves the spaces out of a token's characters."""
    answers = "{% generation %}{{ m.content }}{% endgeneration %}"
    source = "{% for m in messages %}{{ m.role }}:" + answers + "|{% endfor %}"
    for trims in (True, False):
        path = write_tokenizer(tmp_path, source)
        made = tokenizers.Tokenizer.from_file(str(path))
        made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trims)
        made.save(str(path))
        ids, is_answer, _ = encoded_with(path, [answer("  b  ")])
        assert HuggingFace(path).decode(ids[is_answer]) == "  b  "


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


def written(file: Path, *records: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


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
    turns = conversation_of(record).messages
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
    """Not on the processes, on the step they begin with, on the file's name, on the day, or on keys of documents."""
    write_chats(tmp_path / "one" / "chats.jsonl")
    write_chats(tmp_path / "two" / "others.jsonl")
    one, two = dataset(tmp_path / "one" / "chats.jsonl"), dataset(tmp_path / "two", add_bos="always", eos_token="<s>")
    assert one.fingerprint == two.fingerprint
    with Batches(one, global_size=6, rows=range(6), start_step=0, prefetch=2) as batches:
        whole = [next(batches) for _ in range(4)]
    with Batches(two, global_size=6, rows=(1, 4, 7), start_step=3, prefetch=1) as batches:
        part = next(batches)
    for name in ("targets", "weights", "segments"):
        counts = whole[3]["weights"][[1, 4]] > 0 if name == "targets" else slice(None)
        np.testing.assert_array_equal(part[name][:2][counts], whole[3][name][[1, 4]][counts])
        assert not part[name][2].any()
    assert dataset(tmp_path / "two", seq_len=LENGTH + 1).fingerprint != one.fingerprint
    marked = " + '\\n' }}{% endgeneration %}"
    fewer = template("chatml", marks=True).replace(marked, " }}{% endgeneration %}{{ '\\n' }}")
    (tmp_path / "model" / "chat_template.jinja").write_text(fewer)
    other = dataset(tmp_path / "two")  # the same ids, of which fewer count
    assert (other[0]["weights"] <= two[0]["weights"]).all() and other.fingerprint != two.fingerprint


def test_where_conversations_end_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """ChatML of two turns is that of two conversations."""
    turns = [messages("one turn"), [user("a"), answer("b")]]
    prints = []
    for name, chats in {"one": [turns[0] + turns[1]], "two": turns}.items():
        data = dataset(written(tmp_path / f"{name}.jsonl", *({"messages": chat} for chat in chats)), "all")
        prints.append((data[0]["tokens"].tolist(), data.fingerprint))
    assert prints[0][0] == prints[1][0] and prints[0][1] != prints[1][1]


def test_the_summary_counts_what_a_row_does_not_hold(tmp_path: Path) -> None:
    long, hopeless = {"prompt": "short", "answer": "x" * 100}, {"prompt": "x" * 100, "answer": "short", "id": 1}
    bad = {"messages": [user("a"), answer("b", train=False)]}
    chats = [one | {"n": n} for n, one in enumerate([long, hopeless, long])]
    file = written(tmp_path / "chats.jsonl", *chats, bad)
    assert len(dataset(file, "all", seq_len=1000)) == 1
    data = dataset(file, "all")
    assert len(data) == 2 and data.filled == 1
    assert all(row["tokens"].tolist() == data[0]["tokens"].tolist() for row in (data[0], data[1]))
    assert data[0]["weights"].sum() == data.tokenizer.decode(data[0]["targets"]).count("x") > 20
    assert data.summary == (
        f"data.path {file}: 2 conversations, {2 * int(data[0]['weights'].sum())} of their {2 * (LENGTH + 1)} tokens "
        "are answers; 2 longer than a row were cut; 1 more had no answer within a row and were left out; 1 more had no "
        "answer of weight 1 and were left out; 1 answers have weight 0 or train false; without effect: n in 3 lines, "
        "id in 1 lines"
    )
    assert raised(lambda: dataset(file, "all", seq_len=4)).endswith("within data.seq_len=4 tokens; raise data.seq_len")
    named = dataset(written(tmp_path / "names.jsonl", long | {f"\x1b{n:02d}": 1 for n in range(25)}), "all").summary
    assert named.endswith(", \\x1b19 in 1 lines, 5 others") and "\x1b" not in named
    file = written(tmp_path / "bad.jsonl", bad)
    assert raised(lambda: dataset(file, "all")).endswith(
        "`weight`, `train` or data.loss_on excludes every answer; change one of them"
    )


def test_a_mixture_with_text(tmp_path: Path, corpus: Path) -> None:
    write_chats(tmp_path / "chats.jsonl")
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    mixture = f"3 chats:{tmp_path / 'chats.jsonl'}, 1 folder:{corpus}"
    data = load(config_of(Path(), tokenizer, source="stdlib_text", path="", mixture=mixture), "train", 0)
    assert isinstance(data, MixedDataset)
    chats = dataset(tmp_path / "chats.jsonl")
    is_chat = [(data[i]["tokens"] == chats.tokenizer.vocabulary["<|im_start|>"]).any() for i in range(64)]
    assert sum(is_chat) == 48 and data.summary == chats.summary


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_CALLS = "message 2 is an answer without content: the chat template does not render its tool_calls"
LINES: list[tuple[Any, str]] = [  # a line, and what an error says of it; "" for none
    ({"prompt": "a", "completion": "b"}, ""),
    ({"prompt": "a", "response": "b"}, ""),
    ({"prompt": "x", "messages": [user("a"), answer("b")]}, ""),
    ({"messages": [user("hello"), answer("b", reasoning_content="r")]}, ""),
    ("\ufeff" + json.dumps({"prompt": "a", "answer": "b"}), ""),
    ("{", ": it is not JSON lines, because an object continues on the next line; write one document per line; mend"),
    ("nonsense", ": it is not JSON: Expecting value"),
    ("[1]", ": it is not a JSON object, but of type list: write an object on each line; mend or remove it, or raise "),
    (json.dumps({"prompt": "a", "answer": "b"}).encode("utf-16"), ": it is not JSON: it is not UTF-8"),
    (
        {"text": 1},
        ": it has text, but the fields of no conversation (messages; conversations; instruction and output; ",
    ),
    ({}, ": it has nothing, but the fields of no "),
    ({"conversations": [{"from": "human", "value": "q"}]}, ": it has no answer: no message has the role assistant"),
    ({"conversations": [{"from": "bot", "value": "q"}]}, ": message 1 has the role 'bot'; known are "),
    ({"instruction": ["q"], "output": "a"}, ": message 1 has a content part of type 'list': only text is trained"),
    ({"messages": "a"}, ": its messages are no list of objects"),
    ({"messages": [{"role": "gpt", "content": ""}]}, ": message 1 has the role 'gpt'; known are system, "),
    ({"prompt": 3, "answer": "b"}, ": message 1 has a content of type int: write one string"),
    ({"prompt": [user("q")], "completion": "a", "answer": None}, ""),
    ({"messages": [user("q") | {"content": [{"type": "image_url"}]}, answer("a")]}, ": message 1 has a content part "),
    ({"prompt": "a", "answer": "b", "tools": "["}, ": its field tools is not JSON: "),
    ({"prompt": "a", "answer": "b", "tools": "5"}, ": its tools are no list of objects"),
    ({"messages": [user("a"), {"role": "tool", "content": None}]}, ": message 2 has a content of type NoneType"),
    ({"messages": [user("a")]}, ": it has no answer: no message has the role assistant"),
    ({"prompt": "\ufdd0", "answer": "b"}, ": a message has one of the noncharacters "),
    ({"prompt": "a \ud83d", "answer": "b"}, "is '\\ud83d', half of a surrogate pair: write the whole pair, or remove"),
    ({"prompt": "a", "answer": " "}, ": message 2 is an answer without content"),
    ({"messages": [user("a"), answer(None)]}, ": message 2 is an answer without content"),
    ({"messages": [user("a"), answer(None, tool_calls=[CALL])]}, f": {NO_CALLS}"),
    ({"messages": [user("a"), answer("", tool_calls=[CALL]), answer("b")], "tools": [{}]}, f": {NO_CALLS}"),
    ({"messages": [user("a"), answer("b", weight=0.5)]}, ": message 2 has the weight 0.5; it may be 0 or 1"),
    ({"messages": [user("a"), answer("b", train="no")]}, ": message 2 has train='no'; it may be true or false"),
]


@every_row(("line", "message"), LINES)
def test_a_bad_line_is_named_and_nothing_is_kept(line: Any, message: str, tmp_path: Path, cache_folder: Path) -> None:
    file = tmp_path / "chats.jsonl"
    line = line if isinstance(line, bytes) else line if isinstance(line, str) else json.dumps(line)
    first = json.dumps({"prompt": "good", "answer": "line"}).encode()
    file.write_bytes(first + b"\n\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    if message:
        text = raised(lambda: dataset(file, "all"))
        assert text.startswith(f"{file}, line 3") and message in text
        assert not [path for path in (cache_folder / "chats").iterdir() if path.suffix != ".lock"]
    else:
        assert len(conversations(dataset(file, "all"))) == 2
        for path in (cache_folder / "chats").iterdir():
            path.rename(tmp_path / f"{path.name}-{len([*tmp_path.iterdir()])}")


def test_an_answer_of_a_tool_call_alone_counts_if_the_template_renders_it(tmp_path: Path) -> None:
    """And the fields of a line that no template gets are named."""
    shown = CHATML.replace("message['content'] +", "(message.content or message.tool_calls | tojson) +")
    assert shown != CHATML
    write_tokenizer(tmp_path / "model", shown)
    turns = [user("a"), answer(None, tool_calls=[CALL]), {"role": "tool", "content": "3", "tool_call_id": "1"}]
    file = written(tmp_path / "chats.jsonl", {"messages": [*turns, answer("3 degrees")], "tools": [{"name": "f"}]})
    data = dataset(file, "all", seq_len=300)
    ((_, answers),) = conversations(data)
    assert answers == (json.dumps([CALL]), "3 degrees", "")
    assert data.summary.endswith("; without effect: tool_call_id of tool in 1 messages, tools in 1 lines")


def rewritten(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


LINE = json.dumps({"prompt": "a", "answer": "b"})
TEMPLATE = "model/chat_template.jinja"
FILES: list[tuple[Callable[[Path], object], str]] = [
    (rewritten("chats.jsonl", "\n"), "has 0 different conversations; training and validation need one each"),
    (rewritten("chats.jsonl", f"{LINE}\n{LINE}\n"), "has 1 different conversations; training and "),
    (lambda folder: (folder / "chats.jsonl").unlink(), "chats.jsonl does not exist; set it to a file or a folder"),
    (rewritten("model/tokenizer_config.json", "{}"), "/model has no chat template: data.source=chats "),
    (
        lambda folder: (folder / "model/tokenizer_config.json").rename(folder / TEMPLATE).write_text("{{ bos_token }}"),
        "/model has no tokenizer_config.json, and the chat template uses its bos_token",
    ),
    (rewritten(TEMPLATE, "{% x %}"), "cannot be read: Encountered unknown tag 'x'"),
    (rewritten(TEMPLATE, "{{ raise_exception('No!') }}"), "line 2: the chat template refuses it: No!"),
    (rewritten(TEMPLATE, "{{ messages.append(1) }}"), "line 2: the chat template refuses it: access to attribute"),
    (
        rewritten(TEMPLATE, "{{ messages }}{% generation %}{% endgeneration %}"),
        "line 2: it has no answer: the chat template makes no token of one",
    ),
]


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    def check(change: Callable[[Path], object], message: str) -> None:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        tokenizer = write_tokenizer(folder / "model", CHATML)
        (folder / "chats.jsonl").write_text(f"{LINE}\n{LINE.replace('b', 'c')}\n")
        change(folder)
        assert message in raised(lambda: load(config_of(folder / "chats.jsonl", tokenizer), "train", 0))

    check_rows(FILES, check)
    (tmp_path / "folder").mkdir()
    message = raised(lambda: dataset(tmp_path / "folder"))
    assert "folder has no file of a known format: .parquet, .jsonl, .ndjson, .json (" in message
