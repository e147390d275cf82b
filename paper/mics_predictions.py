"""MiCS figures 8, 10 and 11 and section 5.1.5: our programs on the paper's clusters, mostly not compared."""

from collections.abc import Sequence
from typing import Any

from paper import published
from paper.mics_cells import tflops_of
from paper.mics_memory import Shape
from paper.mics_replayed import P3DN, P4D, PLANNER, Replay, as_replay, find, nothing_hidden_s, zero3_s
from paper.records import Records
from paper.tables import NONE, Row, Section, comparison, fixed, signed_percent, table

rate, times = fixed(2), fixed(2, " x")
FIGURES_8_10 = "figures 8 and 10"
SHAPES = (
    "The paper's 52B and 100B models are proprietary. Ours have GPT-2's layers with heads of 128: 64 layers of hidden "
    "8192 (52 B parameters), 80 of 10240 (101 B), sequences of 512. Groups of 128 GPUs for 100B, micro-batch 16 and 4 "
    "micro-steps are the paper's; groups of 64 for 52B are ours, and sequence length and model may be others there."
)


def section(records: Records) -> Section:
    """Returns the section. ValueError if a replay of WideResNet is missing."""
    lines = _newest(records)
    return Section(
        title="MiCS figures 8, 10, 11 and section 5.1.5: predictions",
        blocks=[
            f"{published.MICS}. MiCS alone, replayed as above: figure 11 on p3dn.24xlarge with the network of figure "
            "2, the others on p4d.24xlarge (8 A100 of 40 GB, 400 Gbit/s) with the planner's. A dash is a published "
            "value that is not in our table yet: those rows are predictions, made without it.",
            SHAPES,
            _table(lines),
            _figure_11(),
            *_wide_resnet(records),
            *_headlines(lines),
        ],
    )


def _figure_11() -> str:
    """Returns how the paper's own figures 7 and 11 differ."""
    figure_7, figure_11 = published.FIGURE_7["BERT 10B"]["MiCS"], published.FIGURE_11["BERT 10B, 128 layers"]
    lower = [1 - value / (whole * 127 / 128) for gpus, value in figure_11.items() if (whole := figure_7[gpus])]
    return (
        f"Figure 11's MiCS with 128 layers is {100 * min(lower):.0f} to {100 * max(lower):.0f} % slower than the same "
        "paper's figure 7 with 127 (per layer), at half the global batch. With groups of one node that can cost "
        "only hop two, once a step; the paper does not say what else differs."
    )


def _wide_resnet(records: Records) -> list[str]:
    """Returns the ratio that the paper gives for WideResNet beside ours."""
    mics, flat = (find(records, published.WIDE_RESNET, 16, strategy) for strategy in ("mics(8)", "zero3 flat"))
    over = zero3_s(flat)
    rows = [
        Row(
            what=f"{published.WIDE_RESNET}, 16 GPUs: MiCS over ZeRO-3",
            published=published.WIDE_RESNET_OVER_ZERO3,
            ours=over / step_s,
            how=f"mics(8) beside zero3 flat, compiled, replayed; of ZeRO-3 nothing overlaps{more}",
            form=times,
        )
        for step_s, more in ((mics.step_s, ""), (nothing_hidden_s(mics), ", of MiCS neither"))
    ]
    return [
        "Of WideResNet the paper's text gives one number, in float32 and with 8 images a GPU; the rest of the "
        f"comparison is as above. Ours computes {mics.compute_s:.2f} s of a step of {mics.step_s:.2f} s; ZeRO-3's "
        f"network is busy for {zero3_s(flat) - flat.compute_s:.2f} s.",
        comparison(rows),
    ]


def _headlines(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Returns what the paper says of 100B in its text beside ours; nothing if the replays are missing."""
    found = {line["gpus"]: line for line in lines if line["model"] == "GPT 100B"}
    if not {128, 512} <= found.keys():
        return []
    few, many = found[128], found[512]
    keys = many["keys"]
    shape = Shape(
        hidden=keys["model.hidden"],
        layers=keys["model.num_layers"],
        heads=keys["model.num_heads"],
        vocab=published.TABLE_1_SHAPES["GPT2 20B"][4],
        rows=many["micro_size"],
    )
    weak = many["sequences_per_s"] / few["sequences_per_s"] * few["gpus"] / many["gpus"]
    reached = tflops_of(shape, many["sequences_per_s"], many["gpus"])
    needs = sum(count for part, count in many["memory"].items() if part != "capacity")
    fits = "" if needs <= many["memory"]["capacity"] else "; it does not fit"
    how = f"GPT 100B, mics(128), replayed{fits}"
    rows = [
        Row(what="TFLOP/s of a GPU, 512 GPUs", published=published.TFLOPS_100B, ours=reached, how=how, form=fixed(1)),
        Row(
            what="throughput of a GPU, 512 over 128 GPUs",
            published=100 * published.WEAK_SCALING_100B,
            ours=100 * weak,
            how=how,
            form=fixed(1, " %"),
            points=True,
        ),
    ]
    return ["Of 100B the paper's text gives two numbers, for its own structure:", comparison(rows)]


def _newest(records: Records) -> list[dict[str, Any]]:
    """Returns the newest line of each prediction, in the order of the record."""
    found = {}
    for line in records.full_scale:
        of_figure_11 = line["model"] in (*published.FIGURE_11, published.WIDE_RESNET) and line["network"] != PLANNER
        if line["strategy"].startswith("mics") and (line["cluster"] == P4D or of_figure_11):
            found[line["model"], line["gpus"], line["strategy"], line["cluster"]] = line
    return sorted(found.values(), key=lambda line: (line["cluster"] != P3DN, line["num_params"], line["gpus"]))


def _table(lines: Sequence[dict[str, Any]]) -> str:
    names = {config: name for name, (_, config) in published.TABLE_1.items()}
    rows = []
    for line in lines:
        replay: Replay = as_replay(line)
        model, gpus = line["model"], line["gpus"]
        value = published.FIGURE_11.get(model, {}).get(gpus) if line["cluster"] == P3DN else None
        ours = replay.rate()
        figure = "figure 11" if line["cluster"] == P3DN else "5.1.5" if model.startswith("GPT ") else FIGURES_8_10
        memory = f"{replay.total_bytes / 1e9:.1f} GB{'' if replay.fits else ', does not fit'}"
        how = f"{line['strategy']}, {replay.how}"
        rows.append(
            [f"{figure}: {names.get(model, model)}, {gpus} GPUs", NONE if value is None else rate(value), rate(ours),
             NONE if value is None else signed_percent(ours / value - 1), memory, how]
        )  # fmt: skip
    return table(["", "published", "ours", "difference", "memory of a GPU", "how ours was obtained"], rows)
