"""Gemma 2 (Gemma team, 2024, arXiv 2408.00118, table 1): `:2b`, `:9b` and `:27b`, trained further.

    python -m planner --config=configs/gemma.py:9b --cluster=p5.48xlarge
    python train.py --config=configs/gemma.py:9b --config.model.weights=DIR --workdir=runs/gemma_9b \\
        --config.data.tokenizer=hugging_face --config.data.tokenizer_path=DIR/tokenizer.json

Hardware: nodes of 8 GPUs with bfloat16 and 80 GB, 27b 2 of them or more.
Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    2b: 1 p5.48xlarge (8 GPUs), 12.3 GB of 76.4 GB a GPU, 3.44 s a step, $53 for its 1,000 steps on demand
    9b: 1 p5.48xlarge (8 GPUs), 30.6 GB of 76.4 GB a GPU, 11.2 s a step, $170 for its 1,000 steps on demand
    27b: 2 p5.48xlarge (16 GPUs), 46.6 GB of 76.4 GB a GPU, 14.4 s a step, $440 for its 1,000 steps on demand

Without weights the sizes are enough for a plan; a run that starts from a published checkpoint reads it from DIR
(docs/hugging_face.md), or takes every size from there, in its own config: `config.model = hugging_face.model(DIR)`.
"""

from ml_collections import ConfigDict

from configs import base

MODELS = {  # layers, hidden, intermediate, heads, size of a head, query_scalar, devices of a partition group
    "2b": (26, 2304, 9216, 8, 256, 0, 8),
    "9b": (42, 3584, 14336, 16, 256, 0, 8),
    "27b": (46, 4608, 36864, 32, 128, 144, 16),
}
STYLE = dict(norm="rms_1p", norm_eps=1e-6, post_norm=True, activation="geglu", scale_embedding=True, tied_head=True)
STYLE |= dict(window=4096, global_every=2, attention_cap=50.0, logit_cap=30.0, vocab_size=256000, max_len=8192)


def get_config(arg: str = "9b") -> ConfigDict:
    """Returns the config of a size. ValueError for an unknown one."""
    layers, hidden, intermediate, heads, head_dim, scalar, group = base.chosen(arg, MODELS, __file__)
    sizes = {"num_layers": layers, "hidden": hidden, "intermediate": intermediate, "num_heads": heads}
    heads_of = {"num_kv_heads": heads // 2, "head_dim": head_dim, "query_scalar": scalar}
    return base.open_model(STYLE | sizes | heads_of, group)
