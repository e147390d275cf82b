"""ZeRO: its table 1, the bytes of model state per device, and the communication volumes."""

import math

from paper import published
from paper.records import Records
from paper.tables import Row, Section, comparison, fixed, table

NODES, N = 4, 8
# Ours: bytes per parameter of f32 parameters, gradients, and Adam's two moments: (not partitioned, partitioned)
OUR_BYTES = {"zero1": (8, 8), "zero2": (4, 12), "zero3": (0, 16)}
STAGES = {"zero1": "P_os", "zero2": "P_os+g", "zero3": "P_os+g+p"}
ours_form = fixed(3, " bytes")


def section(records: Records) -> Section:
    """Returns the section."""
    cells, equal = _table_1()
    return Section(
        title="ZeRO table 1 and communication volumes",
        blocks=[
            f"{published.ZERO}, table 1: GB of model state on each device, for 16 bytes a parameter (2 + 2 of fp16 "
            "parameters and gradients, 12 of f32 parameters and Adam's moments): 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N. "
            "Each cell is the formula's value, cut to the printed digits; the paper rounds where it prints decimals "
            f"and truncates whole numbers (4187.5 is printed as 4187). {equal} cells equal the published ones; any "
            "other shows the published number in brackets.",
            cells,
            "**Bytes a parameter on each device**, from the shapes and shardings of the state that the step is "
            f"compiled for, N = {N}. Ours holds f32 parameters (4 bytes), gradients (4) and Adam's two moments (8): "
            "16 as in the paper, but 4 of them go with the parameters and 4 with the gradients, where the paper's K "
            "= 12 all go with the optimizer. So P_os saves less in f32, and the whole partition the same. The first "
            "row of a stage is the paper's formula, the second is ours.",
            comparison(_state(records), "formula"),
            "**Volume of communication**, a step of one micro-step, in parameters that a device sends: bytes in the "
            "compiled program over 4Ψ(N-1)/N. ZeRO-3 gathers the embedding and the head once, not twice.",
            comparison(_volumes(records)),
        ],
    )


def formula_gb(billions: float, stage: str, devices: int) -> float:
    """Returns GB of model state per device."""
    whole, cut = published.ZERO_BYTES[stage]
    return billions * (whole + cut / devices)


def as_printed(value: float, like: str) -> str:
    """Returns a number with the digits of `like`: decimals rounded half up, whole numbers truncated."""
    decimals = len(like.partition(".")[2])
    if not decimals:
        return str(math.floor(value))
    return f"{math.floor(value * 10**decimals + 0.5) / 10**decimals:.{decimals}f}"


def _table_1() -> tuple[str, str]:
    """Returns the table, and the number of cells that equal the published ones."""
    columns = [(size, stage) for size in published.ZERO_TABLE_1_BILLIONS for stage in STAGES]
    rows, equal = [], 0
    for devices, printed in published.ZERO_TABLE_1.items():
        row = [f"{devices}"]
        for (size, stage), cell in zip(columns, printed, strict=True):
            ours = as_printed(formula_gb(size, stage, devices), cell)
            equal += ours == cell
            row.append(ours if ours == cell else f"{ours} ({cell})")
        rows.append(row)
    head = ["N"] + [f"{size:g} B, {STAGES[stage]}" for size, stage in columns]
    return table(head, rows), f"{equal} of {len(rows) * len(columns)}"


def _state(records: Records) -> list[Row]:
    rows = []
    for stage, name in STAGES.items():
        step = records.step("zero3 flat" if stage == "zero3" else stage, nodes=NODES, accum=1)
        held = sum(step.state_bytes.values()) / step.num_params
        for whose, (whole, cut) in (("the paper's", published.ZERO_BYTES[stage]), ("f32", OUR_BYTES[stage])):
            terms = [f"{whole}"] * bool(whole) + [f"{cut}/N"]
            what = f"{name}, {whose} {' + '.join(terms)}"
            how = f"{step.strategy}, {step.num_params / 1e6:.1f} M parameters"
            rows.append(Row(what=what, published=whole + cut / N, ours=held, how=how, form=ours_form))
    return rows


def _volumes(records: Records) -> list[Row]:
    rows = []
    for strategy, volume in published.ZERO_VOLUME.items():
        step = records.step(strategy, nodes=NODES, accum=1)
        ours = step.sent() / (step.model_bytes * (N - 1) / N)
        rows.append(Row(what=strategy, published=volume, ours=ours, how="all collectives", form=fixed(3, " Ψ")))
    return rows
