"""A decoder of any size with Llama's layers: `:13b` and other standard sizes, or `:layers=40,hidden=5120,heads=40`.

    python -m planner --model=13b --tokens=300B --cluster=p5.48xlarge --nodes=16 --search
    python -m planner --model=layers=40,hidden=5120,heads=40,vocab=32000 --cluster=p5.48xlarge --nodes=2 --search
    python -m planner --config=configs/decoder.py:13b --cluster=p5.48xlarge --nodes=1

Hardware: GPUs with bfloat16; `--search` of the planner finds the strategy for them.
Further sizes: `kv_heads` (heads), `intermediate` (Llama's 8/3 of hidden), `vocab` (32,000) and `rows` (4096 tokens).
A step has 4 M tokens, as for Llama 2. The data is synthetic.
Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    13b: 1 p5.48xlarge (8 GPUs), 31.4 GB of 76.4 GB a GPU, 1m 47s a step, $1,642 for its 1,000 steps on demand
"""

from dataclasses import dataclass, fields

from ml_collections import ConfigDict

from configs import base

TOKENS = 2**22  # per step


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder. Zeros follow from the other sizes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    intermediate: int = 0
    vocab: int = 32_000
    rows: int = 4096  # tokens of a row

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "intermediate", self.intermediate or -(-8 * self.hidden // 3 // 256) * 256)


LLAMA_3 = {"kv_heads": 8, "vocab": 128_256, "rows": 8192}
# up to 760m: GPT-3 (Brown et al. 2020, table 2.1); 1b: TinyLlama; 3b: OpenLlama; 7b, 13b, 30b and 65b: Llama (Touvron
# et al. 2023, table 2); the rest: Llama 3
SHAPES = {
    "125m": Shape(layers=12, hidden=768, heads=12),
    "350m": Shape(layers=24, hidden=1024, heads=16),
    "760m": Shape(layers=24, hidden=1536, heads=16),
    "1b": Shape(layers=22, hidden=2048, heads=32, kv_heads=4),
    "3b": Shape(layers=26, hidden=3200, heads=32, intermediate=8640),
    "7b": Shape(layers=32, hidden=4096, heads=32),
    "8b": Shape(layers=32, hidden=4096, heads=32, intermediate=14_336, **LLAMA_3),
    "13b": Shape(layers=40, hidden=5120, heads=40),
    "30b": Shape(layers=60, hidden=6656, heads=52),
    "65b": Shape(layers=80, hidden=8192, heads=64),
    "70b": Shape(layers=80, hidden=8192, heads=64, intermediate=28_672, **LLAMA_3),
    "405b": Shape(layers=126, hidden=16_384, heads=128, intermediate=53_248, **LLAMA_3),
}


def get_config(arg: str = "7b") -> ConfigDict:
    """Returns the config of a size: ZeRO-3, AdamW, layers recomputed. ValueError for an unknown one."""
    shape = _written(arg) if "=" in arg else base.chosen(arg, SHAPES, __file__)
    config = base.get_config()
    config.num_steps = 1000
    config.model.update({"compute_dtype": "bfloat16", "vocab_size": shape.vocab, "max_len": shape.rows})
    config.model.update({"num_layers": shape.layers, "hidden": shape.hidden, "intermediate": shape.intermediate})
    config.model.update({"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "tied_head": False})
    config.data.update({"source": "synthetic", "seq_len": shape.rows})
    config.batch.update({"global_size": max(1, TOKENS // shape.rows), "micro_size": 1})
    config.mesh.devices_per_node = 8
    config.sharding.update({"strategy": "zero3", "gather": "layer"})
    config.optimizer.update({"learning_rate": 3e-4, "warmup_steps": 50})
    return config


def _written(arg: str) -> Shape:
    """Returns the shape of `layers=40,hidden=5120,heads=40`. ValueError for other words."""
    names = [field.name for field in fields(Shape)]
    sizes: dict[str, int] = {}
    for word in arg.split(","):
        name, _, value = word.partition("=")
        if name not in names or not value.isdecimal() or not int(value):
            raise ValueError(f"{word} is not a size of a decoder; give {', '.join(names)}, such as layers=40")
        sizes[name] = int(value)
    if missing := [name for name in names[:3] if name not in sizes]:
        raise ValueError(f"{arg} lacks {', '.join(missing)}, such as layers=40,hidden=5120,heads=40")
    return Shape(**sizes)
