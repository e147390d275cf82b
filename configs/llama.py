"""Llama 3.1 (Llama team, 2024, arXiv 2407.21783, table 3): `:8b` and `:70b`, trained further.

    python -m planner --config=configs/llama.py:8b --cluster=p5.48xlarge
    python train.py --config=configs/llama.py:8b --config.model.weights=DIR --workdir=runs/llama_8b \\
        --config.data.tokenizer=hugging_face --config.data.tokenizer_path=DIR/tokenizer.json

Hardware: nodes of 8 GPUs with bfloat16 and 80 GB, 70b 4 of them or more.
Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    8b: 1 p5.48xlarge (8 GPUs), 26.2 GB of 76.4 GB a GPU, 8.44 s a step, $129 for its 1,000 steps on demand
    70b: 4 p5.48xlarge (32 GPUs), 64.0 GB of 76.4 GB a GPU, 18.8 s a step, $1,147 for its 1,000 steps on demand

Without weights the sizes are enough for a plan; a run that starts from a published checkpoint reads it from DIR
(docs/hugging_face.md), or takes every size from there, in its own config: `config.model = hugging_face.model(DIR)`.
"""

from ml_collections import ConfigDict

from configs import base

MODELS = {  # layers, hidden, intermediate, heads, devices of a partition group
    "8b": (32, 4096, 14336, 32, 8),
    "70b": (80, 8192, 28672, 64, 32),
}
ROTARY = {"rotary_base": 500_000.0, "rotary_scaling": "llama3", "rotary_factor": 8.0}  # of 8192 tokens, to 131072


def get_config(arg: str = "8b") -> ConfigDict:
    """Returns the config of a size. ValueError for an unknown one."""
    layers, hidden, intermediate, heads, group = base.chosen(arg, MODELS, __file__)
    sizes = {"num_layers": layers, "hidden": hidden, "intermediate": intermediate, "num_heads": heads}
    return base.open_model(sizes | ROTARY | {"num_kv_heads": 8, "vocab_size": 128256, "max_len": 131072}, group)
