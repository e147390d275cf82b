"""The tables and pictures of the papers' pages: Markdown written by hand, with marked tables that are filled here."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from files import pages as pages_of_docs
from files.pages import markdown
from lab.paper import (
    compression,
    gemini,
    mics,
    model_state,
    network,
    pipelines,
    predictions,
    throughput,
    traffic,
    zeropp,
)
from lab.paper.plots import Bars, draw_bars, exactly
from lab.paper.records import Records
from lab.paper.scores import Comparison, mean_off, orders, percent

DOCS = Path(__file__).resolve().parents[2] / "docs"

TABLES: Mapping[str, Callable[[Records], Comparison | str]] = {
    "mics-volumes": lambda records: traffic.volumes(records, "mics"),
    "mics-savings": traffic.savings,
    "mics-two-hops": traffic.two_hops,
    "mics-sizes": mics.sizes,
    "mics-network": network.fits,
    "mics-7": throughput.sequences,
    "mics-7-ratios": throughput.over_zero3,
    "mics-7-means": throughput.means,
    "mics-7-memory": throughput.memory,
    "mics-9": throughput.contradiction,
    "mics-scale-model": predictions.scale_model,
    "mics-12-to-15": throughput.ablations,
    "mics-12-to-15-means": throughput.ablation_means,
    "mics-predictions": predictions.predictions,
    "mics-text": predictions.in_the_text,
    "mics-16": mics.losses,
    "pipelines": pipelines.formulas,
    "zero-table-1": model_state.zero_table_1,
    "zero-table-2": model_state.zero_table_2,
    "zero-volumes": lambda records: traffic.volumes(records, "zero"),
    "scopes-memory": model_state.scopes,
    "scopes-volumes": lambda records: traffic.volumes(records, "amsp"),
    "calls": traffic.calls,
    "zeropp-volumes": lambda records: traffic.volumes(records, "zeropp"),
    "zeropp-in-all": zeropp.in_all,
    "zeropp-throughput": zeropp.throughput,
    "zeropp-speed-up": zeropp.speed_up,
    "compression-ratios": compression.ratios,
    "compression-power-sgd": compression.power_sgd,
    "compression-costs": compression.costs,
    "compression-diloco": compression.diloco,
    "gemini": gemini.recovery,
    "summary": lambda records: summary(records),
}
# what the front page sums up, and how often our systems come in the published order
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
    "zeropp-throughput": ("ZeRO++: TFLOP/s of a GPU", lambda records: orders(zeropp.throughput(records).cells)),
    "zeropp-speed-up": ("ZeRO++ over ZeRO-3", None),
    "compression-ratios": ("DGC, MXNet, 1-bit Adam, DiLoCo: times smaller", None),
    "compression-power-sgd": ("PowerSGD: MiB an epoch", None),
}


def pages() -> list[Path]:
    """Returns the pages whose tables are filled."""
    return [DOCS / "paper_tables.md", *sorted((DOCS / "papers").glob("*.md"))]


def filled(text: str, records: Records) -> str:
    """Returns a page with its marked tables as the records have them. ValueError for a mark of no table."""
    return pages_of_docs.filled(text, {name: partial(table_named, name, records) for name in TABLES})


def table_named(name: str, records: Records) -> str:
    """Returns a table as Markdown."""
    found = TABLES[name](records)
    return found if isinstance(found, str) else found.markdown()


def summary(records: Records) -> str:
    """Returns how far ours are from each paper's numbers: how many, mean and largest difference, and who wins."""
    rows = []
    for name, (title, order) in SUMMARY.items():
        found = TABLES[name](records)
        assert isinstance(found, Comparison)
        cells = [cell for cell in found.cells if cell.off is not None]
        worst = max((cell.off or 0.0 for cell in cells), key=abs)
        in_order = " of ".join(map(str, order(records))) if order else ""
        rows.append([title, f"{len(cells)}", f"{100 * mean_off(cells):.1f}%", percent(worst), in_order])
    return markdown(["", "numbers", "mean difference", "largest", "in the published order"], rows)


def bars(found: Comparison, title: str, *, line: float = 1.0, is_logarithmic: bool = False) -> Figure:
    """Returns the chart of a comparison: in each column, or of one column for each row, what is published and ours."""
    columns = list(dict.fromkeys(cell.column for cell in found.cells))
    rows = list(dict.fromkeys(cell.row for cell in found.cells))
    is_crossed = len(columns) > 1
    series = {}
    for row in rows if is_crossed else [""]:
        cells = [cell for cell in found.cells if cell.row == row] if is_crossed else found.cells
        name = f"{row}, " if is_crossed else ""
        series[f"{name}published"] = [exactly(cell.published) for cell in cells]
        series[f"{name}ours"] = [exactly(cell.ours) for cell in cells]
    labels = columns if is_crossed else rows
    return draw_bars(Bars(labels=labels, series=series, title=title, line=line, is_logarithmic=is_logarithmic))


PICTURES: Mapping[str, Callable[[Records], Figure]] = {
    "paper_figure_7.png": lambda records: bars(
        throughput.of_a_gpu(records),
        "MiCS figure 7: sequences a second of a V100\n(ours: calculated from compiled programs; nothing ran on a GPU)",
        line=0.0,
    ),
    "paper_figures_12_to_15.png": lambda records: bars(
        predictions.scale_model(records), "Throughput over that of the other; ours: measured on the scale model"
    ),
    "paper_figure_16.png": mics.plot,
    "paper_zeropp.png": lambda records: bars(
        zeropp.speed_up(records), "Throughput of ZeRO++ over ZeRO-3, 18 B on 384 V100; ours: replayed by the planner"
    ),
    "paper_compression.png": lambda records: bars(
        compression.ratios(records), "Times smaller than uncompressed gradients (logarithmic)", is_logarithmic=True
    ),
}
