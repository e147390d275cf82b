"""JSON from outside the process: what is accepted, and the one line that is said of the rest."""

import json

from support.tables import check_rows, raised

from runtime.files import json_objects

ACCEPTED = (
    '\ufeff{"a": 1}',
    '{"a": {"b": [1, -2.5e300, true, null]}, "b": 1}',
    f'{{"a": {-(2**63)}, "b": {2**64 - 1}}}',
    '{"a": "\\ud83d\\ude00", "b": "é"}',
    '{"a": "' + "[" * 1000 + '"}',
    "[" * 100 + "]" * 100,
)
ONLY_LENIENT = {
    '{"a": NaN}': "NaN is no number of JSON",
    '{"a": [-Infinity]}': "-Infinity is no number of JSON",
    '{"a": 1e400}': "1e400 is too large for a float",
    f'{{"model_max_length": {int(1e30)}}}': "an integer has 31 digits",
    '{"a": 1, "b": {"c": 1, "d": 2, "d": 2}}': "the key 'd' is there twice",
    '{"a": "\\ud83d"}': "it is not UTF-8",
}
REFUSED = {
    b"": "Expecting value",
    b'{"a": 1} {}': "Extra data",
    b"[" * 101 + b"]" * 101: "it has more than 100 levels",
    b'{"a": ' * 100_000: "it has more than 100 levels",
    b'{"a": "\xff"}': "it is not UTF-8",
}


def test_what_is_accepted_has_its_value() -> None:
    for text in ACCEPTED:
        wanted = json.loads(text.removeprefix("\ufeff"))
        for lenient in (True, False):
            assert json_objects.value(text.encode(), "here", lenient=lenient) == wanted
    for text in ONLY_LENIENT:
        assert repr(json_objects.value(text, "here", lenient=True)) == repr(json.loads(text))


def test_what_is_refused_is_one_line() -> None:
    def check(content: bytes, why: str, lenient: bool) -> None:
        said = raised(lambda: json_objects.value(content, "here", lenient=lenient))
        assert said.startswith(f"here is not JSON: {why}")

    check_rows([(content, why, lenient) for content, why in REFUSED.items() for lenient in (True, False)], check)
    check_rows([(text.encode(), why, False) for text, why in ONLY_LENIENT.items()], check)
    assert raised(lambda: json_objects.parse("[]", "here")) == "here is not a JSON object, but of type list"
