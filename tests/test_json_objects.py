"""JSON from outside the process: what is accepted, and the one line that is said of the rest."""

import json

import pytest

from files import json_objects

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
    "": "Expecting value",
    '{"a": 1} {}': "Extra data",
    "[" * 101 + "]" * 101: "it has more than 100 levels",
    '{"a": ' * 100_000: "it has more than 100 levels",
}


@pytest.mark.parametrize("lenient", [True, False])
def test_what_is_accepted_has_its_value(lenient: bool) -> None:
    for text in ACCEPTED:
        wanted = json.loads(text.removeprefix("\ufeff"))
        assert json_objects.value(text.encode(), "here", lenient=lenient) == wanted


def test_what_only_python_writes_is_accepted_where_lenient() -> None:
    for text, why in ONLY_LENIENT.items():
        assert repr(json_objects.value(text, "here", lenient=True)) == repr(json.loads(text))
        with pytest.raises(ValueError, match=f"^here is not JSON: {why}$"):
            json_objects.value(text.encode(), "here")


@pytest.mark.parametrize("lenient", [True, False])
def test_what_is_refused_is_one_line(lenient: bool) -> None:
    for text, why in REFUSED.items():
        with pytest.raises(ValueError, match=f"^here is not JSON: {why}[^\n]*$"):
            json_objects.value(text.encode(), "here", lenient=lenient)
    with pytest.raises(ValueError, match="^here is not JSON: it is not UTF-8$"):
        json_objects.value(b'{"a": "\xff"}', "here", lenient=lenient)
    with pytest.raises(ValueError, match="^here is not a JSON object, but of type list$"):
        json_objects.parse("[]", "here", lenient=lenient)
