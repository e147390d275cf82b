"""Published numbers of ZeRO++: arXiv 2306.10209 and DeepSpeed's blog and tutorial of it."""

ZEROPP = "ZeRO++, ICLR 2024 (arXiv 2306.10209)"
# Bytes that cross nodes in a step, in M, the bytes of the model in fp16: (all gathers, reduce-scatter)
VOLUME = {
    "zero3": (2.0, 1.0),
    "zero3 hpZ": (1.0, 1.0),
    "zero3 qwZ": (1.0, 1.0),
    "zero3 qgZ": (2.0, 0.25),
    "ZeRO++": (0.5, 0.25),
}
# TFLOP/s of a GPU, 18 B parameters on 24 DGX-2 with 16 V100 each, rounded as in the figures:
# (a node's link in Gbit/s, thousands of tokens a GPU) to (ZeRO-3, ZeRO++)
TFLOPS_18B = {
    (100, 1): (14, 31),
    (100, 2): (26, 46),
    (200, 2): (37, 50),
    (400, 1): (25, 35),
    (400, 2): (40, 53),
    (800, 2): (47, 54),
}
# The tutorial's log of 18 B (40 layers, hidden 6144) on 64 V100, 64 sequences of 512 a step: seconds a step, and
# TFLOP/s of a GPU as DeepSpeed counts them
TUTORIAL_STEP_S, TUTORIAL_TFLOPS = 9.9559, 7.65
TUTORIAL_GPUS, TUTORIAL_TOKENS = 64, 64 * 512
