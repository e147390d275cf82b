"""The combinators of sweeps, against combinations written out by hand."""

import pytest

from configs.overrides import chain, choice, log_uniform, over, product, sample, uniform, zip_


def test_combinations_written_out() -> None:
    a, b = over("a", (1, 2)), over("b.c", "xy")
    assert product(a, b) == [{"a": 1, "b.c": "x"}, {"a": 1, "b.c": "y"}, {"a": 2, "b.c": "x"}, {"a": 2, "b.c": "y"}]
    assert zip_(a, b) == [{"a": 1, "b.c": "x"}, {"a": 2, "b.c": "y"}]
    assert chain(a, b) == [{"a": 1}, {"a": 2}, {"b.c": "x"}, {"b.c": "y"}]
    assert len(product(a, b, over("d", range(3)))) == 12
    assert product(point for point in a) == a  # a generator serves too


def test_contradictions_are_errors() -> None:
    with pytest.raises(ValueError, match="two of the combined sweeps set a;"):
        product(over("a", (1, 2)), over("b", (1,)), over("a", (3,)))
    with pytest.raises(ValueError, match="2, 3 runs"):
        zip_(over("a", (1, 2)), over("b", (1, 2, 3)))


def test_samples_lie_where_they_should() -> None:
    how = {"lr": log_uniform(1e-4, 1e-1), "b2": uniform(0.9, 1.0), "layers": choice(2, 4)}
    drawn = sample(400, how, seed=3)
    assert drawn == sample(400, how, seed=3) != sample(400, how, seed=4)
    rates = sorted(point["lr"] for point in drawn)
    assert 1e-4 <= rates[0] < 2e-4 and 5e-2 < rates[-1] <= 1e-1
    assert 2e-3 < rates[200] < 5e-3  # the geometric middle of the range is 3.2e-3, the arithmetic one 5e-2
    assert 0.94 < sorted(point["b2"] for point in drawn)[200] < 0.96
    assert {point["layers"] for point in drawn} == {2, 4}
    assert all(len(f"{rate:.10g}".replace(".", "").lstrip("0").split("e")[0]) <= 3 for rate in rates)
