"""ZeRO's tables 1 and 2, and the plans of AMSP and PaRO: bytes of model state on each device, published and ours."""

from lab.paper import published
from lab.paper.records import Records
from lab.paper.scores import Cell, Comparison

GPUS = 1024  # of AMSP's and PaRO's plans, 8 in a node
BYTES = {"parameters": 2, "gradients": 2, "optimizer": 12}  # AMSP's, of a parameter: fp16, fp16, and all that is f32
# PaRO's nested plans for parameters, gradients, optimizer state: N not cut, I inside a node, G over all GPUs
PARO_PLANS = ("NNN", "NNI", "NNG", "NII", "NIG", "NGG", "III", "IIG", "IGG", "GGG")
PARO_CUTS = {"N": 1, "I": 8, "G": GPUS}
NAMES = {1: "none", 8: "node", GPUS: "all"}  # of PaRO's cuts, in strategies of ours


def zero_table_1(records: Records) -> Comparison:
    """Returns GB of model state on each device: on all numbers of devices for 7.5 B, on the most for larger models."""
    cells = []
    for one in published.find("ZeRO", "table 1"):
        if one.case == "7.5 B" or one.at == 1024:
            _, held = records.state_bytes(f"ZeRO {one.case}", one.ours, one.at)
            row = f"{one.case}, N = {one.at}"
            cells.append(Cell(row=row, column=one.system, published=one.value, ours=held / 1e9))
    return Comparison(title="GB", cells=cells, form="{:,.4g}")


def zero_table_2(records: Records) -> Comparison:
    """Returns billions of parameters of the largest model that fits, by model state alone."""
    cells = []
    for one in published.find("ZeRO", "table 2", case="largest model"):
        found = records.line("papers", kind="largest", name="ZeRO table 2", strategy=one.ours)
        cells.append(Cell(row=one.system, published=one.value, ours=found["num_params"] / 1e9))
    return Comparison(title="billions", cells=cells, form="{:.1f}")


def amsp_plans() -> dict[str, tuple[int, ...]]:
    """Returns over how many GPUs AMSP cuts parameters, gradients and optimizer state of each model."""
    found: dict[str, tuple[int, ...]] = {}
    for one in published.find("AMSP", "plans for 1024 GPUs"):
        if one.system in BYTES:
            found[one.case] = (*found.get(one.case, ()), int(one.value or 0))
    return found


def mics_groups() -> dict[str, int]:
    """Returns over how many GPUs MiCS cuts each model, as AMSP says."""
    return {one.case: int(one.value or 0) for one in published.find("AMSP", "plans for 1024 GPUs", system="MiCS")}


def amsp_strategy(model: str) -> str:
    """Returns AMSP's plan of a model as the name of a strategy of ours."""
    return "/".join("none" if cut == 1 else f"{cut}" for cut in amsp_plans()[model])


def paro_strategy(letters: str) -> str:
    """Returns one of PaRO's plans as the name of a strategy of ours."""
    return "/".join(NAMES[PARO_CUTS[letter]] for letter in letters)


def scopes(records: Records) -> Comparison:
    """Returns GB of model state of a GPU of 1024 under AMSP's plans, those of MiCS, and PaRO's for LLaMA-7B."""
    cases = []
    for model, cuts in amsp_plans().items():
        group = mics_groups()[model]
        cases.append((f"{model}, AMSP {amsp_strategy(model)}", model, amsp_strategy(model), cuts))
        cases.append((f"{model}, mics({group})", model, f"mics({group})", 3 * (group,)))
    for plan in PARO_PLANS:
        cases.append((f"PaRO {plan}", f"PaRO {plan}", paro_strategy(plan), tuple(PARO_CUTS[cut] for cut in plan)))
    cells = []
    for row, name, strategy, cuts in cases:
        num_params, held = records.state_bytes(name, strategy, GPUS)
        formula = sum(size * num_params / cut for size, cut in zip(BYTES.values(), cuts, strict=True))
        cells.append(Cell(row=row, published=formula / 1e9, ours=held / 1e9))
    return Comparison(title="GB", cells=cells)
