"""All methods of the replica all-reduce."""

from collections.abc import Callable
from typing import TypeVar

from compression.all_reduce import AllReduceMethod, Setup
from compression.chosen_codecs import make_codec
from compression.exchange import exchange
from compression.one_bit_adam import ONE_BIT_ADAM
from compression.primitives import encoded, summed
from configs.schema.codecs import TABLE
from configs.schema.own import OWN
from configs.schema.sections import ALL_REDUCE

Result = TypeVar("Result")


def with_codec(name: str) -> AllReduceMethod:
    """Returns the method that exchanges gradients with the codec called `name`."""

    def of(function: Callable[..., Result]) -> Callable[[Setup], Result]:
        return lambda setup: function(
            setup.plan,
            make_codec(name, setup.compression),
            error_feedback=setup.compression.error_feedback,
        )

    return AllReduceMethod(name=name, build=of(exchange), primitive=of(encoded))


NONE = AllReduceMethod(
    name="none",
    build=lambda setup: exchange(setup.plan),
    primitive=lambda setup: summed(setup.plan, packed=True),
    encodes=False,
)
CODECS = [with_codec(name) for name in TABLE if name in ALL_REDUCE and name != NONE.name]
METHODS: tuple[AllReduceMethod, ...] = (NONE, *CODECS, ONE_BIT_ADAM)


def method_named(name: str) -> AllReduceMethod:
    """Returns the method selected by `compression.all_reduce=name`."""
    if name in OWN["codec"]:
        return with_codec(name)
    return OWN["all_reduce"].get(name) or next(method for method in METHODS if method.name == name)
