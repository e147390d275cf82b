"""The tables and charts of the papers' pages, by the name that a page gives them; lab/pages.py writes them."""

from collections.abc import Callable, Mapping
from functools import partial

from matplotlib.figure import Figure

from lab.paper import sharding, throughput, traffic
from lab.paper.published import Comparison, mean_off, orders, percent
from lab.plots import draw_bars, exactly
from lab.records import Records
from runtime.files.pages import markdown

COMPARISONS: Mapping[str, Callable[[Records], Comparison]] = {
    "mics-volumes": partial(traffic.volumes, name="mics"),
    "mics-savings": traffic.savings,
    "mics-two-hops": traffic.two_hops,
    "mics-sizes": sharding.sizes,
    "mics-7": throughput.sequences,
    "mics-7-ratios": throughput.over_zero3,
    "mics-scale-model": throughput.scale_model,
    "mics-12-to-15": throughput.ablations,
    "mics-predictions": throughput.predictions,
    "zero-table-1": sharding.zero_table_1,
    "zero-table-2": sharding.zero_table_2,
    "zero-volumes": partial(traffic.volumes, name="zero"),
    "scopes-memory": sharding.scopes,
    "scopes-volumes": partial(traffic.volumes, name="amsp"),
    "zeropp-volumes": partial(traffic.volumes, name="zeropp"),
    "zeropp-in-all": sharding.zeropp_in_all,
    "zeropp-throughput": sharding.zeropp_throughput,
    "zeropp-speed-up": sharding.zeropp_speed_up,
}
TEXTS: Mapping[str, Callable[[Records], str]] = {
    "mics-7-memory": throughput.memory,
    "calls": traffic.calls,
    "summary": lambda records: summary(records),
}
# title on the front page, and a function that counts the columns in which our systems have the published order
SUMMARY: Mapping[str, tuple[str, Callable[[Records], tuple[int, int]] | None]] = {
    "mics-volumes": ("MiCS, section 3: bytes by formula", None),
    "mics-sizes": ("MiCS, table 1: parameters", None),
    "mics-7": ("MiCS, figure 7: sequences/s", throughput.order_in_figure_7),
    "mics-7-ratios": ("MiCS, figure 7: MiCS over ZeRO-3", None),
    "mics-12-to-15": ("MiCS, figures 12 to 15 at full size", throughput.order_in_ablations),
    "mics-scale-model": ("MiCS, figures 12 to 15 on the scale model", None),
    "zero-table-1": ("ZeRO, table 1: model state", None),
    "zero-table-2": ("ZeRO, table 2: largest model", None),
    "zero-volumes": ("ZeRO and FSDP: bytes by formula", None),
    "scopes-memory": ("AMSP and PaRO: model state", None),
    "scopes-volumes": ("AMSP: bytes by formula", None),
    "zeropp-volumes": ("ZeRO++: bytes by formula", None),
    "zeropp-throughput": (
        "ZeRO++: TFLOP/s of a GPU",
        lambda records: orders(sharding.zeropp_throughput(records).cells),
    ),
    "zeropp-speed-up": ("ZeRO++ over ZeRO-3", None),
}


def tables(records: Records) -> dict[str, Callable[[], str]]:
    """Returns a function per table that returns it as Markdown."""
    found: dict[str, Callable[[], str]] = {name: partial(text, records) for name, text in TEXTS.items()}
    return found | {name: lambda of=of: of(records).markdown() for name, of in COMPARISONS.items()}


def summary(records: Records) -> str:
    """Returns our differences from each paper's numbers: count, mean and largest difference, and order of systems."""
    rows = []
    for name, (title, order) in SUMMARY.items():
        cells = [cell for cell in COMPARISONS[name](records).cells if cell.off is not None]
        worst = max((cell.off or 0.0 for cell in cells), key=abs)
        in_order = " of ".join(map(str, order(records))) if order else ""
        rows.append([title, f"{len(cells)}", f"{100 * mean_off(cells):.1f}%", percent(worst), in_order])
    return markdown(["", "numbers", "mean difference", "largest", "in the published order"], rows)


def chart(of: Callable[[Records], Comparison], title: str, **how: float | bool) -> Callable[[Records], Figure]:
    """Returns a function that draws a comparison: published and our values per column, or per row of one column."""

    def draw(records: Records) -> Figure:
        cells = of(records).cells
        columns, rows = (list(dict.fromkeys(names)) for names in zip(*((c.column, c.row) for c in cells), strict=True))
        is_crossed = len(columns) > 1
        series = {}
        for row in rows if is_crossed else [""]:
            some = [cell for cell in cells if cell.row == row] if is_crossed else cells
            name = f"{row}, " if is_crossed else ""
            series[f"{name}published"] = [exactly(cell.published) for cell in some]
            series[f"{name}ours"] = [exactly(cell.ours) for cell in some]
        return draw_bars(columns if is_crossed else rows, series, title, **{"line": 1.0, **how})  # pyright: ignore

    return draw


CHARTS: Mapping[str, Callable[[Records], Figure]] = {
    "paper_figure_7": chart(
        throughput.of_a_gpu,
        "MiCS figure 7: sequences a second of a V100\n(ours: calculated from compiled programs; nothing ran on a GPU)",
        line=0.0,
    ),
    "paper_figures_12_to_15": chart(
        throughput.scale_model, "Throughput over that of the other; ours: measured on the scale model"
    ),
    "paper_zeropp": chart(
        sharding.zeropp_speed_up, "Throughput of ZeRO++ over ZeRO-3, 18 B on 384 V100; ours: replayed by the planner"
    ),
}
