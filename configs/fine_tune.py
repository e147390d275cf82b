"""Fine-tunes an open model on chats, with adapters (LoRA), over nodes with a slow network.

    python train.py --config=configs/fine_tune.py:DIR --config.data.path=chats.jsonl --workdir=runs/fine_tune
    python -m planner --config=configs/fine_tune.py:llama_70b --cluster=p4d.24xlarge --nodes=2

DIR holds weights and tokenizer as Hugging Face publishes them; a name has the sizes alone, for a plan. Each node holds
a copy of the frozen model over its GPUs; adapters alone cross the network between nodes. docs/hugging_face.md leads
from weights to a running job. Hardware: nodes whose GPUs have bfloat16.
Not run yet on GPUs; by the planner (lab/benchmarks/planner_configs.py):

    gpt_oss_20b: 1 p4d.24xlarge (8 GPUs), 10.3 GB of 38.1 GB a GPU, 5.29 s a step, $16 for its 500 steps on demand
    llama_8b: 1 p4d.24xlarge (8 GPUs), 6.65 GB of 38.1 GB a GPU, 8.51 s a step, $26 for its 500 steps on demand
    llama_70b: 2 p4d.24xlarge (16 GPUs), 31.1 GB of 38.1 GB a GPU, 34.3 s a step, $209 for its 500 steps on demand
"""

from ml_collections import ConfigDict

from configs import base, gemma, gpt_oss, hugging_face, llama, mistral, qwen
from runtime.files.paths import user_path

SIZES = {
    f"{file.__name__.rpartition('.')[2]}_{size}": (file, size)
    for file in (gemma, gpt_oss, llama, mistral, qwen)
    for size in file.MODELS
}


def get_config(arg: str = "llama_8b") -> ConfigDict:
    """Returns a run that adapts the model in the folder `arg`, or the plan of a model. ValueError if neither exists."""
    config, folder = base.get_config(), user_path(arg)
    if (folder / hugging_face.CONFIG_FILE).exists():
        config.model = hugging_face.model(folder)
    elif arg in SIZES:
        file, size = SIZES[arg]
        config.model = file.get_config(size).model
    else:
        sizes = ", ".join(SIZES)
        raise ValueError(f"fine_tune.py:{arg} is not a folder with a config.json; give one, or for a plan {sizes}")
    config.num_steps = 500
    config.model.update({"compute_dtype": "bfloat16", "lora_rank": 16, "lora_alpha": 32.0})
    config.data.update({"source": "chats", "packing": "whole", "tokenizer": "hugging_face"})
    config.data.tokenizer_path = str(folder / "tokenizer.json")
    config.data.update({"path": "chats.jsonl", "seq_len": min(4096, config.to_dict()["model"]["max_len"])})
    config.batch.update({"global_size": 64, "micro_size": 1})
    config.sharding.strategy = "hsdp"  # a partition group is a node
    config.optimizer.update({"learning_rate": 2e-4, "weight_decay": 0.0, "warmup_steps": 20})
    config.checkpoint.every = 100
    config.eval.every = 100
    config.sample.length = 0  # which gathers every layer for every token
    return config
