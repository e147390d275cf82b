"""Draws a layout: which device holds which shard of which replica, as text and as a PNG."""

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from palette import FILL, INK, SERIES, SOFT
from sharding.scopes import Layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT_WIDTH = 100
MOST_ACROSS = 8  # devices in a line of a node's panel
CELL_INCHES = (0.82, 0.24)
NO_BREAK = "\N{NO-BREAK SPACE}"
TENSOR = "tensor "


def holdings(layout: Layout, scope: tuple[str, ...] | None = None) -> np.ndarray:
    """Returns `[nodes, devices_per_node, 3]`: group, shard and tensor slice of each device under `scope`.

    The scope is the parameters' if none is given. Groups are numbered by their first device, shards as a PartitionSpec
    over the scope counts them: those of a node are far apart where a scope spans nodes (hierarchical gather).
    """
    shape, scope = layout.shape, layout.parameters if scope is None else scope
    coordinates = np.unravel_index(np.arange(shape.num_devices), tuple(shape.sizes.values()))
    column = dict(zip(shape.sizes, coordinates, strict=True))

    def number(axes: tuple[str, ...]) -> np.ndarray:
        total = np.zeros(shape.num_devices, int)
        for axis in axes:
            total = total * shape.sizes[axis] + column[axis]
        return total

    group = number(tuple(axis for axis in shape.sizes if axis not in (*scope, "tensor")))
    held = np.stack([group, number(scope), column["tensor"]], axis=1)
    return held.reshape(shape.num_nodes, shape.devices_per_node, 3)


def mesh_text(layout: Layout, max_nodes: int = 16) -> str:
    """Returns the mesh as text of at most TEXT_WIDTH columns: the axes, the three scopes, and a paragraph a node.

    `d5 1/2` is device 5 with shard 1 of 2; where the scopes differ, with its shards of each.
    """
    shape, scopes = layout.shape, _distinct(layout)
    three = {"parameters": layout.parameters, "gradients": layout.gradients, "optimizer state": layout.optimizer}
    facts = {
        "mesh": " x ".join(f"{axis} {size}" for axis, size in shape.sizes.items()),
        **{name: _aloud(layout, scope) for name, scope in three.items()},
        "groups": _groups(layout),
        "each device": f"its {'shards of parameters, gradients, optimizer state' if len(scopes) > 1 else 'shard'}"
        f"{', its tensor slice' if shape.tensor > 1 else ''}",
    }
    held = [(holdings(layout, scope), shape.size(scope)) for scope in scopes.values()]
    lines = [f"{name:<16}{fact}" for name, fact in facts.items()]
    for node in range(min(shape.num_nodes, max_nodes)):
        cells, last = [], -1
        for i, (group, _, slice_) in enumerate(held[0][0][node]):
            lead = f"group {group}: " if group != last else ""
            shards = " ".join(_fraction(h[node, i, 1], shards) for h, shards in held)
            tensor = f" t{slice_}/{shape.tensor}" if shape.tensor > 1 else ""
            cells.append(f"{lead}d{node * shape.devices_per_node + i} {shards}{tensor}")
            last = group
        text = ", ".join(cell.replace(" ", NO_BREAK) for cell in cells)
        lead = f"node {node:<11}"
        lines += textwrap.wrap(text, TEXT_WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))
    if shape.num_nodes > max_nodes:
        lines.append(f"and {shape.num_nodes - max_nodes} nodes more")
    return "\n".join(lines).replace(NO_BREAK, " ")


def mesh_png(layout: Layout, max_nodes: int = 16) -> bytes:
    """Returns `mesh_figure` as a PNG."""
    from PIL import Image  # matplotlib writes its PNGs with it

    full, small = io.BytesIO(), io.BytesIO()
    mesh_figure(layout, max_nodes).savefig(full, format="png", dpi=110, facecolor="white")
    Image.open(full).convert("RGB").quantize(128).save(small, "png", optimize=True)  # a quarter of the bytes
    return small.getvalue()


