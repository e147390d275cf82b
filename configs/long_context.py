"""A decoder of Llama 3.1's sizes on long sequences, which the devices of a node share: `:8b`, or `:tiny` to try it.

    python -m planner --config=configs/long_context.py:8b --cluster=p5.48xlarge --nodes=1
    python train.py --config=configs/long_context.py:tiny --workdir=runs/long_context

Hardware: for 8b a node of 8 GPUs with 80 GB, for tiny any CPU (8 virtual devices).
Not run yet on GPUs; by the planner (lab/benchmarks/planner_configs.py):

    8b: 1 p5.48xlarge (8 GPUs), 29.2 GB of 76.4 GB a GPU, 6.76 s a step, $2.07 for its 20 steps on demand

A step has one sequence, for 8b of 131,072 tokens. Synthetic tokens, so that nothing is downloaded: this is for memory
and speed, not for what is learned.
"""

from ml_collections import ConfigDict

from configs import base, llama

SIZES = {  # layers, hidden, intermediate, heads, vocabulary, tokens of a sequence
    "8b": (32, 4096, 14336, 32, 128256, 131072),
    "tiny": (2, 128, 256, 16, 256, 512),
}
DEVICES = 8


def get_config(arg: str = "8b") -> ConfigDict:
    """Returns the config of a size. ValueError for an unknown one."""
    layers, hidden, intermediate, heads, vocab_size, seq_len = base.chosen(arg, SIZES, __file__)
    config = base.get_config()
    config.num_steps = 20
    config.model.update({"vocab_size": vocab_size, "max_len": seq_len, "tied_head": False, **llama.ROTARY})
    config.model.update({"num_layers": layers, "hidden": hidden, "intermediate": intermediate})
    config.model.update({"num_heads": heads, "num_kv_heads": 8})
    config.data.update({"source": "synthetic", "seq_len": seq_len})
    config.batch.update({"global_size": 1, "micro_size": 1})
    config.mesh.context = DEVICES
    config.sharding.strategy = "zero3"
    config.optimizer.update({"learning_rate": 3e-4, "schedule": "constant", "warmup_steps": 0})
    config.elastic.snapshot_every = 0
    if arg == "tiny":
        config.mesh.update({"num_cpu_devices": DEVICES, "devices_per_node": DEVICES})
    else:
        config.model.compute_dtype = "bfloat16"
    base.for_timing(config)
    return config
