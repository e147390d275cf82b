"""PyTorch FSDP: the paper's formulas for traffic between hosts, compared with our compiled programs."""

from paper import published
from paper.records import Records
from paper.tables import Row, Section, comparison, fixed

NODES, G, W = 4, 2, 8  # hosts, GPUs a host, all GPUs
form = fixed(4, " M")


def section(records: Records) -> Section:
    """Returns the section."""
    return Section(
        title="FSDP: traffic across hosts",
        blocks=[
            f"{published.FSDP}, section 3.2: bytes of a GPU, for a model of M bytes on W = {W} GPUs, G = {G} on each "
            "host, one micro-step. Full replication is our ddp, full sharding zero3 flat, hybrid sharding hsdp (mics "
            "with groups of one node). For the first two the paper counts all that a GPU sends, whoever receives it, "
            "and so do we. For hybrid sharding it counts the all-reduce alone, with W - 1 where the ring among the "
            "W/G hosts has W - G; the second row of it has that term.",
            comparison(_rows(records), "formula"),
        ],
    )


def _rows(records: Records) -> list[Row]:
    ddp, zero3, hsdp = (records.step(name, nodes=NODES, accum=1) for name in ("ddp", "zero3 flat", "hsdp"))
    across = hsdp.link() / hsdp.devices_per_node / hsdp.model_bytes
    return [
        _row(
            "full replication, 2M(W-1)/W",
            2 * (W - 1) / W,
            ddp.sent() / ddp.model_bytes,
            "compiled, ddp, all collectives",
        ),
        _row(
            "full sharding, 3M(W-1)/W",
            3 * (W - 1) / W,
            zero3.sent() / zero3.model_bytes,
            "compiled, zero3 flat, the same",
        ),
        _row("hybrid sharding, 2M(W-1)/(GW)", 2 * (W - 1) / (G * W), across, "compiled, hsdp, between nodes"),
        _row("hybrid sharding, 2M(W-G)/(GW)", 2 * (W - G) / (G * W), across, "the same"),
    ]


def _row(what: str, formula: float, ours: float, how: str) -> Row:
    return Row(what=what, published=formula, ours=ours, how=how, form=form)
