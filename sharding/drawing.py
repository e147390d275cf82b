"""Draws a layout, the shards and replicas of each device, as text and as a PNG."""

import io
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from runtime.files.palette import FILL, INK, LINE, SERIES, SOFT
from sharding.scopes import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

TEXT_WIDTH = 100
CELL_INCHES = (0.85, 0.21)
MOST = 16  # largest number of drawn nodes, and of devices per node
NO_BREAK = "\N{NO-BREAK SPACE}"


def holdings(layout: Layout, scope: tuple[str, ...] | None = None) -> np.ndarray:
    """Returns `[nodes, devices_per_node, 3]`: group, shard and tensor slice of each device under `scope`.

    `scope` defaults to the parameters' scope. Groups are numbered by their first device, and shards as a PartitionSpec
    over the scope numbers them. The shards of a node are therefore far apart where a scope spans nodes (hierarchical
    gather).
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


def mesh_text(layout: Layout) -> str:
    """Returns the mesh as text of at most TEXT_WIDTH columns: the axes, the three scopes, and a paragraph per node.

    `d5 1/2` is device 5 with shard 1 of 2. If the scopes differ, it lists the shards of each.
    """
    shape, scopes = layout.shape, _distinct(layout)
    facts = {"mesh": " x ".join(f"{axis} {size}" for axis, size in shape.sizes.items())}
    three = {"parameters": layout.parameters, "gradients": layout.gradients, "optimizer state": layout.optimizer}
    for name, scope in three.items():
        shards = shape.size(scope)
        facts[name] = f"{shards} shards over {', '.join(scope)}" if shards > 1 else "whole on every device"
    facts["groups"] = _groups(layout)
    facts["each device"] = "its shards of parameters, gradients, optimizer state" if len(scopes) > 1 else "its shard"
    facts["each device"] += ", its tensor slice" if shape.tensor > 1 else ""
    lines = [f"{name:<16}{fact}" for name, fact in facts.items()]
    held = [(holdings(layout, scope), shape.size(scope)) for scope in scopes.values()]
    for node in range(min(shape.num_nodes, MOST)):
        cells, last = [], -1
        for i, (group, _, slice_) in enumerate(held[0][0][node]):
            lead = f"group {group}: " if group != last else ""
            shards = " ".join(f"{h[node, i, 1]}/{shards}" if shards > 1 else "whole" for h, shards in held)
            tensor = f" t{slice_}/{shape.tensor}" if shape.tensor > 1 else ""
            cells.append(f"{lead}d{node * shape.devices_per_node + i} {shards}{tensor}")
            last = group
        text = ", ".join(cell.replace(" ", NO_BREAK) for cell in cells)
        lead = f"node {node:<11}"
        lines += textwrap.wrap(text, TEXT_WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))
    if shape.num_nodes > MOST:
        lines.append(f"and {shape.num_nodes - MOST} nodes more")
    return "\n".join(lines).replace(NO_BREAK, " ")


def mesh_png(layout: Layout) -> bytes:
    """Returns `mesh_figure` as a PNG."""
    from PIL import Image  # matplotlib writes its PNGs with it

    full, small = io.BytesIO(), io.BytesIO()
    mesh_figure(layout).savefig(full, format="png", dpi=110, facecolor="white")
    Image.open(full).convert("RGB").quantize(128).save(small, "png", optimize=True)  # a quarter of the bytes
    return small.getvalue()


def mesh_figure(layout: Layout) -> "Figure":
    """Returns a line of devices for each node, in the colours of their shards, with a frame around partition groups.

    If the three scopes differ, a device shows its shard of each: P(arameters), G(radients), O(ptimizer state).
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    groups = holdings(layout)[:MOST, :MOST, 0]
    nodes, across = groups.shape
    words, colours = _cells(layout, nodes, across)
    tall = len(words) // nodes
    caption = _caption(layout, nodes, across)
    width, height = CELL_INCHES
    size = max(5.5, across * width + 0.6), len(colours) * height + 0.5 + 0.16 * len(caption)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    for row, i in np.ndindex(len(words), across):
        ink = INK if colours[row, i] @ (0.299, 0.587, 0.114) > 0.5 else "white"  # the more legible colour
        axes.text(i + 0.5, row + 0.5, words[row][i], fontsize=7.5, color=ink, ha="center", va="center")
    axes.pcolormesh(colours, edgecolor="white", linewidth=1)
    axes.hlines(np.arange(1, nodes) * tall, 0, across, color=LINE, linewidth=0.8)
    for group in np.unique(groups) if layout.partition_size > 1 else ():  # frames around every device would be useless
        where = np.argwhere(groups == group)
        (top, left), (bottom, right) = where.min(0), where.max(0) + 1
        box = (left, top * tall), right - left, (bottom - top) * tall
        axes.add_patch(Rectangle(*box, fill=False, ec=INK, lw=1.8, zorder=3, clip_on=False, label=f"{group}"))
    names = [f"node {node}" for node in range(nodes)]
    axes.set(ylim=(len(colours), 0), xlim=(0, across), xticks=())
    axes.set_yticks((np.arange(nodes) + 0.5) * tall, names, fontsize=8.5, color=SOFT)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(_groups(layout), fontsize=11.5, weight="bold", color=INK, x=0.01, ha="left")
    figure.supxlabel("\n".join(caption), fontsize=8, color=INK, x=0.01, ha="left")
    return figure


