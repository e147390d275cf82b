"""Draws a layout: which device holds which shard of which replica, as text and as a PNG."""

import io

import numpy as np

from sharding.mesh import DATA_AXES
from sharding.scopes import Layout


def holdings(layout: Layout) -> np.ndarray:
    """Returns `[nodes, devices_per_node, 3]`: partition group, parameter shard and tensor slice of each device."""
    shape = layout.shape
    coordinates = np.stack(np.unravel_index(np.arange(shape.num_devices), tuple(shape.sizes.values())), axis=1)
    column = {axis: coordinates[:, i] for i, axis in enumerate(shape.sizes)}

    def number(axes: tuple[str, ...]) -> np.ndarray:
        total = np.zeros(shape.num_devices, int)
        for axis in axes:
            total = total * shape.sizes[axis] + column[axis]
        return total

    replica = number(tuple(axis for axis in DATA_AXES if axis not in layout.parameters))
    held = np.stack([replica, number(layout.parameters), column["tensor"]], axis=1)
    return held.reshape(shape.num_nodes, shape.devices_per_node, 3)


def mesh_text(layout: Layout) -> str:
    """Returns the mesh as text: a line a node, `d5: g2 s1/2` for device 5 holding shard 1 of 2 in partition group 2."""
    held, shape = holdings(layout), layout.shape
    shards = shape.size(layout.parameters)
    lines = [" x ".join(f"{axis}={size}" for axis, size in shape.sizes.items())]
    for node, devices in enumerate(held):
        cells = []
        for i, (group, shard, slice_) in enumerate(devices):
            tensor = f" t{slice_}/{shape.tensor}" if shape.tensor > 1 else ""
            cells.append(f"d{node * shape.devices_per_node + i}: g{group} s{shard}/{shards}{tensor}")
        lines.append(f"node {node} | " + " | ".join(cells))
    return "\n".join(lines)


def mesh_png(layout: Layout, max_nodes: int = 16) -> bytes:
    """Returns the mesh as a PNG: nodes as boxes, devices coloured by the shard that they hold, framed by group."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    held, shape = holdings(layout), layout.shape
    nodes, per_node = min(shape.num_nodes, max_nodes), shape.devices_per_node
    columns = min(nodes, 4)
    across = min(per_node, 4)
    down = -(-per_node // across)
    rows = -(-nodes // columns)
    shards = shape.size(layout.parameters)
    colours = plt.get_cmap("viridis")
    fig, ax = plt.subplots(figsize=(columns * (across * 0.95 + 0.45), rows * (down * 0.8 + 0.75) + 0.5))
    for node in range(nodes):
        x0 = (node % columns) * (across + 0.5)
        y0 = -(node // columns) * (down + 0.9)
        ax.add_patch(
            FancyBboxPatch((x0, y0), across, down, boxstyle="round,pad=0.12", fc="#f4f4f2", ec="#8a8a86", lw=1.2)
        )
        ax.text(x0, y0 + down + 0.2, f"node {node}", fontsize=9, color="#444444", va="bottom")
        for i, (group, shard, slice_) in enumerate(held[node]):
            x, y = x0 + i % across, y0 + down - 1 - i // across
            shade = 0.15 + 0.75 * (shard / max(shards - 1, 1))
            ax.add_patch(FancyBboxPatch((x + 0.08, y + 0.08), 0.84, 0.84, boxstyle="round,pad=0.0", fc=colours(shade)))
            text = f"group {group}\nshard {shard}/{shards}" + (f"\ntensor {slice_}" if shape.tensor > 1 else "")
            white = shade < 0.6
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color="white" if white else "black")
    title = "  ".join(f"{axis} {size}" for axis, size in shape.sizes.items() if size > 1) or "one device"
    more = f"   (first {nodes} of {shape.num_nodes} nodes)" if nodes < shape.num_nodes else ""
    ax.set_title(title + more, fontsize=10, loc="left")
    ax.set_xlim(-0.2, columns * (across + 0.5) - 0.3)
    ax.set_ylim(-(rows - 1) * (down + 0.9) - 0.2, down + 0.6)
    ax.set_aspect("equal")
    ax.axis("off")
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=150, bbox_inches="tight")
    plt.close(fig)
    return buffer.getvalue()
