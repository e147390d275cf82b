"""gpt-oss (OpenAI 2025, arXiv 2508.10925), `:20b` and `:120b`, trained further.

    python -m planner --config=configs/gpt_oss.py:20b --cluster=p5.48xlarge
    python train.py --config=configs/fine_tune.py:DIR --config.data.path=chats.jsonl --workdir=runs/gpt_oss

Hardware: nodes of 8 GPUs with bfloat16 and 80 GB. Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    20b: 1 p5.48xlarge (8 GPUs), 54.4 GB of 76.4 GB a GPU, 5.41 s a step, $83 for its 1,000 steps on demand

Without weights the sizes are enough for a plan; a run that starts from a published checkpoint reads it from DIR
(docs/hugging_face.md), or takes every size from there, in its own config: `config.model = hugging_face.model(DIR)`.
"""

from ml_collections import ConfigDict

from configs import base

MODELS = {"20b": (24, 32, 8), "120b": (36, 128, 32)}  # layers, experts, devices of a partition group
STYLE = dict(hidden=2880, intermediate=2880, num_heads=64, num_kv_heads=8, head_dim=64, vocab_size=201088)
STYLE |= dict(window=128, global_every=2, attention_sinks=True, attention_bias=True, max_len=131072)
STYLE |= dict(activation="swiglu_clamped", expert_bias=True, experts_per_token=4, capacity_factor=0.0)
STYLE |= dict(balance_loss=0.0, z_loss=0.0, rotary_base=150_000.0, rotary_scaling="yarn", rotary_factor=32.0)
STYLE |= dict(rotary_high=32.0, rotary_original_len=4096, rotary_attention=1.3465735902799727, rotary_truncate=False)


def get_config(arg: str = "20b") -> ConfigDict:
    """Returns the config of a size. ValueError for an unknown one."""
    num_layers, num_experts, group = base.chosen(arg, MODELS, __file__)
    return base.open_model(STYLE | {"num_layers": num_layers, "num_experts": num_experts}, group)
