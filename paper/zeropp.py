"""ZeRO++: bytes between nodes, counted in compiled programs, and its throughput beside replayed steps."""

from matplotlib.figure import Figure

from paper import published_zeropp as published
from paper.plots import Bars, draw_bars, exactly
from paper.records import PARAMETER_BYTES, Line, Records
from paper.tables import Row, Section, comparison, fixed

IMAGE = "paper_zeropp.png"
NODES, N, K = 4, 8, 2  # of the small compiled steps: nodes, devices, devices a node
GPUS, GPUS_PER_NODE = 384, 16
HALF = 2  # bytes of a parameter in M, the model in fp16
HOW = {
    "zero3": "zero3",
    "zero3 hpZ": "sharding.gather=node",
    "zero3 qwZ": "gather_inter=int8",
    "zero3 qgZ": "hop_one_inter=int4, hop_one_intra=int4",
    "ZeRO++": "the three together",
}
WHOLE = {"zero3": 3.0, "ZeRO++": 0.75}  # M
OURS = ("zero3 flat", "ZeRO++")  # names in the record of the predicted steps
of_m, tflops, times = fixed(3, " M"), fixed(1, " TFLOP/s"), fixed(2, " x")


def section(records: Records) -> Section:
    """Returns the section."""
    predicted = records.paper_line("prediction", _name(1, "ZeRO++"))
    counted_again = recomputed(predicted["num_params"])
    return Section(
        title="ZeRO++: a quarter of the bytes between nodes",
        blocks=[
            f"{published.ZEROPP}. **Bytes between nodes a step**, in M, the bytes of the model at 2 a parameter. A "
            "gather in int8 (qwZ) is half of M, none in the backward pass (hpZ) nothing, a reduce-scatter in int4 "
            "(qgZ) a quarter. Ours are collectives of compiled programs. The small one (25.6 M parameters, 4 nodes of "
            "2) is f32, so what it sends unencoded is counted at 4 bytes a parameter; encoded values are counted as "
            "they are. Both are divided by (n-k)/n, the part of a pass that crosses nodes.",
            comparison(_volumes(records)),
            "Ours lie off by the scales (4 bytes a block of 1024 values), the vectors, which stay unencoded, and the "
            "embedding and the head, which are gathered once and not twice.",
            "**Throughput**, 18 B parameters on 24 nodes of 16 V100 (DGX-2). Nothing of ours was timed: steps are "
            "replayed by the planner from programs compiled for A100s, priced as V100s (docs/planner.md). Sequences "
            "are of 1024 tokens, one or two a GPU (the paper says only how many tokens); its 49 to 138 B were not "
            "replayed. ZeRO-3 gathers flat, as DeepSpeed does. TFLOP/s count what rematerialisation computes again, "
            f"because theirs do: their tutorial's log has {counted_again:.1f} floating-point operations a parameter "
            "and token, where 6 are without and 8 with it.",
            comparison([row for pair in published.TFLOPS_18B for row in _throughput(records, *pair)]),
            _why(records),
            f"![Speed-up by ZeRO++, published and replayed](images/{IMAGE})",
        ],
    )


def recomputed(num_params: int) -> float:
    """Returns the operations a parameter and token that the tutorial's log counts."""
    flops = published.TUTORIAL_TFLOPS * 1e12 * published.TUTORIAL_GPUS * published.TUTORIAL_STEP_S
    return flops / (num_params * published.TUTORIAL_TOKENS)


def _volumes(records: Records) -> list[Row]:
    rows = []
    for name, (gathers, reduced) in published.VOLUME.items():
        step = records.step(name, nodes=NODES, accum=1) if name == "zero3" else records.paper_step(name)
        coded = {"gather": name in ("zero3 qwZ", "ZeRO++"), "hop one": name in ("zero3 qgZ", "ZeRO++")}
        parts = {"gather": gathers, "hop one": reduced}
        sent = {
            part: step.link(part) / ((N - K) / N) / step.num_params / (HALF if coded[part] else PARAMETER_BYTES)
            for part in parts
        }
        for part, volume in parts.items():
            what = f"{_label(name)}, {'all gathers' if part == 'gather' else 'reduce-scatter'}"
            rows.append(Row(what=what, published=volume, ours=sent[part], how=f"compiled, {HOW[name]}", form=of_m))
    for name, volume in WHOLE.items():
        line = records.paper_line("wire", name)
        sent = line["wire_tx_bytes"] / ((N - K) / N) / line["num_params"]
        passes = sent / (HALF if name == "ZeRO++" else PARAMETER_BYTES)
        what = f"{_label(name)}, in all, {line['num_params'] / 1e6:.1f} M parameters"
        rows.append(Row(what=what, published=volume, ours=passes, how=f"on the wire at {line['rate']}", form=of_m))
    return rows + [_whole(records, ours, volume) for ours, volume in zip(OURS, WHOLE.values(), strict=True)]


