"""Qwen 2.5 (arXiv 2412.15115), `:7b`, and Qwen 3 (arXiv 2505.09388), `:8b` and with experts, trained further.

    python -m planner --config=configs/qwen.py:7b --cluster=p5.48xlarge
    python train.py --config=configs/qwen.py:7b --config.model.weights=DIR --workdir=runs/qwen_7b \\
        --config.data.tokenizer=hugging_face --config.data.tokenizer_path=DIR/tokenizer.json

Hardware: nodes of 8 GPUs with bfloat16 and 80 GB. Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    7b: 1 p5.48xlarge (8 GPUs), 25.2 GB of 76.4 GB a GPU, 7.84 s a step, $120 for its 1,000 steps on demand
    8b: 1 p5.48xlarge (8 GPUs), 26.0 GB of 76.4 GB a GPU, 8.93 s a step, $137 for its 1,000 steps on demand

Without weights the sizes are enough for a plan; a run that starts from a published checkpoint reads it from DIR
(docs/hugging_face.md), or takes every size from there, in its own config: `config.model = hugging_face.model(DIR)`.
"""

from ml_collections import ConfigDict

from configs import base

EXPERTS = dict(num_experts=128, experts_per_token=8, capacity_factor=0.0, balance_loss=0.001, z_loss=0.0)
EXPERTS |= dict(num_kv_heads=4, head_dim=128, vocab_size=151936, max_len=40960, qk_norm=True)
MODELS = {
    "7b": dict(num_layers=28, hidden=3584, intermediate=18944, num_heads=28, num_kv_heads=4, vocab_size=152064)
    | dict(max_len=131072, qkv_bias=True),
    "8b": dict(num_layers=36, hidden=4096, intermediate=12288, num_heads=32, num_kv_heads=8, vocab_size=151936)
    | dict(max_len=40960, qk_norm=True),
    "30b_a3b": dict(num_layers=48, hidden=2048, intermediate=768, num_heads=32) | EXPERTS,
    "235b_a22b": dict(num_layers=94, hidden=4096, intermediate=1536, num_heads=64) | EXPERTS,
}


def get_config(arg: str = "7b") -> ConfigDict:
    """Returns the config of a model. ValueError for an unknown one."""
    sizes = base.chosen(arg, MODELS, __file__)
    return base.open_model(sizes | {"rotary_base": 1e6, "norm_eps": 1e-6}, partition_size=8)
