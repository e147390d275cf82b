"""Any config of configs/, with the choices of this folder: methods of the replica all-reduce, intervals, a codec.

    python train.py --config=examples/methods/config.py --workdir=runs/power_sgd \\
        --config.compression.all_reduce=power_sgd
    python train.py --config=examples/methods/config.py --workdir=runs/utilisation \\
        --config.local_sgd.inner_steps=50 --config.local_sgd.interval=utilisation

`:NAME` is another config than the quickstart: `examples/methods/config.py:digits`. Settings are arguments; for other
settings write a line in your own config file:

    register("all_reduce", "power_sgd", power_sgd.method(rank=8))

Hardware: the config's; the quickstart simulates 4 nodes of 2 CPU devices.
Expected: losses and bytes of each method are in docs/results/compression_accuracy.md.
"""

from importlib import import_module

from ml_collections import ConfigDict

from configs.register import register
from examples.methods import demo, dgc, power_sgd, rotation, sparse_loco, utilisation

register("all_reduce", "power_sgd", power_sgd.method(rank=2))
register("all_reduce", "sparse_loco", sparse_loco.method(sparsity=0.984, decay=0.95))
register("all_reduce", "demo", demo.method(sparsity=0.984, decay=0.999))
register("all_reduce", "dgc", dgc.method(sparsity=0.99))
register("codec", "int4_rotated", rotation.int4_rotated)
register("interval", "utilisation", utilisation.Utilisation(target=0.95))


def get_config(arg: str = "quickstart") -> ConfigDict:
    """Returns the config of configs/NAME.py, for `NAME` or `NAME:arg`. ValueError for a missing file."""
    name, _, own_arg = arg.partition(":")
    try:
        module = import_module(f"configs.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"config.py:{arg} is not known; configs/{name}.py does not exist") from error
    return module.get_config(*filter(None, [own_arg]))
