"""SNIA's question: do ZeRO-3's three collectives a layer need three times the bandwidth? Every strategy's bytes."""

from matplotlib.figure import Figure

from paper.plots import Bar, Bars, draw_bars, exactly
from paper.records import Records, Step
from paper.tables import NOT_MEASURED, Section, table

IMAGE = "paper_three_calls.png"
NODES, ACCUM = 4, 4
STRATEGIES = ("ddp", "zero1", "zero2", "zero3 flat", "zero3", "hsdp", "mics(1)", "mics(2)", "mics(4)", "mics(8)")
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
HEAD = ("strategy", *KINDS, "sent by a device", "over ddp", "sent by a node", "over ddp", "on the wire")
HEAD += ("wire / compiled",)


def section(records: Records) -> Section:
    """Returns the section."""
    steps = {name: records.step(name, nodes=NODES, accum=ACCUM) for name in STRATEGIES}
    once = {name: records.step(name, nodes=NODES, accum=1) for name in ("ddp", "zero3 flat")}
    measured = any(records.wire_bytes(name) is not None for name in STRATEGIES)
    return Section(
        title="Three calls: is it three times the bandwidth?",
        blocks=[
            "The question is attributed to the Storage Networking Industry Association (SNIA). "
            f"The standard workload ({steps['ddp'].num_params / 1e6:.1f} M parameters, f32) on {NODES} nodes of "
            f"{steps['ddp'].devices_per_node}, {ACCUM} micro-steps a step. Collectives are executions a step, without "
            "those of a few bytes (losses, norms). Sent by a device is all that it sends, sent by a node what "
            "crosses its link, both from the compiled program; on the wire is what the node's interface counted, "
            f"headers included, the mean over the runs at all link rates"
            f"{'' if measured else ' (the record has no such run yet)'}.",
            table(HEAD, [_cells(step, steps["ddp"], records) for step in steps.values()]),
            _answer(steps, once),
            f"![Bytes of each strategy, over those of ddp](images/{IMAGE})",
        ],
    )


def _cells(step: Step, ddp: Step, records: Records) -> list[str]:
    wire = records.wire_bytes(step.strategy)
    return [
        step.strategy,
        *(f"{step.calls(kind)}" for kind in KINDS),
        f"{step.sent() / 1e6:.1f} MB",
        f"{step.sent() / ddp.sent():.2f} x",
        f"{step.link() / 1e6:.1f} MB",
        f"{step.link() / ddp.link():.2f} x",
        NOT_MEASURED if wire is None else f"{wire / 1e6:.1f} MB",
        NOT_MEASURED if wire is None else f"{wire / step.link():.3f}",
    ]


def _answer(steps: dict[str, Step], once: dict[str, Step]) -> str:
    zero3, ddp, mics = steps["zero3 flat"], steps["ddp"], steps["mics(2)"]
    return (
        "**No.** ZeRO-3's three calls a layer (gather, gather again, reduce-scatter) are each half of an all-reduce, "
        f"so a step of one micro-step sends {once['zero3 flat'].sent() / once['ddp'].sent():.2f} times the bytes of "
        f"ddp, not three times, however many calls they are cut into; what multiplies them is accumulation, {ACCUM} "
        f"micro-steps making it {zero3.sent() / ddp.sent():.2f} times. Which network carries them matters more: "
        f"mics(2) makes as many kinds of calls and sends {mics.sent() / ddp.sent():.2f} times the bytes of ddp in "
        f"all, but only {mics.link() / ddp.link():.2f} times as many between nodes, where ZeRO-3 sends "
        f"{zero3.link() / ddp.link():.2f} times."
    )


def plot(records: Records) -> Figure:
    """Returns the figure: bytes per device and per node over those of ddp, compiled and, if recorded, measured."""
    steps = [records.step(name, nodes=NODES, accum=ACCUM) for name in STRATEGIES]
    series: dict[str, list[Bar | None]] = {
        "sent by a device, in the program": [exactly(step.sent() / steps[0].sent()) for step in steps],
        "sent by a node, in the program": [exactly(step.link() / steps[0].link()) for step in steps],
    }
    wire, of_ddp = [records.wire_bytes(name) for name in STRATEGIES], records.wire_bytes("ddp")
    if of_ddp:
        series["sent by a node, on the wire"] = [exactly(sent and sent / of_ddp) for sent in wire]
    title = (
        f"Bytes over those of ddp, {ACCUM} micro-steps a step: counted in the compiled program, measured on the wire"
    )
    return draw_bars(Bars(labels=STRATEGIES, series=series, title=title, line=1.0))
