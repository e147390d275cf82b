"""The words in the picture of a mesh, written out by hand."""

import pytest

from configs.schema import ShardingConfig
from sharding import drawing
from sharding.scopes import Layout, make_layout

NODE_NODE_ALL = {"parameters": "node", "gradients": "node", "optimizer": "all"}


def layout(strategy: str, *, tensor: int = 1, **keys: str | int) -> Layout:
    """A layout of 2 nodes of 4 devices."""
    config = ShardingConfig(strategy=strategy, **keys)  # pyright: ignore[reportArgumentType]
    return make_layout(config, num_nodes=2, devices_per_node=4, tensor=tensor)


def words(drawn: Layout) -> list[list[str]]:
    """The words of the cells, row by row."""
    (axes,) = drawing.mesh_figure(drawn).axes
    texts = [text.get_text() for text in axes.texts]
    across = drawn.shape.devices_per_node
    return [texts[i : i + across] for i in range(0, len(texts), across)]


@pytest.mark.parametrize(
    ("drawn", "first_node"),
    [
        (layout("ddp"), [["device 0", "device 1", "device 2", "device 3"], ["whole"] * 4]),
        (
            layout("mics", partition_size=2),
            [
                ["device 0", "device 1", "device 2", "device 3"],
                ["group 0", "group 0", "group 1", "group 1"],
                ["shard 0/2", "shard 1/2", "shard 0/2", "shard 1/2"],
            ],
        ),
        (
            layout("mics", partition_size=4, tensor=2),
            [
                ["device 0", "device 1", "device 2", "device 3"],
                ["group 0"] * 4,
                ["shard 0/2", "shard 0/2", "shard 1/2", "shard 1/2"],
                ["tensor 0/2", "tensor 1/2", "tensor 0/2", "tensor 1/2"],
            ],
        ),
        (
            layout("custom", **NODE_NODE_ALL),
            [
                ["device 0", "device 1", "device 2", "device 3"],
                ["group 0"] * 4,
                ["P 0/4", "P 1/4", "P 2/4", "P 3/4"],
                ["G 0/4", "G 1/4", "G 2/4", "G 3/4"],
                ["O 0/8", "O 2/8", "O 4/8", "O 6/8"],
            ],
        ),
    ],
    ids=["ddp", "mics", "mics with tensor", "three scopes"],
)
def test_cells_name_devices_groups_and_shards(drawn: Layout, first_node: list[list[str]]) -> None:
    assert words(drawn)[: len(first_node)] == first_node
    assert len(words(drawn)) == 2 * len(first_node)
