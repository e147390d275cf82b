"""Lines about compression that has nothing to compress on the devices of a run.

A run with a codec may continue on one node, and later on several nodes again. Its config may not change, so a codec
with nothing to send idles.
"""

from collections.abc import Iterator

from compression.methods import method_named
from configs.schema import CompressionConfig, Config
from configs.schema.codecs import COLLECTIVES, LEVELS
from sharding.coded import levels
from sharding.mesh import inter_part
from sharding.scopes import Layout


def described(config: Config, layout: Layout) -> list[str]:
    """Returns a line for each codec or method of a config that idles on these devices."""
    return [*_collectives(config.compression, layout), *_replica_all_reduce(config, layout)]


def _collectives(compression: CompressionConfig, layout: Layout) -> Iterator[str]:
    """Yields a line for each codec of gathers, reduce-scatters, tokens or differences that are not sent."""
    updated = (layout.optimizer_beyond_parameters,)
    scopes = (layout.gather_scopes, layout.reduce_scatter_scopes, (layout.experts,), updated)
    for (key, name), wholes in zip(COLLECTIVES.items(), scopes, strict=True):
        crossed = {
            "inter" if inter_part(axes) else "intra"
            for whole in wholes
            for axes in levels(whole, hierarchical=layout.hierarchical)
        }
        for level, where in LEVELS.items():
            codec = getattr(compression, f"{key}_{level}")
            if codec != "none" and level not in crossed:
                yield f"compression.{key}_{level}={codec} idles: these devices have no {name} {where}"


def _replica_all_reduce(config: Config, layout: Layout) -> Iterator[str]:
    """Yields a warning for each setting of the replica all-reduce that exchanges nothing here."""
    if config.sharding.replicas == "independent":  # their exchanges are not in the program
        return
    all_reduce = config.compression.all_reduce
    if all_reduce != "none" and not inter_part(layout.replica_axes):
        why = "there is one replica" if not layout.replica_axes else "all replicas are on one node"
        if method_named(all_reduce).is_idle(layout):
            yield f"compression.all_reduce={all_reduce} idles: {why}; its state stays in the checkpoints as it is"
        else:
            sends = f"compression.all_reduce={all_reduce} sends nothing between nodes"
            yield f"{sends}: {why}; it updates parameters as before"
    if layout.replica_axes:
        return
    if config.compression.delayed:
        yield "compression.delayed=True: there is one replica, whose gradients are still applied a step later"
    if config.local_sgd.inner_steps:
        yield (
            f"local_sgd.inner_steps={config.local_sgd.inner_steps}: there is one replica, which takes its outer steps "
            "alone"
        )