def _label(name: str) -> str:
    return "ZeRO-3" if name == "zero3" else name.removeprefix("zero3 ")


def _whole(records: Records, ours: str, volume: float) -> Row:
    line = records.paper_line("prediction", _name(1, ours))
    passes = line["rates"]["100"]["inter_bytes"] * GPUS_PER_NODE / (HALF * line["num_params"])
    share = (GPUS - GPUS_PER_NODE) / GPUS if ours == "ZeRO++" else (GPUS - 1) / GPUS  # of a pass, flat or not
    what = f"{'ZeRO-3' if ours != 'ZeRO++' else ours}, in all, {line['num_params'] / 1e9:.1f} B parameters in bf16"
    return Row(what=what, published=volume, ours=passes / share, how="compiled for 384 A100", form=of_m)


def _name(thousands: int, ours: str) -> str:
    return f"18B {ours}, {thousands}K"


def _at(line: Line, gbit: int) -> float:
    """Returns TFLOP/s of a GPU, with those of rematerialisation, which repeats the forward third of 3."""
    return line["rates"][f"{gbit}"]["tflops"] * 4 / 3


def _replayed(records: Records, gbit: int, thousands: int) -> tuple[float, float]:
    zero3, zeropp = (_at(records.paper_line("prediction", _name(thousands, ours)), gbit) for ours in OURS)
    return zero3, zeropp


def _throughput(records: Records, gbit: int, thousands: int) -> list[Row]:
    where = f"{gbit} Gbit/s, {thousands}K tokens"
    theirs, ours = published.TFLOPS_18B[gbit, thousands], _replayed(records, gbit, thousands)
    rows = [
        Row(what=f"{where}, {name}", published=a, ours=b, how="replayed", form=tflops)
        for name, a, b in zip(("ZeRO-3", "ZeRO++"), theirs, ours, strict=True)
    ]
    speed_up = Row(
        what=f"{where}, ZeRO++ over ZeRO-3",
        published=theirs[1] / theirs[0],
        ours=ours[1] / ours[0],
        how="the two rows above",
        form=times,
    )
    return [*rows, speed_up]


def _why(records: Records) -> str:
    slow, fast = (published.TFLOPS_18B[gbit, 1][0] for gbit in (100, 400))
    ours_slow, ours_fast = (_replayed(records, gbit, 1)[0] for gbit in (100, 400))
    zero3, zeropp = (records.paper_line("prediction", _name(2, ours))["rates"]["800"]["exposed"] for ours in OURS)
    return (
        "At 100 Gbit/s the link takes most of the step, and the replay is nearest to what the paper measured. With "
        "faster links ours are too fast: from 100 to 400 Gbit/s, with 1K tokens, their ZeRO-3 becomes "
        f"{fast / slow:.2f} times as fast and ours {ours_fast / ours_slow:.2f} times. The planner takes the same share "
        "of a peak to be reached at every rate and size (docs/planner.md); what those GPUs and adapters reached is not "
        "published. At "
        f"800 Gbit/s with 2K tokens {zeropp:.0%} of our ZeRO++'s step waits for the network, and {zero3:.0%} of "
        "ZeRO-3's: there encoding costs more than it saves. Ours gathers a layer ahead in both; what ZeRO++ gathers "
        "between nodes in the forward pass it keeps, cut over the node, for the backward pass."
    )


def plot(records: Records) -> Figure:
    """Returns the figure: the published speed-ups and ours."""
    cells = published.TFLOPS_18B
    pairs = [_replayed(records, *cell) for cell in cells]
    series = {
        "published": [exactly(zeropp / zero3) for zero3, zeropp in cells.values()],
        "ours, calculated: a replay by the planner": [exactly(zeropp / zero3) for zero3, zeropp in pairs],
    }
    labels = [f"{gbit} Gbit/s a node, {thousands}K tokens a GPU" for gbit, thousands in cells]
    title = "Throughput of ZeRO++ over ZeRO-3, 18 B parameters on 384 V100"
    return draw_bars(Bars(labels=labels, series=series, title=title, line=1.0))
