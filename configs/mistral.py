"""Mistral 7B (arXiv 2310.06825), trained further: `:7b`, its version 0.3, and `:7b_v0.1` with windows of 4096 tokens.

`:8x7b` is Mixtral (arXiv 2401.04088), with eight experts in each layer.

    python -m planner --config=configs/mistral.py:7b --cluster=p5.48xlarge
    python train.py --config=configs/mistral.py:7b --config.model.weights=DIR --workdir=runs/mistral_7b \\
        --config.data.tokenizer=hugging_face --config.data.tokenizer_path=DIR/tokenizer.json

Hardware: nodes of 8 GPUs with bfloat16 and 80 GB. Not run yet; by the planner (lab/benchmarks/planner_configs.py):

    7b: 1 p5.48xlarge (8 GPUs), 20.5 GB of 76.4 GB a GPU, 7.99 s a step, $122 for its 1,000 steps on demand

Without weights the sizes are enough for a plan; a run that starts from a published checkpoint reads it from DIR
(docs/hugging_face.md), or takes every size from there, in its own config: `config.model = hugging_face.model(DIR)`.
"""

from ml_collections import ConfigDict

from configs import base

EXPERTS = {"capacity_factor": 0.0, "balance_loss": 0.02, "z_loss": 0.0}
MODELS = {
    "7b": {"vocab_size": 32768, "rotary_base": 1e6},
    "7b_v0.1": {"vocab_size": 32000, "window": 4096},
    "8x7b": {"vocab_size": 32000, "rotary_base": 1e6, "num_experts": 8, "experts_per_token": 2} | EXPERTS,
}
SIZES = {"num_layers": 32, "hidden": 4096, "intermediate": 14336, "num_heads": 32, "num_kv_heads": 8, "max_len": 32768}


def get_config(arg: str = "7b") -> ConfigDict:
    """Returns the config of a version. ValueError for an unknown one."""
    return base.open_model(SIZES | base.chosen(arg, MODELS, __file__), partition_size=8)
