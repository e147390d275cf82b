"""The page of the papers' tables: its parts, `--only`, and what it says of names and records that are not there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paper import __main__ as program
from paper import compression, page, scopes, zero, zeropp
from paper.page import PARTS, document, named, replaced
from paper.records import Records, read_records

pytestmark = pytest.mark.document

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


@pytest.fixture(scope="module")
def records() -> Records:
    return read_records(RESULTS)


def test_only_the_named_parts_are_written_again(records: Records) -> None:
    text = document(records)
    changed = text.replace("# ", "#  ").replace("ZeRO", "Zero")
    assert replaced(text, [*PARTS], records) == text
    one = replaced(changed, ["zero"], records)
    part = text[text.index("<!-- zero -->") : text.index("<!-- end of zero -->")]
    assert part in one and one.replace(part, "") == changed.replace(
        changed[changed.index("<!-- zero -->") : changed.index("<!-- end of zero -->")], ""
    )


def test_unknown_parts_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert named("mics, zeropp") == ["mics", "zeropp"]
    before = program.PAGE.read_bytes()
    assert program.main(["--only=zero++"]) == 2
    assert program.main(["--only=qqq"]) == 2
    assert [program.main([word]) for word in ("--only=", "--ony=mics")] == [2, 2]
    first, second, empty, option = capsys.readouterr().err.splitlines()
    assert empty == f"error: --only= is not a part of the page; there are {', '.join(PARTS)}"
    assert option == "error: unrecognized arguments: --ony=mics; did you mean --only?"
    assert first.startswith("error: --only=zero++ is not a part of the page; did you mean zero")
    assert second == f"error: --only=qqq is not a part of the page; there are {', '.join(PARTS)}"
    assert program.PAGE.read_bytes() == before


def test_page_without_a_part_says_what_writes_it(records: Records) -> None:
    with pytest.raises(ValueError, match=r"paper_tables.md has no part scopes: run python -m paper"):
        replaced("# empty", ["scopes"], records)


def test_pictures_belong_to_parts() -> None:
    assert [module.IMAGE for module in page.plots(["zeropp", "fsdp", "compression"])] == [
        zeropp.IMAGE,
        compression.IMAGE,
    ]


@pytest.mark.parametrize("module", [zero, zeropp, compression, scopes])
def test_missing_record_is_one_line(module: Any, tmp_path: Path, records: Records) -> None:
    none = replace(records, folder=tmp_path)
    with pytest.raises(ValueError, match=r"^\S*(papers|compression).jsonl is missing; python -m benchmarks.\w+ writes"):
        module.section(none)
    one = replace(records)
    one.__dict__["papers"] = []
    with pytest.raises(ValueError, match=r"papers.jsonl has 0 lines of state, .* one: python -m benchmarks.papers$"):
        one.state_bytes("LLaMA-7B", "mics(8)", 1024)


def test_charts_have_published_and_ours(records: Records) -> None:
    for module, bars in ((zeropp, 6), (compression, 4)):
        (axes,) = module.plot(records).axes
        assert len(axes.patches) == 2 * bars
        assert [text.get_text() for text in axes.get_yticklabels()] != []
        words = [text.get_text() for text in axes.figure.legends[0].get_texts()]
        words += [text.get_text() for text in axes.get_yticklabels()]
        said = ("calculated",) if module is zeropp else ("ours: a decoder", "both: ResNet-18")
        assert all(any(one in word for word in words) for one in said)  # what ours is
        assert axes.get_xscale() == ("log" if module is compression else "linear")  # its bars are 15 to 507
