"""All published numbers used in the tables, with their sources.

Values of the MiCS figures are read from the paper's vector graphics (to 0.1 %), because it has no table of them.
"""

MICS = "MiCS, VLDB 2022 (arXiv 2205.00119)"
ZERO = "ZeRO, SC 2020 (arXiv 1910.02054)"
FSDP = "PyTorch FSDP, VLDB 2023 (arXiv 2304.11277)"

# ------------------------------------------------------------------------------------------------------ MiCS

# Section 3.3: percentage of the inter-node traffic saved by the hierarchical gather, 8 devices per node
SAVING_PERCENT = {16: 46.6, 64: 11.1}
# Section 3.4: cost of the alternative over two-hop synchronisation, 4 micro-steps, equal bandwidths, large n and p
ALTERNATIVE_OVER_TWO_HOP = 4 / 3
# Table 1: billions of parameters in the model's name, and our config
TABLE_1 = {
    "BERT 10B": (10, "bert_10b"),
    "BERT 15B": (15, "bert_15b"),
    "BERT 20B": (20, "bert_20b"),
    "BERT 50B": (50, "bert_50b"),
    "RoBERTa 20B": (20, "roberta_20b"),
    "GPT2 20B": (20, "gpt2_20b"),
}
# Figure 2: (bytes of the gathered message in MB, nodes of p3dn) to effective all-gather bandwidth, GB/s
FIGURE_2 = {
    128: {4: 10.84, 8: 9.30, 16: 3.93, 32: 3.99},
    256: {4: 11.13, 8: 10.79, 16: 9.72, 32: 2.11},
    512: {4: 10.20, 8: 11.03, 16: 10.70, 32: 8.04},
    1024: {4: 10.24, 8: 10.80, 16: 10.80, 32: 10.79},
}
B_PART = 128e9  # section 3.2: bytes/s that a gather inside a p3dn node reached
# Figure 7: samples per second on V100; model, system, GPUs. None: out of memory
FIGURE_7: dict[str, dict[str, dict[int, float | None]]] = {
    "BERT 10B": {
        "ZeRO-2": {16: None, 32: 25.26, 64: 49.07, 128: 101.20},
        "ZeRO-3": {16: 8.54, 32: 18.30, 64: 32.09, 128: 51.14},
        "MiCS": {16: 21.20, 32: 42.24, 64: 84.79, 128: 165.39},
    },
    "BERT 15B": {
        "ZeRO-2": dict.fromkeys((16, 32, 64, 128)),
        "ZeRO-3": {16: 5.56, 32: 12.15, 64: 20.93, 128: 34.44},
        "MiCS": {16: 12.33, 32: 24.56, 64: 48.46, 128: 97.16},
    },
    "BERT 20B": {
        "ZeRO-2": dict.fromkeys((16, 32, 64, 128)),
        "ZeRO-3": {16: 4.60, 32: 10.13, 64: 19.86, 128: 36.17},
        "MiCS": {16: 6.40, 32: 14.49, 64: 27.82, 128: 53.24},
    },
    "BERT 50B": {
        "ZeRO-2": dict.fromkeys((16, 32, 64, 128)),
        "ZeRO-3": {16: None, 32: None, 64: 8.25, 128: 15.71},
        "MiCS": {16: None, 32: None, 64: 13.86, 128: 27.13},
    },
}
# Figure 9: TFLOP/s of a V100 (ZeRO-3, MiCS), recomputation counted
FIGURE_9 = {
    "BERT 10B": {16: (22.67, 56.34), 32: (24.31, 56.13), 64: (21.32, 56.33), 128: (16.97, 54.94)},
    "BERT 15B": {16: (22.06, 48.93), 32: (24.11, 48.73), 64: (20.76, 48.07), 128: (17.08, 48.19)},
    "BERT 20B": {16: (24.40, 35.84), 32: (26.69, 49.55), 64: (26.17, 46.12), 128: (23.83, 37.55)},
    "BERT 50B": {64: (26.74, 44.92), 128: (25.46, 43.96)},
}
# TFLOP/s of one V100, BERT-large, sequences of 512: 53, "up to 28 %" over NVIDIA's and "up to 62 %" over Hugging Face's
FASTEST_BERT = "deepspeed.ai/news/2020/05/27/fastest-bert-training.html"
BERT_LARGE_ON_V100 = {
    "DeepSpeed's fused kernels": 53.0,
    "NVIDIA's PyTorch BERT": 53 / 1.28,
    "Hugging Face's BERT": 53 / 1.62,
}
# Figure 11: samples per second of MiCS in the comparison with Megatron-LM-3D, global batch of 4096
FIGURE_11 = {
    "BERT 10B, 128 layers": {16: 17.40, 32: 34.30, 64: 67.20},
    "BERT 10B, 80 wide layers": {16: 17.05, 32: 33.04, 64: 64.70},
}
# the same figure, WideResNet 3B on 16 GPUs: MiCS over DeepSpeed's ZeRO-3 (the text's "up to 2.89x")
WIDE_RESNET, WIDE_RESNET_OVER_ZERO3 = "WideResNet 3B", 2.89
# the same figure: Megatron-LM-3D by its tensor-parallel GPUs and pipeline stages (the paper's table 2)
MEGATRON_WAYS = ((8, 1), (4, 4), (2, 8))
FIGURE_11_MEGATRON = {
    "BERT 10B, 128 layers": {
        (8, 1): {16: 9.66, 32: 18.91, 64: 36.94},
        (4, 4): {16: 12.68, 32: 23.37, 64: 44.60},
        (2, 8): {16: 13.43, 32: 26.06, 64: 50.40},
    },
    "BERT 10B, 80 wide layers": {
        (8, 1): {16: 13.89, 32: 26.83, 64: 53.16},
        (4, 4): {16: 16.29, 32: 31.96, 64: 62.13},
        (2, 8): {16: 17.19, 32: 33.50, 64: 65.03},
    },
}
# Table 1: hidden size, intermediate size, layers, heads, vocabulary, GPUs of a partition group (None: not stated)
TABLE_1_SHAPES = {
    "BERT 10B": (2560, 10240, 127, 40, 32008, 8),
    "BERT 15B": (2560, 10240, 190, 40, 32008, 16),
    "BERT 20B": (5120, 20480, 64, 40, 32008, 16),
    "BERT 50B": (8192, 32768, 62, 40, 32008, 64),
    "RoBERTa 20B": (5120, 20480, 62, 40, 50265, None),
    "GPT2 20B": (5120, 20480, 62, 40, 50265, None),
}
# The text of the paper: 100B on A100, groups of 128 GPUs: TFLOP/s of a GPU on 512, and throughput of a GPU on 512
# over that on 128
TFLOPS_100B, WEAK_SCALING_100B = 170, 0.994
# Figure 12: partition size to samples per second; BERT 10B, 64 V100 in 8 nodes
FIGURE_12 = {8: 84.80, 16: 70.19, 32: 64.71, 64: 52.16}
# Figure 13a: MB of the result to the time of a hierarchical all-gather over a flat one's; 2 nodes
FIGURE_13A = {8: 0.782, 16: 0.698, 32: 0.858, 64: 0.854, 128: 0.721, 256: 0.779}
# Figure 13b: GPUs to throughput over ZeRO-3's (without hierarchical communication, with it); BERT 15B, groups of 16
FIGURE_13B = {16: (1.697, 2.216), 32: (1.468, 2.021), 64: (1.677, 2.315), 128: (2.057, 2.821)}
# Figure 14: GPUs to samples per second (without two-hop synchronisation, with it); BERT 10B, groups of 8
FIGURE_14 = {16: (17.83, 21.20), 32: (38.04, 42.24), 64: (67.87, 84.79), 128: (143.33, 165.39)}
# Figure 15: GPUs to samples per second of DeepSpeed's ZeRO-3, of MiCS with one group of all GPUs, of MiCS; BERT 10B
FIGURE_15 = {
    16: (8.54, 12.90, 21.20),
    32: (18.30, 25.07, 42.24),
    64: (32.09, 42.70, 84.79),
    128: (51.14, 78.80, 165.39),
}
# Figure 16: mean loss per tenth of the run (DeepSpeed's ZeRO-3, MiCS); 1.5B parameters, 1 M sequences, 4 micro-steps
FIGURE_16 = (
    (8.47, 8.52),
    (7.92, 7.93),
    (7.81, 7.82),
    (7.77, 7.75),
    (7.79, 7.75),
    (7.78, 7.74),
    (7.74, 7.59),
    (7.56, 7.52),
    (7.59, 7.62),
    (7.66, 7.77),
)

