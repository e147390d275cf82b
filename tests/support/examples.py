"""The choices of examples/methods, registered for a test."""

from typing import Any

import pytest

from configs.schema.own import OWN
from examples.methods import demo, dgc, power_sgd, sparse_loco
from examples.methods.utilisation import Utilisation

METHODS = {
    method.name: method
    for method in (power_sgd.method(rank=2), sparse_loco.method(0.984), demo.method(0.9), dgc.method(0.9))
}


@pytest.fixture
def example_methods(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes them choices of `compression.all_reduce`, and `utilisation` of `local_sgd.interval`."""
    for name, method in METHODS.items():
        monkeypatch.setitem(OWN["all_reduce"], name, method)
    monkeypatch.setitem(OWN["interval"], "utilisation", Utilisation(0.95))
