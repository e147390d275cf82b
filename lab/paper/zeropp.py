"""ZeRO++: all bytes between nodes, and its throughput compared with replayed steps."""

from lab.paper import published
from lab.paper.records import PARAMETER_BYTES, Records
from lab.paper.scores import Cell, Comparison, over

GPUS, GPUS_PER_NODE = 384, 16
HALF = 2  # bytes of a parameter in M, the model in fp16


def in_all(records: Records) -> Comparison:
    """Returns all bytes between nodes a step in M: of the small model on the wire, of 18 B parameters compiled."""
    cells = []
    for one in published.find("ZeRO++", "volume", case="in all"):
        plus = one.system == "ZeRO++"
        wire = records.line("papers", kind="wire", name=one.ours)
        item_bytes = HALF if plus else PARAMETER_BYTES
        small = wire["wire_tx_bytes"] / (3 / 4) / wire["num_params"] / item_bytes  # 3 / 4 of a pass cross 4 nodes
        line = records.line("papers", kind="prediction", name="18B ZeRO++, 1K" if plus else "18B zero3 flat, 1K")
        sent = line["rates"]["100"]["inter_bytes"] * GPUS_PER_NODE / (HALF * line["num_params"])
        crossing = (GPUS - GPUS_PER_NODE if plus else GPUS - 1) / GPUS  # of a pass, flat or not
        cells.append(Cell(row=one.system, column="25.6 M, on the wire", published=one.value, ours=small))
        cells.append(Cell(row=one.system, column="18 B, compiled", published=one.value, ours=sent / crossing))
    return Comparison(title="M", cells=cells, form="{:.3f}")


def throughput(records: Records) -> Comparison:
    """Returns TFLOP/s of a GPU, 18 B parameters on 384 V100, with what rematerialisation repeats: a third of 3."""
    cells = []
    for one in published.find("ZeRO++", "18B"):
        line = records.line("papers", kind="prediction", name=one.ours)
        ours = line["rates"][f"{one.at}"]["tflops"] * 4 / 3
        cells.append(Cell(row=one.system, column=f"{one.at} Gbit/s, {one.case}", published=one.value, ours=ours))
    return Comparison(title="TFLOP/s", cells=cells)


def speed_up(records: Records) -> Comparison:
    """Returns the throughput of ZeRO++ over that of ZeRO-3."""
    return Comparison(title="times", cells=over(throughput(records).cells, "ZeRO-3"))