def mesh_figure(layout: Layout, max_nodes: int = 16) -> "Figure":
    """Returns a panel for each node: its devices in the colours of their shards, framed by partition group.

    Where the three scopes differ a device shows its shard of each: P(arameters), G(radients), O(ptimizer state).
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shape, group = layout.shape, layout.partition_size
    nodes, per_node = min(shape.num_nodes, max_nodes), shape.devices_per_node
    across = max(n for n in range(1, min(per_node, MOST_ACROSS) + 1) if n % group == 0 or group % n == 0)
    columns = max(n for n in range(1, 5) if n == 1 or (n <= nodes and n * across <= 2 * MOST_ACROSS))
    rows, lines = -(-nodes // columns), -(-per_node // across)
    bands, caption = _bands(layout), _caption(layout, nodes)
    width, height = CELL_INCHES
    tall = rows * (0.4 + height * lines * (1 + (group > 1) + len(bands))) + 0.4 + 0.16 * len(caption)
    figure = Figure(
        figsize=(max(5.5, columns * (across * width + 0.2)), tall), layout=ConstrainedLayoutEngine(wspace=0.04)
    )
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for node, axes in enumerate(panels[:nodes]):
        _draw_node(axes, layout, node, across, bands)
    for axes in panels[nodes:]:
        axes.axis("off")
    figure.suptitle(_groups(layout), fontsize=11.5, weight="bold", color=INK, x=0.01, ha="left")
    figure.supxlabel("\n".join(caption), fontsize=8, color=INK, x=0.01, ha="left")
    return figure


Band = tuple[np.ndarray, int, str]  # `[nodes, devices_per_node]` numbers of shards, of how many, the words before them


def _bands(layout: Layout) -> list[Band]:
    """Returns what a device shows: its shard under each of the distinct scopes, and its tensor slice."""
    shape, scopes = layout.shape, _distinct(layout)
    bands = []
    for name, scope in scopes.items():
        shards = shape.size(scope)
        lead = f"{name} " if len(scopes) > 1 else "shard " if 1 < shards < 100 else ""
        bands.append((holdings(layout, scope)[..., 1], shards, lead))
    return bands + ([(holdings(layout)[..., 2], shape.tensor, TENSOR)] if shape.tensor > 1 else [])


def _draw_node(axes: "Axes", layout: Layout, node: int, across: int, bands: Sequence[Band]) -> None:
    """Draws a node's devices in lines of `across`: the group's name, the device's, and a cell for each band."""
    from matplotlib.colors import to_rgb

    per_node, framed = layout.shape.devices_per_node, layout.partition_size > 1
    tall = framed + 1 + len(bands)
    colours = np.ones((-(-per_node // across) * tall, across, 3))
    for i in range(per_node):
        row, column = i // across * tall + framed, i % across
        words = [f"device {node * per_node + i}"]
        for band, (numbers, count, lead) in enumerate(bands, 1):
            shard = int(numbers[node, i])
            words.append(lead + _fraction(shard, count))
            colours[row + band, column] = to_rgb("white" if lead == TENSOR else _colour(shard, count))
        for line, text in enumerate(words, row):
            colour = _ink(colours[line, column])
            axes.text(column + 0.5, line + 0.5, text, fontsize=7.5, color=colour, ha="center", va="center")
    axes.pcolormesh(colours, edgecolor="white", linewidth=1)
    if framed:
        _frame_groups(axes, holdings(layout)[node, :, 0], across, tall)
    axes.set(ylim=(len(colours), 0), xlim=(0, across), xticks=(), yticks=())
    axes.set_title(f"node {node}", fontsize=8.5, color=SOFT, loc="left", pad=4)
    axes.spines[:].set_visible(False)


def _frame_groups(axes: "Axes", groups: np.ndarray, across: int, tall: int) -> None:
    """Frames and names the groups of a node's devices (`[devices_per_node]`), in lines that are `tall` rows high."""
    from matplotlib.patches import Rectangle

    for group in dict.fromkeys(groups):
        first, last = np.flatnonzero(groups == group)[[0, -1]]
        left, right = (0, across) if last - first >= across else (first % across, last % across + 1)
        top, bottom = first // across * tall, (last // across + 1) * tall
        frame = Rectangle((left, top), right - left, bottom - top, fill=False, ec=INK, lw=1.6, zorder=3, clip_on=False)
        axes.add_patch(frame)
        axes.text((left + right) / 2, top + 0.5, f"group {group}", fontsize=8, color=INK, ha="center", va="center")


def _caption(layout: Layout, shown: int) -> list[str]:
    """Returns the lines below the picture."""
    shape, several = layout.shape, len(_distinct(layout)) > 1
    axes = " x ".join(f"{axis} {size}" for axis, size in shape.sizes.items() if size > 1) or "one device"
    more = f" (the first {shown} shown)" if shown < shape.num_nodes else ""
    lines = [f"{_count(shape.num_nodes, 'node')}{more}, {axes}; the network is fast inside nodes, slow between them"]
    if layout.partition_size > 1:
        whole = "parameters" if several else "model state"
        lines.append(f"a partition group (framed) holds one copy of the {whole}")
    if several:
        lines.append("P parameters, G gradients, O optimizer state")
    if layout.num_replicas > 1:
        same = [f"{'G ' if several else ''}colour"] if layout.gradients else []
        same += ["tensor slice"] if shape.tensor > 1 else []
        who = f"devices of the same {' and '.join(same)}" if same else "all devices"
        lines.append(f"hop two, once a step: {who} average their gradients")
    return lines


def _distinct(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Returns the scopes by their letters; the parameters' alone if all are the same."""
    scopes = {"P": layout.parameters, "G": layout.gradients, "O": layout.optimizer}
    return scopes if len(set(scopes.values())) > 1 else {"P": layout.parameters}


def _aloud(layout: Layout, scope: tuple[str, ...]) -> str:
    shards = layout.shape.size(scope)
    return f"{shards} shards over {', '.join(scope)}" if shards > 1 else "whole on every device"


def _fraction(shard: int, shards: int) -> str:
    return f"{shard}/{shards}" if shards > 1 else "whole"


def _groups(layout: Layout) -> str:
    """Returns the mesh in a sentence."""
    shape, size = layout.shape, layout.partition_size
    stages = f", in {shape.stage} stages of a pipeline" if shape.stage > 1 else ""
    groups = _count(shape.num_devices // size, "partition group")
    return f"{_count(shape.num_devices, 'device')}, {groups} of {size}{stages}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _colour(shard: int, shards: int) -> Any:
    """Returns the colour of a shard: from a palette if few, along a scale if many."""
    if shards <= len(SERIES):
        return SERIES[shard] if shards > 1 else FILL
    import matplotlib

    return matplotlib.colormaps["viridis"](shard / (shards - 1))


def _ink(colour: np.ndarray) -> str:
    """Returns black or white, whichever reads better on `colour` (`[3]`)."""
    return INK if colour @ (0.299, 0.587, 0.114) > 0.5 else "white"
