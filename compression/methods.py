"""All methods of hop two."""

from compression.dgc import DGC
from compression.exchange import EXCHANGES, with_codec
from compression.hop_two import HopTwo
from compression.one_bit_adam import ONE_BIT_ADAM
from compression.power_sgd import POWER_SGD
from configs.schema.own import OWN

METHODS: tuple[HopTwo, ...] = (*EXCHANGES, ONE_BIT_ADAM, DGC, POWER_SGD)


def method_named(name: str) -> HopTwo:
    """Returns the method selected by `compression.hop_two=name`."""
    if name in OWN["codec"]:
        return with_codec(name)
    return OWN["hop_two"].get(name) or next(method for method in METHODS if method.name == name)
