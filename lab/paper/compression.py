"""The papers about compressed gradients and rarer exchanges: how many times smaller, and what it costs."""

from math import log
from statistics import fmean

from lab.paper import published
from lab.paper.published import Published
from lab.paper.scores import Cell, Comparison, compared
from lab.paper.traffic import PARAMETER_BYTES, step
from lab.records import Line, Records, archived
from runtime.files.pages import markdown

NODES = 4  # of the recorded runs
MIB = 2**20
DGC_SHARE = 0.001  # of the values that are sent
EPOCH_STEPS = 50_000 // (16 * 128)  # PowerSGD: whole batches of 128 images on each of 16 GPUs


def _newest(records: Records, kind: str, codec: str) -> Line:
    """Returns the first line of a codec, from the archive if the codec has left the core. ValueError without one."""
    lines = [*records.lines("compression"), *archived("compression")]
    found = next((line for line in lines if (line["kind"], line["codec"]) == (kind, codec)), None)
    if found is None:
        raise ValueError(f"compression.jsonl has no {kind} with {codec}; python -m lab.benchmarks.compression adds it")
    return found


def _on_wire(records: Records, codec: str) -> float:
    """Returns how many times fewer bytes a node sends with a codec of all-reduce, on the wire."""
    dense, coded = (_newest(records, "step", name)["wire_tx_bytes"] for name in ("none", codec))
    return dense / coded


def _encoded(records: Records, codec: str) -> float:
    """Returns how many times smaller than f32 a codec's values are, without headers."""
    size, half = (_newest(records, "codec", name)["payload_bytes"] for name in (codec, "bf16"))
    return 2 * half / size


def ratios(records: Records) -> Comparison:
    """Returns how many times smaller each method makes the gradients."""
    # DGC: bytes of the gradients over those of one node's values, which go to all other nodes
    gradients = _newest(records, "step", "none")["compiled_inter_bytes"] / (2 * (NODES - 1) / NODES)
    run = _newest(records, "step", "dgc")
    dgc = gradients / (run["wire_tx_bytes"] / (NODES - 1))
    name = "DGC 99.9 %, before its rewrite"
    bound = PARAMETER_BYTES / (published.value("DGC", "encoding") * DGC_SHARE)
    adam = _on_wire(records, "one_bit") / 2  # against fp16

    def with_warm_up(one: Published) -> float:
        share = float(one.case.removeprefix("warm-up of ").removesuffix("%")) / 100
        return 1 / (share + (1 - share) / adam)

    two_bit, one_bit = published.value("MXNet", "2 bits"), published.value("1-bit Adam", "after the warm-up")
    steps = published.value("DiLoCo", "times smaller")
    cells = [
        Cell(row=f"{name}: by the formula", published=bound, ours=dgc),
        *compared("DGC", "tables 3 to 5", lambda _: dgc, row=f"{name}: {{case}}"),
        Cell(row="MXNet, 2 bits: encoded values", published=two_bit, ours=_encoded(records, "two_bit")),
        Cell(row="MXNet, 2 bits: on the wire", published=two_bit, ours=_on_wire(records, "two_bit")),
        Cell(row="1-bit Adam over fp16: encoded values", published=one_bit, ours=_encoded(records, "one_bit") / 2),
        Cell(row="1-bit Adam over fp16: on the wire", published=one_bit, ours=adam),
    ]
    cells += compared("1-bit Adam", "whole run", with_warm_up, row="1-bit Adam, {case}")
    often = steps * step(records, "ddp").link() / step(records, "DiLoCo").link()
    cells.append(Cell(row="DiLoCo, 500 steps between exchanges", published=steps, ours=often))
    return Comparison(title="times smaller", cells=cells, form="{:.1f}")


def power_sgd(records: Records) -> Comparison:
    """Returns MiB that a device hands to all-reduce in an epoch of ResNet-18, and the size of ResNet-50's gradients."""

    def ours(one: Published) -> float:
        found = step(records, one.ours)
        all_reduce = sum(
            c["payload_bytes"] * c["times"] for c in found.collectives if c["name"] == "replica-all-reduce"
        )
        return EPOCH_STEPS * (found.model_bytes if one.system == "SGD" else all_reduce) / MIB

    cells = compared("PowerSGD", "data an epoch", ours, row="{case}, {system}")
    whole = PARAMETER_BYTES * records.line("compiled", kind="state", name="ResNet-50")["num_params"] / MIB
    cells.append(Cell(row="ResNet-50, all gradients", published=published.value("DGC", "table 3"), ours=whole))
    return Comparison(title="MiB", cells=cells, form="{:,.1f}")


def _mean(records: Records, task: str, method: str, key: str) -> float:
    found = [line[key] for line in records.lines("accuracy", task=task, method=method)]
    if not found:
        raise ValueError(f"accuracy.jsonl has no {method} on {task}; python -m lab.benchmarks.accuracy adds it")
    return fmean(found)


def change(records: Records, method: str) -> float:
    """Returns the accuracy on the digits minus that of the dense runs with the same optimizer, in points."""
    dense = f"dense, {method.rpartition(', ')[2]}"
    ours, without = (_mean(records, "digits", name, "validation_accuracy") for name in (method, dense))
    return 100 * (ours - without)


def costs(records: Records) -> Comparison:
    """Returns by how many points the accuracy changes, published and on the digits; MXNet published none."""
    cells = []
    for paper in ("DGC", "1-bit Adam", "PowerSGD"):
        bars = published.find(paper, "accuracy")
        without = {bar.case: bar.value or 0.0 for bar in bars if bar.system == "without"}
        for bar in bars:
            if bar.ours:
                row = f"{paper}, {bar.case}; ours {bar.ours}"
                theirs = (bar.value or 0.0) - without[bar.case]
                cells.append(Cell(row=row, published=theirs, ours=change(records, bar.ours)))
    cells.append(Cell(row="MXNet; ours two_bit, SGD", published=None, ours=change(records, "two_bit, SGD")))
    return Comparison(title="points", cells=cells, points=True)


def diloco(records: Records) -> str:
    """Returns DiLoCo's loss less that of data parallelism with the same batch."""
    theirs, dense = (published.value("DiLoCo", "perplexity", system=name) for name in ("DiLoCo", "data parallel"))
    methods = ("DiLoCo, 10 steps, AdamW", "dense, AdamW")
    loss, without = (_mean(records, "text", name, "validation_loss") for name in methods)
    rows = [
        ["published: 150 M parameters, C4, 8 workers, 500 steps apart", f"{log(theirs / dense):+.3f}"],
        ["ours: 0.1 M parameters, source text, 4 replicas, 10 steps apart, 3 seeds", f"{loss - without:+.3f}"],
    ]
    return markdown(["", "change of the loss"], rows)
