"""Draws a layout: which device holds which shard of which replica, as text and as a PNG."""

import io
import textwrap
from typing import Any

import numpy as np

from palette import FILL, INK, LINE, PAPER, SERIES, SOFT
from sharding.scopes import Layout

WHOLE = FILL  # not partitioned
NODE, NODE_EDGE, GROUP, NETWORK = PAPER, LINE, INK, SERIES[-1]
TEXT_WIDTH = 100
NO_BREAK = "\N{NO-BREAK SPACE}"


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
    """Returns the mesh as a PNG: nodes as boxes, partition groups as frames, each device in the colour of its shard.

    Where the three scopes differ a device shows its shard of each: P(arameters), G(radients), O(ptimizer state).
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from PIL import Image  # matplotlib writes its PNGs with it

    picture = _Picture(layout, max_nodes)
    fig, ax = plt.subplots(figsize=(picture.width * 0.82, picture.height * 0.82))
    picture.draw(ax)
    full, small = io.BytesIO(), io.BytesIO()
    fig.savefig(full, format="png", dpi=110, bbox_inches="tight", pad_inches=0.1, facecolor="white")
    plt.close(fig)
    Image.open(full).convert("RGB").quantize(128).save(small, "png", optimize=True)  # a quarter of the bytes
    return small.getvalue()


class _Picture:
    """Where everything is, in units of a device's width, y downwards from 0; then the drawing of it."""

    gap = 0.14  # around a device
    label = 0.34  # height of a line of text

    def __init__(self, layout: Layout, max_nodes: int) -> None:
        self.layout, self.shape = layout, layout.shape
        self.scopes = _distinct(layout)
        self.held = {name: holdings(layout, scope) for name, scope in self.scopes.items()}
        self.cell = 0.3 + 0.3 * (len(self.scopes) + (self.shape.tensor > 1))
        self.nodes = min(self.shape.num_nodes, max_nodes)
        group = layout.partition_size
        self.in_node = min(group, self.shape.devices_per_node)
        self.nodes_a_group = -(-group // self.shape.devices_per_node)
        self.across = _columns(self.shape.devices_per_node, self.in_node, 4)
        self.columns = _columns(self.nodes, self.nodes_a_group, 4)
        self.framed = group > 1  # a frame around every device would say nothing
        self.labelled = self.framed and self.nodes_a_group == 1  # frames inside the nodes
        self.node_width = self.across * (1 + self.gap) + 3 * self.gap
        self.device_y = self._rows(self.shape.devices_per_node, self.across, self.cell + self.gap, self.in_node)
        self.node_height = self.device_y[-1] + self.cell + 2 * self.gap
        self.node_y = self._node_rows()
        self.width = max(self.columns * (self.node_width + 4 * self.gap), 5.5)
        self.height = self.node_y[-1] + self.node_height + 1.6

    def _rows(self, count: int, across: int, step: float, group: int) -> list[float]:
        """Returns the y of each row of devices inside a node, with a line's room above the first row of a group."""
        y, rows = self.label + self.gap, []
        for row in range(-(-count // across)):
            if self.labelled and (group <= across or row * across % group == 0):
                y += self.label + (self.gap if row else 0)
            rows.append(y)
            y += step
        return rows

    def _node_rows(self) -> list[float]:
        """Returns the y of each row of nodes: the network's line below it, a line's room above frames of nodes."""
        y, rows = 0.85, []
        for row in range(-(-self.nodes // self.columns)):
            starts = self.nodes_a_group <= self.columns or row * self.columns % self.nodes_a_group == 0
            y += 1.6 * self.label if self.nodes_a_group > 1 and starts else 0
            rows.append(y)
            y += self.node_height + 0.75
        return rows

    def node_at(self, node: int) -> tuple[float, float]:
        """Returns the left top corner of a node."""
        return (node % self.columns) * (self.node_width + 4 * self.gap), self.node_y[node // self.columns]

    def device_at(self, node: int, i: int) -> tuple[float, float]:
        """Returns the left top corner of a device."""
        x, y = self.node_at(node)
        return x + 2 * self.gap + (i % self.across) * (1 + self.gap), y + self.device_y[i // self.across]

    def draw(self, ax: Any) -> None:
        """Draws all of it."""
        self._title(ax)
        if self.nodes > 1:
            self._network(ax)
        for node in range(self.nodes):
            x, y = self.node_at(node)
            _box(ax, x, y, self.node_width, self.node_height, fc=NODE, ec=NODE_EDGE, lw=1.2, zorder=2)
            ax.text(x + 1.5 * self.gap, y + 0.28, f"node {node}", fontsize=8.5, color=SOFT, va="center")
            for i in range(self.shape.devices_per_node):
                self._device(ax, node, i)
        if self.framed:
            for group in range(self.layout.shape.num_devices // self.layout.partition_size):
                self._frame(ax, group)
        self._legend(ax)
        ax.set_xlim(-0.35, self.width)
        ax.set_ylim(self.height, -0.1)
        ax.set_aspect("equal")
        ax.axis("off")

    def _title(self, ax: Any) -> None:
        shape = self.shape
        more = f" (the first {self.nodes} shown)" if self.nodes < shape.num_nodes else ""
        ax.text(-0.1, 0.15, _groups(self.layout), fontsize=11.5, weight="bold", color=INK, va="center")
        axes = " x ".join(f"{axis} {size}" for axis, size in shape.sizes.items() if size > 1) or "one device"
        ax.text(-0.1, 0.55, f"{_count(shape.num_nodes, 'node')}{more}, {axes}", fontsize=8.5, color=SOFT, va="center")

    def _device(self, ax: Any, node: int, i: int) -> None:
        x, y = self.device_at(node, i)
        bands = []
        for name, scope in self.scopes.items():
            shard, shards = int(self.held[name][node, i, 1]), self.shape.size(scope)
            lead = f"{name} " if len(self.scopes) > 1 else "shard " if 1 < shards < 100 else ""
            bands.append((lead + _fraction(shard, shards), _colour(shard, shards)))
        if self.shape.tensor > 1:
            bands.append((f"tensor {self.held['P'][node, i, 2]}/{self.shape.tensor}", "white"))
        _box(ax, x, y, 1, self.cell, fc="white", ec=INK, lw=0.7, zorder=4)
        ax.text(x + 0.5, y + 0.16, f"device {node * self.shape.devices_per_node + i}", **_centred(7, INK))
        height = (self.cell - 0.3) / len(bands)
        for row, (text, colour) in enumerate(bands):
            top = y + 0.3 + row * height
            _box(ax, x, top, 1, height, fc=colour, ec=INK, lw=0.5, zorder=4, rounding=0)
            ax.text(x + 0.5, top + height / 2 + 0.01, text, **_centred(7.5, _ink(colour)))

    def _frame(self, ax: Any, group: int) -> None:
        """Frames a partition group: devices inside a node, or whole nodes."""
        where = np.argwhere(self.held["P"][: self.nodes, :, 0] == group)
        if not len(where):
            return
        if self.nodes_a_group > 1:
            corners = np.array([self.node_at(node) for node in where[:, 0]])
            size, margin, room = (self.node_width, self.node_height), 1.3 * self.gap, 0.9 * self.label
        else:
            corners = np.array([self.device_at(*at) for at in where])
            size, margin, room = (1, self.cell), 0.36 * self.gap, 0.8 * self.label
        x, y = corners.min(0) - margin - (0, room)
        x1, y1 = corners.max(0) + size + margin
        _box(ax, x, y, x1 - x, y1 - y, fc="none", ec=GROUP, lw=1.6, zorder=5)
        small = x1 - x < 1.5
        ax.text((x + x1) / 2, y + room / 2 + margin / 2, f"group {group}", **_centred(7 if small else 8.5, GROUP))

    def _network(self, ax: Any) -> None:
        """Draws the slow network: a dashed line below each row of nodes, with a way up to each node."""
        style = {"color": NETWORK, "lw": 1.4, "ls": (0, (4, 2)), "zorder": 1}
        ys = [y + self.node_height + 0.32 for y in self.node_y]
        for node in range(self.nodes):
            x, y = self.node_at(node)
            ax.plot([x + self.node_width / 2] * 2, [y + self.node_height, ys[node // self.columns]], **style)
        for row, y in enumerate(ys):
            last = min((row + 1) * self.columns, self.nodes) - 1
            left = self.node_width / 2 if len(ys) == 1 else -0.28
            ax.plot([left, self.node_at(last)[0] + self.node_width / 2], [y, y], **style)
        if len(ys) > 1:
            ax.plot([-0.28, -0.28], [ys[0], ys[-1]], **style)

    def _legend(self, ax: Any) -> None:
        """Explains boxes, frames, colours and the dashed line below the picture."""
        scopes = self.scopes
        y = self.node_y[-1] + self.node_height + (0.85 if self.nodes > 1 else 0.45)
        _box(ax, 0, y - 0.1, 0.35, 0.2, fc=NODE, ec=NODE_EDGE, lw=1.4)
        lines = ["a node: fast network inside"]
        if self.nodes > 1:
            ax.plot([0, 0.35], [y + 0.33 * len(lines)] * 2, color=NETWORK, lw=1.4, ls=(0, (4, 2)))
            lines.append("slow network between nodes")
        if self.framed:
            _box(ax, 0, y + 0.33 * len(lines) - 0.1, 0.35, 0.2, fc="white", ec=GROUP, lw=1.6)
            whole = "parameters" if len(scopes) > 1 else "model state"
            lines.append(f"a partition group: its devices hold one copy of the {whole} together")
        if len(scopes) > 1:
            lines.append("P parameters, G gradients, O optimizer state")
        if self.layout.num_replicas > 1:
            same = [f"{'G ' if len(scopes) > 1 else ''}colour"] if self.layout.gradients else []
            same += ["tensor slice"] if self.shape.tensor > 1 else []
            who = f"devices of the same {' and '.join(same)}" if same else "all devices"
            lines.append(f"hop two, once a step: {who} average their gradients")
        for row, line in enumerate(lines):
            plain = line[0] in "Ph"
            ax.text(0 if plain else 0.47, y + 0.33 * row + 0.01, line, fontsize=8, color=INK, va="center")
        self.height = y + 0.33 * len(lines)


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


def _columns(count: int, group: int, most: int) -> int:
    """Returns how many of `count` things to put in a row, so that runs of `group` of them are rectangles."""
    legal = [c for c in range(1, min(count, most) + 1) if c % group == 0 or group % c == 0]
    return max(legal, key=lambda c: (count % c == 0 and 2 * c * c >= count, c))


def _colour(shard: int, shards: int) -> Any:
    """Returns the colour of a shard: from a palette if few, along a scale if many."""
    if shards == 1:
        return WHOLE
    if shards <= len(SERIES):
        return SERIES[shard]
    import matplotlib

    return matplotlib.colormaps["viridis"](shard / (shards - 1))


def _ink(colour: Any) -> str:
    """Returns black or white, whichever reads better on `colour`."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _centred(size: float, colour: str) -> dict[str, Any]:
    return {"fontsize": size, "color": colour, "ha": "center", "va": "center", "zorder": 6}


def _box(ax: Any, x: float, y: float, width: float, height: float, *, rounding: float = 0.06, **style: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = f"round,pad=0,rounding_size={rounding}" if rounding else "square,pad=0"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **style))