def _cells(layout: Layout, nodes: int, across: int) -> tuple[list[list[str]], np.ndarray]:
    """Returns the words of each row of cells, and their colours `[rows, devices, 3]`. Every node has the same rows.

    The rows are its devices, their groups, their shards under each of the distinct scopes, and their tensor slices.
    """
    from matplotlib.colors import to_rgb

    shape, scopes, held = layout.shape, _distinct(layout), holdings(layout)
    devices = np.arange(shape.num_devices).reshape(held.shape[:2])
    rows = [(devices, "device {}", 0)]  # numbers, their words, the number of shards
    if layout.partition_size > 1:
        rows.append((held[..., 0], "group {}", 0))
    for name, scope in scopes.items():
        shards = shape.size(scope)
        lead = f"{name} " if len(scopes) > 1 else "shard " if 1 < shards < 100 else ""
        rows.append((holdings(layout, scope)[..., 1], lead + (f"{{}}/{shards}" if shards > 1 else "whole"), shards))
    if shape.tensor > 1:
        rows.append((held[..., 2], f"tensor {{}}/{shape.tensor}", 0))
    lines = [(numbers[node, :across], text, shards) for node in range(nodes) for numbers, text, shards in rows]
    words = [[text.format(number) for number in numbers] for numbers, text, _ in lines]
    return words, np.array([[to_rgb(_colour(number, shards)) for number in numbers] for numbers, _, shards in lines])


def _caption(layout: Layout, nodes: int, across: int) -> list[str]:
    """Returns the lines below the picture."""
    shape, several = layout.shape, len(_distinct(layout)) > 1
    axes = " x ".join(f"{axis} {size}" for axis, size in shape.sizes.items() if size > 1) or "one device"
    lines = [f"{_count(shape.num_nodes, 'node')}, {axes}", "the network is fast inside nodes, slow between them"]
    if (nodes, across) < (shape.num_nodes, shape.devices_per_node):
        lines.append(f"only the first {nodes} nodes and {across} devices of each are shown")
    if layout.partition_size > 1:
        whole = "parameters" if several else "model state"
        lines.append(f"a partition group (framed) holds one copy of the {whole}")
    if several:
        lines.append("P parameters, G gradients, O optimizer state")
    if layout.num_replicas > 1:
        same = [f"{'G ' if several else ''}colour"] if layout.gradients else []
        same += ["tensor slice"] if shape.tensor > 1 else []
        who = f"devices of the same {' and '.join(same)}" if same else "all devices"
        lines.append(f"replica all-reduce, once a step: {who} average their gradients")
    return lines


def _distinct(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Returns the scopes by their letters, or only the parameters' scope if all are the same."""
    scopes = {"P": layout.parameters, "G": layout.gradients, "O": layout.optimizer}
    return scopes if len(set(scopes.values())) > 1 else {"P": layout.parameters}


def _groups(layout: Layout) -> str:
    """Returns the mesh in a sentence."""
    shape, size = layout.shape, layout.partition_size
    stages = f", in {shape.stage} stages of a pipeline" if shape.stage > 1 else ""
    groups = _count(shape.num_devices // size, "partition group")
    return f"{_count(shape.num_devices, 'device')}, {groups} of {size}{stages}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _colour(shard: int, shards: int) -> "ColorType":
    """Returns the colour of a shard: from a palette if few, along a scale if many. White if it is not a shard."""
    if shards == 0:
        return "white"
    if shards <= len(SERIES):
        return SERIES[shard] if shards > 1 else FILL
    import matplotlib

    return matplotlib.colormaps["viridis"](shard / (shards - 1))
