"""How long a store that is away is waited for, with which pauses, and what is logged; on a clock that is a number."""

import logging
import random
from collections.abc import Callable
from email.message import Message
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from input_pipeline.patience import AwayError, Patience, StoreAwayError, StoreError, backoff_s
from input_pipeline.redirects import retry_after_s

URL, WHAT = "http://host/set", "http://host/set/a.txt"
PATIENCE_S, FIRST_S = 540.0, 20.0


class Store:
    """A store whose answers take the seconds of a list: an error for each, and then an answer."""

    def __init__(self, *errors: tuple[float, AwayError], reached: bool = True) -> None:
        self.now_s, self.pauses_s, self.errors = 0.0, list[float](), [*errors]
        self.patience = Patience(URL, PATIENCE_S, FIRST_S, clock=lambda: self.now_s, pause=self._pause)
        self.patience.reached = reached

    def _pause(self, seconds: float) -> bool:
        self.pauses_s.append(seconds)
        self.now_s += seconds
        return self.patience.ended.is_set()

    def attempt(self) -> str:
        if not self.errors:
            return "content"
        seconds, error = self.errors.pop(0)
        self.now_s += seconds
        raise error

    def read(self) -> str:
        return self.patience.for_answer(WHAT, self.attempt)


@pytest.fixture(name="logged")
def lines_of_the_log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    errors=st.lists(
        st.tuples(st.sampled_from([0.0, 5.0, 59.0, 300.0]), st.sampled_from([0.0, 7.0, 9999.0])), max_size=9
    ),
    reached=st.booleans(),
)
def test_a_store_is_waited_for_until_the_patience_ends(errors: list[tuple[float, float]], reached: bool) -> None:
    store = Store(*((took, AwayError("half", "check", pause)) for took, pause in errors), reached=reached)
    broken = sum(took > 60 for took, _ in errors)
    try:
        assert store.read() == "content"
        assert broken < 5 and len(store.pauses_s) == len(errors)
        waited_s = sum(store.pauses_s[:-1]) + sum(took for took, _ in errors[1:] if took <= 60)
        assert waited_s <= (PATIENCE_S if reached else FIRST_S) + 0.01
    except StoreAwayError as error:
        assert reached and ("5 answers broke off" in str(error) or "the store has been away for" in str(error))
    except StoreError as error:
        assert not reached and "the store was never reached, in " in str(error) and str(error).endswith("; check")
    for pause_s, (_, asked_s) in zip(store.pauses_s, errors, strict=False):
        assert min(asked_s, PATIENCE_S) < pause_s <= min(asked_s, PATIENCE_S) + 4.5


def test_a_failure_is_logged_once_and_so_is_its_end(logged: Callable[[], list[str]]) -> None:
    Store((0.0, AwayError("it answers 500"))).read()
    assert logged() == []  # too short to be worth a line
    store = Store(*[(9.0, AwayError("it answers 429", pause_s=60.0))] * 3)
    store.read()
    assert logged() == [
        f"{URL}: the store is away (it answers 429): waiting up to 540 s",
        f"{URL}: the store answers again after {store.now_s - 9.0:.0f} s",
    ]


def test_each_thread_has_its_patience_and_an_answer_to_another_one_ends_none(logged: Callable[[], list[str]]) -> None:
    store = Store(*[(20.0, AwayError("it answers 500"))] * 99)

    def attempt_while_others_are_answered() -> Any:
        store.patience.for_answer("another", lambda: "content")
        return store.attempt()

    with pytest.raises(StoreAwayError, match=rf"^{WHAT}: the store has been away for 5\d\d s .it answers 500."):
        store.patience.for_answer(WHAT, attempt_while_others_are_answered)
    assert len(logged()) == 1 and "is away" in logged()[0]
    store.patience.for_answer("another", lambda: "content")  # it does not say that the one given up is back
    assert len(logged()) == 1


def test_answers_that_break_off_after_minutes_are_not_the_store_being_away() -> None:
    """A file may come for many minutes, and the connection break more than once; but not always."""
    assert Store(*[(600.0, AwayError("half"))] * 4).read() == "content"
    store = Store(*[(300.0, AwayError("half"))] * 9)
    with pytest.raises(StoreAwayError, match=r"5 answers broke off, each after more than 60 s .half.; does a proxy"):
        store.read()
    assert len(store.errors) == 4


def test_closing_ends_the_waiting() -> None:
    store = Store((1.0, AwayError("half")))
    store.patience.ended.set()
    with pytest.raises(StoreAwayError, match=f"{URL}: reading ended while the store was away"):
        store.read()


def test_pauses_grow_and_differ_between_processes() -> None:
    random.seed(0)
    for failures, mean_s in [(0, 0.1), (1, 0.2), (5, 3.0), (99, 3.0)]:
        pauses = {backoff_s(failures) for _ in range(20)}
        assert len(pauses) > 1 and all(0.5 * mean_s <= pause <= 1.5 * mean_s for pause in pauses)


def test_a_server_says_when_to_ask_again() -> None:
    wanted = {"7": 7.0, " 120 ": 120.0, "": 0.0, "-3": 0.0, "soon": 0.0, "9" * 99: 999_999_999.0}
    wanted |= {"Wed, 21 Oct 2015 07:28:00 GMT": 0.0, "Wed, 99 Oct 2015": 0.0}
    for value, seconds in wanted.items():
        headers = Message()
        headers["retry-after"] = value
        assert retry_after_s(headers) == seconds, value
    assert retry_after_s(Message()) == 0.0
