"""The cells of lab/benchmarks/full_scale.py: programs of the MiCS paper's throughput figures at their full size."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lab.benchmarks.names import config_file, sharding_of
from lab.paper import published
from lab.paper.replays import P3DN, P4D

PER_NODE = 8
A100_GPUS = (16, 32, 64)
FIGURES = ("figure 7", "figure 12", "figure 13b", "figure 14", "figure 15")  # on V100
WIDE = {"model.num_layers": 80, "model.intermediate": 20480}  # figure 11b: ffn of 8 x hidden
WIDE_RESNET = "WideResNet 3B"
BERT_LARGE = "BERT large"
BERT_LARGE_KEYS = {"model.num_layers": 24, "model.hidden": 1024, "model.intermediate": 4096, "model.vocab_size": 30528}
BERT_LARGE_KEYS |= {"model.num_heads": 16, "mesh.devices_per_node": 1}
# 5.1.5 gives no structure, only sizes: GPT-2 shapes of heads of 128 near them, 12 L h² + V h
GPT_52B = {"model.num_layers": 64, "model.hidden": 8192, "model.intermediate": 32768, "model.num_heads": 64}
GPT_100B = {"model.num_layers": 80, "model.hidden": 10240, "model.intermediate": 40960, "model.num_heads": 80}
for _keys in (GPT_52B, GPT_100B):
    _keys["model.num_kv_heads"] = _keys["model.num_heads"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A step to compile and to replay; `strategy` is its name in the records, such as "mics(16) flat"."""

    model: str  # what the tables call it
    config: str  # file in configs, or model of configs/mics_paper.py
    gpus: int
    strategy: str
    cluster: str = P3DN
    micro_size: int = 8
    global_size: int = 8192
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the config, beyond the strategy
    is_weak: bool = False  # whether more GPUs have a larger batch, in proportion

    @property
    def compiled(self) -> "Cell":
        """The cell whose program is compiled for this one: two partition groups, if there are more (`resized`)."""
        mics = re.match(r"mics\((\d+)\)", self.strategy)
        gpus = min(self.gpus, 2 * int(mics[1])) if mics else self.gpus
        rows = self.global_size * gpus // self.gpus if self.is_weak else self.global_size
        return replace(self, gpus=gpus, global_size=rows)

    @property
    def name(self) -> str:
        """What a line of the record is found by."""
        return f"{self.model}, {self.strategy}, {self.gpus} GPUs of {self.cluster}"

    @property
    def words(self) -> list[str]:
        """The config, as on a command line."""
        keys = {f"sharding.{key}": value for key, value in sharding_of(self.strategy).items()}
        keys |= {"batch.micro_size": self.micro_size, "batch.global_size": self.global_size, **self.keys}
        return [f"--config={config_file(self.config)}", *(f"--config.{key}={value}" for key, value in keys.items())]


def cells() -> list[Cell]:
    """Returns all cells, those of figures 7, 9 and 12 to 15 first."""
    return [*of_figures(), *predictions(), *wide_resnet(), one_gpu()]


def of_figures() -> list[Cell]:
    """Returns the steps that the bars of the paper's figures are compared with; of MiCS also where it had no room."""
    found: dict[str, Cell] = {}
    for bar in (bar for figure in FIGURES for bar in published.find("MiCS", figure)):
        if bar.value is not None or bar.system == "MiCS":
            micro_size = 4 if bar.system == "ZeRO-2" else 8
            cell = Cell(model=bar.config, config=bar.config, gpus=bar.at, strategy=bar.ours, micro_size=micro_size)
            found[cell.name] = cell
    return [*found.values()]


def predictions() -> list[Cell]:
    """Returns MiCS in figure 11, which has published values, and what has none here: p4d, and 52B and 100B."""
    found = []
    for label, keys in (("BERT 10B, 128 layers", {"model.num_layers": 128}), ("BERT 10B, 80 wide layers", WIDE)):
        for gpus in A100_GPUS:
            found.append(
                Cell(model=label, config="bert_10b", gpus=gpus, strategy="mics(8)", global_size=4096, keys=keys)
            )
    for model, keys, group in (("GPT 100B", GPT_100B, 128), ("GPT 52B", GPT_52B, 64)):
        for gpus in (128, 256, 512):
            found.append(
                Cell(
                    model=model, config="gpt2_20b", gpus=gpus, strategy=f"mics({group})", cluster=P4D,
                    micro_size=16, global_size=64 * gpus, keys=keys, is_weak=True,
                )
            )  # fmt: skip
    for model in ("roberta_20b", "gpt2_20b"):
        found += [Cell(model=model, config=model, gpus=gpus, strategy="mics(16)", cluster=P4D) for gpus in A100_GPUS]
    for one in published.find("MiCS", "table 1", system="GPUs of a group"):
        group = int(one.value or 0)
        sizes = [gpus for gpus in A100_GPUS if gpus >= group]
        strategy = f"mics({group})"
        found += [
            Cell(model=one.config, config=one.config, gpus=gpus, strategy=strategy, cluster=P4D) for gpus in sizes
        ]
    return found


def wide_resnet() -> list[Cell]:
    """Returns figure 11's model that is no transformer, 8 images a GPU, and ZeRO-3 where the paper gives the ratio."""
    cell = Cell(model=WIDE_RESNET, config="wide_resnet_3b", gpus=16, strategy="mics(8)", global_size=128, is_weak=True)
    return [replace(cell, strategy="zero3 flat")] + [
        replace(cell, gpus=gpus, global_size=8 * gpus) for gpus in (16, 32, 64)
    ]


def one_gpu() -> Cell:
    """Returns BERT-large on one GPU, whose compute others have published."""
    return Cell(
        model=BERT_LARGE, config="bert_10b", gpus=1, strategy="mics(1)", micro_size=16, global_size=16,
        keys=BERT_LARGE_KEYS,
    )  # fmt: skip
