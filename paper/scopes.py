"""AMSP and PaRO: parameters, gradients and optimizer state cut over different groups; memory and bytes beside ours."""

from paper import published_scopes as published
from paper.records import Records
from paper.tables import Row, Section, comparison, fixed

gigabytes, of_m = fixed(2, " GB"), fixed(3, " M")


def section(records: Records) -> Section:
    """Returns the section."""
    share = published.GPUS // published.GPUS_PER_NODE
    return Section(
        title="AMSP and PaRO: three scopes of different sizes",
        blocks=[
            f"{published.AMSP} and {published.PARO} cut parameters, gradients and optimizer state over groups of "
            "different sizes; here these are the three scopes of `sharding.strategy=custom`. **Memory** of a GPU on "
            f"{share} nodes of {published.GPUS_PER_NODE}: the formula 2Φ/p + 2Φ/g + 12Φ/o for cuts over p, g and o "
            "GPUs, with the Φ parameters of our LLaMA, and the bytes of our state from its shapes and shardings "
            "(`planner.table`). First AMSP's plans beside those of MiCS.",
            comparison(_amsp_memory(records), "formula"),
            "PaRO writes N for not cut, I for inside a node and G for all GPUs; `NIG` cuts the gradients inside a node "
            "and the optimizer state over all. LLaMA-7B:",
            comparison(_paro_memory(records), "formula"),
            "Ours hold f32 parameters and gradients (4 + 4 bytes) and two moments (8), the papers 2 + 2 and 12: where "
            "the optimizer state is cut further than the rest ours need up to twice as much, where all are cut alike "
            "the same, and in `NNN` the same too. PaRO's `ING`, gradients cut less than parameters, is none of ours: "
            "each scope must lie within the next. The papers' throughput was not compared: no GPU of ours was timed.",
            "**Bytes that a GPU sends a step** with AMSP's three plans, in M, the bytes of the model, by the paper's "
            "formulas with the factors of rings (gather and reduce-scatter (p-1)/p, all-reduce twice that, broadcast "
            "like a gather) and in our programs, compiled for 8 nodes of 8 and 4 micro-steps.",
            comparison([row for model in published.PLANS for row in _bytes(records, model)], "formula"),
            "In the micro-steps ours gather the embedding and the head once, not twice. Once a step AMSP all-reduces "
            "the gradients and then broadcasts the updated parameters; ours reduce-scatter the gradients to the "
            "optimizer's scope, all-reduce what is left over the replicas, and gather the parameters: together the "
            "bytes of AMSP's all-reduce alone.",
        ],
    )


def formula(cuts: tuple[int, int, int], num_params: float) -> float:
    """Returns the papers' bytes of model state on a GPU for cuts of parameters, gradients and optimizer state."""
    return sum(size * num_params / cut for size, cut in zip(published.BYTES, cuts, strict=True))


def micro_step_volume(parameters: int, micro_steps: int) -> float:
    """Returns AMSP's volume of a GPU in all micro-steps, in M: two gathers and a reduce-scatter."""
    return 3 * micro_steps * (parameters - 1) / parameters


def step_volume(parameters: int, optimizer: int, gpus: int) -> float:
    """Returns AMSP's volume of a GPU once a step, in M: an all-reduce of gradients, a broadcast of parameters."""
    replicas, owners = gpus // parameters, optimizer // parameters
    return (2 * (replicas - 1) / replicas + (owners - 1) / owners) / parameters


def _memory(records: Records, what: str, name: str, strategy: str, cuts: tuple[int, int, int]) -> Row:
    num_params, held = records.state_bytes(name, strategy, published.GPUS)
    theirs = formula(cuts, num_params) / 1e9
    how = f"{strategy}, {num_params / 1e9:.2f} B parameters, shapes"
    return Row(what=what, published=theirs, ours=held / 1e9, how=how, form=gigabytes)


def _amsp_memory(records: Records) -> list[Row]:
    rows = []
    for model, plan in published.PLANS.items():
        group = published.MICS_PLANS[model]
        rows.append(_memory(records, f"{model}, AMSP's plan", model, published.plan_strategy(model), plan))
        rows.append(_memory(records, f"{model}, MiCS' plan", model, f"mics({group})", (group, group, group)))
    return rows


def _paro_memory(records: Records) -> list[Row]:
    sizes = {"N": 1, "I": published.GPUS_PER_NODE, "G": published.GPUS}
    rows = []
    for letters in published.PARO_PLANS:
        parameters, gradients, optimizer = (sizes[letter] for letter in letters)
        strategy, cuts = published.paro_strategy(letters), (parameters, gradients, optimizer)
        rows.append(_memory(records, letters, f"PaRO {letters}", strategy, cuts))
    return rows


def _bytes(records: Records, model: str) -> list[Row]:
    step, (parameters, _, optimizer) = records.paper_step(f"AMSP {model}"), published.PLANS[model]
    once = step.sent("hop two", "parameter scope") / step.model_bytes
    often = step.sent("gather", "hop one") / step.model_bytes if parameters > 1 else 0.0
    how = f"{step.strategy}, compiled"
    return [
        Row(
            what=f"plan of {model}, {step.accum} micro-steps",
            published=micro_step_volume(parameters, step.accum),
            ours=often,
            how=f"{how}, gathers and hop one",
            form=of_m,
        ),
        Row(
            what=f"plan of {model}, once a step",
            published=step_volume(parameters, optimizer, step.num_devices),
            ours=once,
            how=f"{how}, hop two and updated parameters",
            form=of_m,
        ),
    ]
