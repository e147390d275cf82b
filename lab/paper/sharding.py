"""MiCS's table 1, ZeRO's tables 1 and 2, the plans of AMSP and PaRO, ZeRO++: sizes, model state, bytes, throughput."""

from lab.paper import published
from lab.paper.published import Cell, Comparison, Published, compared, over
from lab.paper.replays import shape_of
from lab.paper.traffic import PARAMETER_BYTES
from lab.records import Line, Records

GPUS = 1024  # of AMSP's and PaRO's plans, 8 in a node
BYTES = {"parameters": 2, "gradients": 2, "optimizer": 12}  # AMSP's, of a parameter: fp16, fp16, and all that is f32
CUTS = {"none": 1, "node": 8, "all": GPUS}  # over how many GPUs a scope cuts
# PaRO's nested plans for parameters, gradients, optimizer state: N not cut, I inside a node, G over all GPUs
PARO_PLANS = ("NNN", "NNI", "NNG", "NII", "NIG", "NGG", "III", "IIG", "IGG", "GGG")
PARO_SCOPES = {"N": "none", "I": "node", "G": "all"}
ZEROPP_GPUS, ZEROPP_PER_NODE = 384, 16
HALF = 2  # bytes of a parameter in M, the model in fp16


def sizes(records: Records) -> Comparison:
    """Returns billions of parameters: the formula 12 L h² + V h on table 1, and our configs."""
    cells = []
    for name, config in models().items():
        ours = records.line("compiled", kind="model", config=config)["num_params"]
        cells.append(Cell(row=name, published=shape_of(name).num_params / 1e9, ours=ours / 1e9))
    return Comparison(title="billions", cells=cells)


def models() -> dict[str, str]:
    """Returns the models of table 1 and our configs of them."""
    return {one.case: one.config for one in published.find("MiCS", "table 1", system="parameters")}


def state_bytes(line: Line) -> int:
    """Returns the bytes of the state on each device."""
    return sum(line["state_bytes"].values())


def zero_table_1(records: Records) -> Comparison:
    """Returns GB of model state on each device: on all numbers of devices for 7.5 B, on the most for larger models."""

    def ours(one: Published) -> float | None:
        if one.case != "7.5 B" and one.at != 1024:
            return None
        name = f"ZeRO {one.case}"
        return state_bytes(records.line("compiled", kind="state", name=name, strategy=one.ours, devices=one.at)) / 1e9

    cells = compared("ZeRO", "table 1", ours, row="{case}, N = {at}", column="{system}")
    return Comparison(title="GB", cells=[cell for cell in cells if cell.ours is not None], form="{:,.4g}")


def zero_table_2(records: Records) -> Comparison:
    """Returns billions of parameters of the largest model that fits, by model state alone."""

    def ours(one: Published) -> float:
        return records.line("compiled", kind="largest", strategy=one.ours)["num_params"] / 1e9

    cells = compared("ZeRO", "table 2", ours, row="{system}", case="largest model")
    return Comparison(title="billions", cells=cells, form="{:.1f}")


def scopes(records: Records) -> Comparison:
    """Returns GB of model state per GPU: the plans of AMSP and MiCS for 1024 GPUs, and PaRO's for LLaMA-7B."""
    plans: dict[str, list[int]] = {}
    groups: dict[str, int] = {}
    for one in published.find("AMSP", "plans for 1024 GPUs"):
        if one.system == "MiCS":
            groups[one.case] = int(one.value or 0)
        elif one.system in BYTES:
            plans.setdefault(one.case, []).append(int(one.value or 0))
    cells = []
    for model, cuts in plans.items():
        strategy = "/".join("none" if cut == 1 else f"{cut}" for cut in cuts)
        cells.append(_plan(records, f"{model}, AMSP {strategy}", model, strategy, cuts))
        mics = f"mics({groups[model]})"
        cells.append(_plan(records, f"{model}, {mics}", model, mics, 3 * [groups[model]]))
    for plan in PARO_PLANS:
        names = [PARO_SCOPES[letter] for letter in plan]
        cells.append(_plan(records, f"PaRO {plan}", f"PaRO {plan}", "/".join(names), [CUTS[name] for name in names]))
    return Comparison(title="GB", cells=cells)


def _plan(records: Records, row: str, name: str, strategy: str, cuts: list[int]) -> Cell:
    line = records.line("compiled", kind="state", name=name, strategy=strategy, devices=GPUS)
    formula = sum(size * line["num_params"] / cut for size, cut in zip(BYTES.values(), cuts, strict=True))
    return Cell(row=row, published=formula / 1e9, ours=state_bytes(line) / 1e9)


# ------------------------------------------------------------------------------------------------------- ZeRO++


def zeropp_in_all(records: Records) -> Comparison:
    """Returns the bytes between nodes per step in M: the small model's on the wire, the 18 B model's compiled."""
    cells = []
    for one in published.find("ZeRO++", "volume", case="in all"):
        plus = one.system == "ZeRO++"
        wire = records.line("papers", kind="wire", name=one.ours)
        item_bytes = HALF if plus else PARAMETER_BYTES
        small = wire["wire_tx_bytes"] / (3 / 4) / wire["num_params"] / item_bytes  # 3 / 4 of a pass cross 4 nodes
        line = records.line("compiled", kind="prediction", name="18B ZeRO++, 1K" if plus else "18B zero3 flat, 1K")
        sent = line["rates"]["100"]["inter_bytes"] * ZEROPP_PER_NODE / (HALF * line["num_params"])
        crossing = (ZEROPP_GPUS - ZEROPP_PER_NODE if plus else ZEROPP_GPUS - 1) / ZEROPP_GPUS  # fraction of a pass
        cells.append(Cell(row=one.system, column="25.6 M, on the wire", published=one.value, ours=small))
        cells.append(Cell(row=one.system, column="18 B, compiled", published=one.value, ours=sent / crossing))
    return Comparison(title="M", cells=cells, form="{:.3f}")


def zeropp_throughput(records: Records) -> Comparison:
    """Returns TFLOP/s per GPU for 18 B parameters on 384 V100; rematerialisation adds a fourth pass to three."""

    def ours(one: Published) -> float:
        return records.line("compiled", kind="prediction", name=one.ours)["rates"][f"{one.at}"]["tflops"] * 4 / 3

    cells = compared("ZeRO++", "18B", ours, row="{system}", column="{at} Gbit/s, {case}")
    return Comparison(title="TFLOP/s", cells=cells)


def zeropp_speed_up(records: Records) -> Comparison:
    """Returns the throughput of ZeRO++ divided by ZeRO-3's."""
    return Comparison(title="times", cells=over(zeropp_throughput(records).cells, "ZeRO-3"))
