"""Published numbers of the papers about compressed gradients and rarer exchanges."""

DGC = "Deep Gradient Compression, ICLR 2018 (arXiv 1712.01887)"
MXNET = "MXNet's documentation of gradient compression"
ONE_BIT_ADAM = "1-bit Adam, ICML 2021 (arXiv 2102.02888)"
POWER_SGD = "PowerSGD, NeurIPS 2019 (arXiv 1905.13727)"
DILOCO = "DiLoCo (arXiv 2311.08105)"

# DGC, tables 3 to 5: gradients of ResNet-50 in MiB (the paper's MB), and how many times smaller they become
RESNET_50_MIB = 97.49
DGC_RATIO = {"ResNet-50": 277, "LSTM on PTB": 462, "AlexNet": 597, "DeepSpeech": 608}
DGC_RESNET_50_POINTS = 76.15 - 75.96  # top-1 with DGC minus without
DGC_RESNET_110_POINTS = 93.87 - 93.75  # CIFAR-10, 4 GPUs
# Bytes of a sent value: 32 bits and a 16-bit run length of zeros, at a sparsity of 99.9 %
DGC_VALUE_BYTES, DGC_SHARE = 6, 0.001
# MXNet: 16 values in a word of 32 bits
MXNET_RATIO, MXNET_COST = 16, "accuracy loss as low as 1 %"
# 1-bit Adam: times smaller than fp16 after the warm-up, and over the run by the share that is warm-up, as printed
ONE_BIT_ADAM_RATIO = 16
ONE_BIT_ADAM_RUN = {0.15: 5.0, 0.25: 3.4}
ONE_BIT_ADAM_POINTS = 83.6 - 83.6  # MNLI (matched), BERT-Base, minus uncompressed Adam
# PowerSGD: MB an epoch of ResNet-18 on CIFAR-10 by rank (none: SGD), and accuracy; 16 GPUs, 50,000 images. From the
# paper's table as others quote it: we could not read the table itself.
POWER_SGD_EPOCH_MIB = {"SGD": 1023, "rank 1": 4, "rank 2": 8, "rank 4": 14}
POWER_SGD_STEPS = 50_000 // (16 * 128)  # an epoch of whole batches of 128 on each GPU
POWER_SGD_POINTS = 94.5 - 94.3  # rank 4 minus SGD
# DiLoCo: 500 steps between meetings of 8 workers, 150 M parameters, C4: perplexity, and that of data parallelism with
# the same batch
DILOCO_TIMES, DILOCO_PERPLEXITY, DILOCO_DENSE_PERPLEXITY = 500, 15.02, 15.30