# ------------------------------------------------------------------------------------------------------ ZeRO

# Table 1: devices to GB of model state on each, as printed: (os, os+g, os+g+p) of 7.5B, 128B and 1T parameters
ZERO_TABLE_1_BILLIONS = (7.5, 128, 1000)
ZERO_TABLE_1 = {
    4: (52.5, 41.3, 30, 896, 704, 512, 7000, 5500, 4000),
    16: (35.6, 21.6, 7.5, 608, 368, 128, 4750, 2875, 1000),
    64: (31.4, 16.6, 1.88, 536, 284, 32, 4187, 2218, 250),
    256: (30.4, 15.4, 0.47, 518, 263, 8, 4046, 2054, 62.5),
    1024: (30.1, 15.1, 0.12, 513, 257, 2, 4011, 2013, 15.6),
}
# Table 2: billions of parameters of the largest model on 64 GPUs of 32 GB, by the paper's own accounting
ZERO_TABLE_2 = {"ddp": 2, "zero1": 7.6, "zero2": 14.4, "zero3": 128}
ZERO_TABLE_2_MEASURED = {"ddp": 1.3, "zero1": 6.2}
# Section 5 and Table 1: bytes per parameter, fp16 training with Adam: (not partitioned, partitioned)
ZERO_BYTES = {"zero1": (4, 12), "zero2": (2, 14), "zero3": (0, 16)}
# Section 7: communication volume per step and device, in parameters
ZERO_VOLUME = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3 flat": 3}
