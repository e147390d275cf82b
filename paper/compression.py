"""The papers about compressed gradients and rarer exchanges: how many times smaller, and what it costs."""

from math import log
from statistics import fmean

from paper import published
from paper.records import PARAMETER_BYTES, Line, Records, Step
from paper.scores import Cell, Comparison, table

NODES = 4  # of the recorded runs
MIB = 2**20
DGC_SHARE = 0.001  # of the values that are sent
EPOCH_STEPS = 50_000 // (16 * 128)  # PowerSGD: whole batches of 128 images on each of 16 GPUs
# our method: the paper, its case, and the systems with and without compression
COSTS = {
    "dgc, 99.9 %, SGD": ("DGC", "ResNet-50 on ImageNet", "with DGC"),
    "dgc, 99 %, SGD": ("DGC", "ResNet-110 on CIFAR-10, 4 GPUs", "with DGC"),
    "one_bit_adam, AdamW": ("1-bit Adam", "BERT-Base on MNLI", "with 1-bit Adam"),
    "power_sgd, rank 4, SGD": ("PowerSGD", "ResNet-18 on CIFAR-10", "with rank 4"),
    "two_bit, SGD": None,
}


def _run(records: Records, codec: str) -> Line:
    """Returns the newest valid run of a codec, or one that is superseded where there is no other."""
    found = records.lines("compression", superseded=True, kind="step", codec=codec)
    if not found:
        raise ValueError(
            f"measured/compression.jsonl has no step with {codec}; python -m benchmarks.compression adds it"
        )
    return next((line for line in found if "superseded" not in line), found[0])


def on_wire(records: Records, codec: str) -> float:
    """Returns how many times fewer bytes a node sends with a codec of hop two, on the wire."""
    return _run(records, "none")["wire_tx_bytes"] / _run(records, codec)["wire_tx_bytes"]


def sparse_on_wire(records: Records) -> float:
    """Returns the bytes of the gradients over those of one node's encoded values, which go to all other nodes."""
    gradients = _run(records, "none")["compiled_inter_bytes"] / (2 * (NODES - 1) / NODES)
    return gradients / (_run(records, "dgc")["wire_tx_bytes"] / (NODES - 1))


def dgc_is_superseded(records: Records) -> bool:
    """Returns whether DGC was not measured again since it was rewritten."""
    return "superseded" in _run(records, "dgc")


def _encoded(records: Records, codec: str) -> float:
    """Returns how many times smaller than f32 a codec's values are, without headers."""
    codec_bytes, half = (
        records.lines("compression", superseded=True, kind="codec", codec=name)[0]["payload_bytes"]
        for name in (codec, "bf16")
    )
    return 2 * half / codec_bytes


def ratios(records: Records) -> Comparison:
    """Returns how many times smaller each method makes the gradients."""
    sparse, old = sparse_on_wire(records), ", before its rewrite" if dgc_is_superseded(records) else ""
    bound = PARAMETER_BYTES / (published.value("DGC", "encoding") * DGC_SHARE)
    cells = [Cell(row=f"DGC 99.9 %{old}: by the formula", published=bound, ours=sparse)]
    for one in published.find("DGC", "tables 3 to 5"):
        cells.append(Cell(row=f"DGC 99.9 %{old}: {one.case}", published=one.value, ours=sparse))
    two_bit, one_bit = published.value("MXNet", "2 bits"), published.value("1-bit Adam", "after the warm-up")
    adam = on_wire(records, "one_bit") / 2  # against fp16
    cells += [
        Cell(row="MXNet, 2 bits: encoded values", published=two_bit, ours=_encoded(records, "two_bit")),
        Cell(row="MXNet, 2 bits: on the wire", published=two_bit, ours=on_wire(records, "two_bit")),
        Cell(row="1-bit Adam over fp16: encoded values", published=one_bit, ours=_encoded(records, "one_bit") / 2),
        Cell(row="1-bit Adam over fp16: on the wire", published=one_bit, ours=adam),
    ]
    for one in published.find("1-bit Adam", "whole run"):
        share = float(one.case.removeprefix("warm-up of ").removesuffix("%")) / 100
        cells.append(Cell(row=f"1-bit Adam, {one.case}", published=one.value, ours=1 / (share + (1 - share) / adam)))
    steps = published.value("DiLoCo", "times smaller")
    often = steps * records.step("ddp", nodes=NODES, accum=1).link() / records.paper_step("DiLoCo").link()
    cells.append(Cell(row="DiLoCo, 500 steps between exchanges", published=steps, ours=often))
    return Comparison(title="times smaller", cells=cells, form="{:.1f}")


