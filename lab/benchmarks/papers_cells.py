"""The cells of lab/benchmarks/papers.py: each is one line of papers.jsonl in lab/benchmarks/results."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lab.benchmarks.compiled import Case
from lab.paper.model_state import PARO_PLANS, amsp_plans, amsp_strategy, mics_groups, paro_strategy

KINDS = ("state", "largest", "step", "wire", "prediction")
MEMORY_BYTES = 32e9  # of a GPU in ZeRO's table 2
RATES_GBIT = (100, 200, 400, 800)  # of a node's link in ZeRO++'s figures
# the parts of ZeRO++ (arXiv 2306.10209), as keys of a config under zero3
HPZ = {"sharding.gather": "node"}
QWZ = {"compression.gather_inter": "int8"}
QGZ = {"compression.hop_one_inter": "int4", "compression.hop_one_intra": "int4"}
ZEROPP = {"zero3 hpZ": HPZ, "zero3 qwZ": QWZ, "zero3 qgZ": QGZ, "ZeRO++": HPZ | QWZ | QGZ}
# ZeRO's table 1 by billions of parameters: layers, hidden (our choice; the paper has none)
ZERO_MODELS = {7.5: (65, 3072), 128: (158, 8192), 1000: (127, 25600)}
# LLaMA (arXiv 2302.13971, table 2; the MLP's width is that of the released models): layers, hidden, MLP, heads
LLAMA = {
    "LLaMA-7B": (32, 4096, 11008, 32),
    "LLaMA-13B": (40, 5120, 13824, 40),
    "LLaMA-30B": (60, 6656, 17920, 52),
}
POWER_SGD_RANKS = (1, 2, 4)
DILOCO_STEPS = 500  # between two meetings (arXiv 2311.08105)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one line of the record says: a kind of measurement, of a config on a cluster."""

    kind: str
    name: str  # that tables find it by
    case: Case
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the case's config

    @property
    def num_devices(self) -> int:
        """Devices that the measuring process needs."""
        return self.case.nodes * self.case.devices_per_node

    @property
    def key(self) -> dict[str, Any]:
        """The part of the line that tells it from others."""
        about = {"kind": self.kind, "name": self.name, "devices": self.num_devices}
        return {**about, **asdict(self.case), "changes": dict(self.changes)}


def cells() -> Iterator[Cell]:
    """Yields all cells."""
    yield from _zero()
    yield from _scopes()
    yield from _zeropp()
    yield from _resnets()
    yield from _diloco()


def _case(strategy: str, nodes: int, devices_per_node: int, *, accum: int = 1, config: str = "standard") -> Case:
    return Case(config=config, nodes=nodes, devices_per_node=devices_per_node, accum=accum, strategy=strategy)


def gpt(layers: int, hidden: int) -> dict[str, Any]:
    """Returns the keys of a decoder in GPT-2's style with GPT-2's vocabulary."""
    sizes = {"num_layers": layers, "hidden": hidden, "intermediate": 4 * hidden, "vocab_size": 50257}
    heads = {"num_heads": hidden // 128, "num_kv_heads": hidden // 128}
    return {f"model.{key}": value for key, value in (sizes | heads | {"tied_head": True}).items()}


def llama(name: str) -> dict[str, Any]:
    """Returns the keys of a LLaMA."""
    layers, hidden, mlp, heads = LLAMA[name]
    sizes = {"num_layers": layers, "hidden": hidden, "intermediate": mlp, "num_heads": heads, "num_kv_heads": heads}
    style = {"vocab_size": 32000, "positions": "rotary", "norm": "rms", "activation": "swiglu", "tied_head": False}
    return {f"model.{key}": value for key, value in (sizes | style).items()}


def _zero() -> Iterator[Cell]:
    for billions, sizes in ZERO_MODELS.items():
        for devices in (4, 16, 64, 256, 1024) if billions == 7.5 else (1024,):
            for stage in ("zero1", "zero2", "zero3"):
                case = _case(stage, devices // 4, 4)
                yield Cell(kind="state", name=f"ZeRO {billions:g} B", case=case, changes=gpt(*sizes))
    for stage in ("ddp", "zero1", "zero2", "zero3"):
        yield Cell(kind="largest", name="ZeRO table 2", case=_case(stage, 4, 16), changes=gpt(1, 2048))


def _scopes() -> Iterator[Cell]:
    for model, group in mics_groups().items():
        for strategy in (amsp_strategy(model), f"mics({group})"):
            yield Cell(kind="state", name=model, case=_case(strategy, 128, 8), changes=llama(model))
    for letters in PARO_PLANS:
        case = _case(paro_strategy(letters), 128, 8)
        yield Cell(kind="state", name=f"PaRO {letters}", case=case, changes=llama("LLaMA-7B"))
    for model in amsp_plans():
        case = _case(amsp_strategy(model), 8, 8, accum=4, config="quickstart")
        yield Cell(kind="step", name=f"AMSP {model}", case=case)


def _zeropp() -> Iterator[Cell]:
    for name, changes in ZEROPP.items():
        yield Cell(kind="step", name=name, case=_case("zero3", 4, 2), changes=changes)
    for name, changes in (("zero3", {}), ("ZeRO++", ZEROPP["ZeRO++"])):
        yield Cell(kind="wire", name=name, case=_case("zero3", 4, 2), changes=changes)
    model = {"num_layers": 40, "hidden": 6144, "intermediate": 24576, "num_heads": 32, "num_kv_heads": 32}
    keys: dict[str, Any] = {f"model.{key}": value for key, value in (model | {"max_len": 1024}).items()}
    keys |= {"data.seq_len": 1024, "sharding.strategy": "zero3", "sharding.partition_size": 0}
    for rows in (1, 2):
        batch = {"batch.global_size": 384 * rows, "batch.micro_size": rows}
        for name, changes in (("zero3 flat", {"sharding.hierarchical": False}), ("ZeRO++", ZEROPP["ZeRO++"])):
            case = _case("zero3", 24, 16, config="gpt2_20b")
            yield Cell(kind="prediction", name=f"18B {name}, {rows}K", case=case, changes=keys | batch | changes)


def _diloco() -> Iterator[Cell]:
    steps = {"local_sgd.inner_steps": DILOCO_STEPS, "num_steps": DILOCO_STEPS}
    yield Cell(kind="step", name="DiLoCo", case=_case("ddp", 4, 2), changes=steps)


def _resnets() -> Iterator[Cell]:
    yield Cell(kind="state", name="ResNet-50", case=_case("ddp", 4, 1, config="resnet50"))
    shapes = {"stem": "conv3", "block": "basic", "stage_blocks": (2, 2, 2, 2), "width": 64, "channels": 3}
    shapes |= {"num_classes": 10, "class_multiple": 2, "compute_dtype": "float32"}
    keys = {f"model.{key}": value for key, value in shapes.items()}
    keys |= {"data.source": "tfds:cifar10", "data.image_size": 32, "data.augment": "none"}
    for rank in POWER_SGD_RANKS:
        codec = {"compression.hop_two": "power_sgd", "compression.rank": rank}
        case = _case("ddp", 4, 1, config="resnet50")
        yield Cell(kind="step", name=f"ResNet-18 power_sgd {rank}", case=case, changes=keys | codec)