def epoch_mib(step: Step) -> float:
    """Returns what a device hands to the collectives of hop two in an epoch, in MiB."""
    return EPOCH_STEPS * sum(c["payload_bytes"] * c["times"] for c in step.collectives if c["name"] == "hop two") / MIB


def power_sgd(records: Records) -> Comparison:
    """Returns MiB of gradients in an epoch of ResNet-18, and the size of ResNet-50's."""
    cells = []
    for one in published.find("PowerSGD", "data an epoch"):
        step = records.paper_step(
            f"ResNet-18 power_sgd {one.system.removeprefix('rank ') if one.system != 'SGD' else 1}"
        )
        ours = EPOCH_STEPS * step.model_bytes / MIB if one.system == "SGD" else epoch_mib(step)
        cells.append(Cell(row=f"ResNet-18, an epoch, {one.system}", published=one.value, ours=ours))
    whole = PARAMETER_BYTES * records.state_bytes("ResNet-50", "ddp", NODES)[0] / MIB
    cells.append(Cell(row="ResNet-50, all gradients", published=published.value("DGC", "table 3"), ours=whole))
    return Comparison(title="MiB", cells=cells, form="{:,.1f}")


def _mean(records: Records, task: str, method: str, key: str) -> float:
    found = [line[key] for line in records.lines("accuracy", task=task, method=method)]
    if not found:
        raise ValueError(f"measured/accuracy.jsonl has no {method} on {task}; python -m benchmarks.accuracy adds it")
    return fmean(found)


def change(records: Records, method: str) -> float:
    """Returns the accuracy on the digits minus that of the dense runs with the same optimizer, in points."""
    dense = f"dense, {method.rpartition(', ')[2]}"
    ours, without = (_mean(records, "digits", name, "validation_accuracy") for name in (method, dense))
    return 100 * (ours - without)


def costs(records: Records) -> Comparison:
    """Returns by how many points the accuracy changes, published and on the digits."""
    cells = []
    for method, paper in COSTS.items():
        row, theirs = f"MXNet: not measured; ours {method}", None
        if paper:
            name, case, system = paper
            row = f"{name}, {case}; ours {method}"
            theirs = published.value(name, "accuracy", case=case, system=system)
            theirs -= published.value(name, "accuracy", case=case, system="without")
        cells.append(Cell(row=row, published=theirs, ours=change(records, method)))
    return Comparison(title="points", cells=cells, points=True)


def diloco(records: Records) -> str:
    """Returns DiLoCo's loss less that of data parallelism with the same batch."""
    theirs, dense = (published.value("DiLoCo", "perplexity", system=name) for name in ("DiLoCo", "data parallel"))
    loss, without = (
        _mean(records, "text", name, "validation_loss") for name in ("DiLoCo, 10 steps, AdamW", "dense, AdamW")
    )
    rows = [
        ["published: 150 M parameters, C4, 8 workers, 500 steps apart", f"{log(theirs / dense):+.3f}"],
        ["ours: 0.1 M parameters, source text, 4 replicas, 10 steps apart, 3 seeds", f"{loss - without:+.3f}"],
    ]
    return table(["", "change of the loss"], rows)
