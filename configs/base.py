"""Returns the config that every experiment starts from: each key that exists, with its default and its meaning.

An experiment changes what it needs (`config = base.get_config(); config.model.num_layers = 12`); the command line
changes it further (`--config.batch.global_size=64`). Nothing else in the code base holds a default.
"""

from ml_collections import ConfigDict


def decoder() -> ConfigDict:
    """A decoder-only language model (`models/decoder.py`)."""
    return ConfigDict(
        {
            "kind": "decoder",
            "vocab_size": 256,  # ids that the tokenizer can produce
            "vocab_multiple": 128,  # the embedding is padded to a multiple of this many rows
            "max_len": 256,  # longest sequence (learned positions have this many rows)
            "num_layers": 4,
            "hidden": 128,
            "intermediate": 512,
            "num_heads": 4,
            "num_kv_heads": 4,  # fewer than num_heads: grouped-query attention
            "positions": "rotary",  # learned | rotary
            "norm": "rms",  # layer | rms
            "activation": "swiglu",  # gelu | swiglu
            "tied_head": True,  # the output head shares the embedding
            "use_bias": False,
            "compute_dtype": "float32",  # float32 | bfloat16; parameters are always float32
            "remat": "full",  # full | dots | none: what the backward pass computes again
            "attention": "auto",  # auto | xla | cudnn
        }
    )


def encoder() -> ConfigDict:
    """A BERT / RoBERTa encoder trained by masked language modelling (`models/encoder.py`)."""
    return ConfigDict(
        {
            "kind": "encoder",
            "vocab_size": 257,  # ids that the tokenizer can produce, the mask id included
            "vocab_multiple": 128,
            "max_len": 256,
            "num_layers": 4,
            "hidden": 128,
            "intermediate": 512,
            "num_heads": 4,
            "compute_dtype": "float32",
            "remat": "full",
            "attention": "auto",
        }
    )


def resnet() -> ConfigDict:
    """A ResNet that classifies images (`models/resnet.py`)."""
    return ConfigDict(
        {
            "kind": "resnet",
            "channels": 1,  # of the images: 1 grey, 3 colours
            "num_classes": 10,
            "class_multiple": 8,  # the head is padded to a multiple of this many classes
            "stem": "conv3",  # conv7_pool (ImageNet's) | conv3 (small images)
            "block": "basic",  # basic | bottleneck
            "stage_blocks": (1, 1, 1),  # blocks of each stage
            "width": 16,  # channels of the first stage; each has twice those of the one before
            "norm_groups": 8,  # groups of channels that are normalised together
            "compute_dtype": "float32",
            "remat": "full",
        }
    )


MODELS = {"decoder": decoder, "encoder": encoder, "resnet": resnet}  # by model.kind


def get_config(arg: str = "") -> ConfigDict:
    """Returns the base config: a small decoder on the Python standard library's text."""
    del arg
    config = ConfigDict()
    config.seed = 0
    config.num_steps = 100
    config.model = decoder()
    config.data = ConfigDict(
        {
            # stdlib_text | folder | synthetic | digits (images) | tfds:NAME (a TFDS data set by name: text or images)
            "source": "stdlib_text",
            "path": "",  # folder: where the text files are; tfds: its data_dir (empty: the default)
            "tokenizer": "bytes",  # bytes | sentencepiece | tiktoken
            "tokenizer_path": "",  # the vocabulary file of a sentencepiece or tiktoken tokenizer
            "seq_len": 256,
            "objective": "causal",  # causal | masked (text) | classify (images)
            "mask_rate": 0.15,  # masked: share of the tokens to predict
            "image_size": 8,  # classify: pixels a side
            "channels": 1,  # classify: 1 grey, 3 colours
            "augment": "none",  # classify: none | crop_flip (random crops, mirrored or not; validated on the centre)
            "prefetch": 4,  # batches prepared in the background
        }
    )
    config.batch = ConfigDict(
        {
            "global_size": 32,  # rows (sequences) a step, whatever the number of devices
            "micro_size": 4,  # rows a device a micro-step; the accumulation steps follow
        }
    )
    config.mesh = ConfigDict(
        {
            "num_cpu_devices": 0,  # virtual CPU devices of each process (0: leave the platform as it is)
            "devices_per_node": 0,  # 0: found from the processes' hosts
            "tensor": 1,  # tensor-parallel devices, inside a node
        }
    )
    config.sharding = ConfigDict(
        {
            "strategy": "mics",  # ddp | zero1 | zero2 | zero3 | hsdp | mics | custom
            "partition_size": 0,  # mics: devices that hold one copy of the model state
            "parameters": "",  # custom: none | node | all | a number of devices
            "gradients": "",
            "optimizer": "",
            "hierarchical": True,  # gather between nodes first, then inside the node
            "two_hop": True,  # off: all-reduce every micro-step (the MiCS paper's alternative)
            "gather": "layer",  # layer | node | micro_step | step: how long gathered parameters are kept
            "partitioner": "manual",  # manual | auto (XLA's own partitioner on the same shardings)
        }
    )
    config.compression = ConfigDict(
        {
            # gradients, between the nodes of replicas:
            # none | bf16 | int8 | int4 | two_bit | one_bit | one_bit_adam | dgc | power_sgd
            "hop_two": "none",
            "gather_inter": "none",  # none | bf16 | int8 | int4: parameters that are gathered between nodes
            "gather_intra": "none",  # ... inside a node
            "hop_one_inter": "none",  # gradients that are reduce-scattered between nodes each micro-step
            "hop_one_intra": "none",  # ... inside a node
            "block": 1024,  # int8, int4, one_bit: values that share a scale
            "rounding": "nearest",  # int8, int4: nearest | stochastic
            "threshold": 0.5,  # two_bit: what is sent for values that reach it
            "error_feedback": True,  # what encoding lost is added to the next step's gradients
            "sparsity": 0.999,  # dgc: share of the values that are not sent
            "sampled": 1.0,  # dgc: share of the values that tells which are large; 1: all of them, exactly
            "warmup_steps": 0,  # dgc: steps from a sparsity of 0.75 to its own; one_bit_adam: steps of plain Adam
            "rank": 2,  # power_sgd: columns of the factors
            "delayed": False,  # hop two works on the gradients of the step before, beside the compute
        }
    )
    config.local_sgd = ConfigDict(
        {
            "inner_steps": 0,  # steps of each replica by itself between two hops two; 0: off
            "outer_learning_rate": 0.7,  # of Nesterov's SGD on what the replicas moved (DiLoCo); 1: plain averaging
            "outer_momentum": 0.9,  # 0: plain averaging
        }
    )
    config.optimizer = ConfigDict(
        {
            "name": "adamw",  # adamw | sgd | lamb | lars | adafactor | muon
            "learning_rate": 1e-3,  # the peak
            "schedule": "cosine",  # constant | linear | cosine, after the warm-up
            "warmup_steps": 10,
            "final_fraction": 0.1,  # of the peak, at the last step
            "momentum": 0.9,  # sgd, lars, muon
            "b1": 0.9,  # adamw, lamb
            "b2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "decay_mask": "matrices",  # all | matrices (no decay of biases, norms and positions)
            "clip_norm": 1.0,  # global norm; 0: no clipping
            "max_skipped": 10,  # stop after so many non-finite updates in a row
        }
    )
    config.checkpoint = ConfigDict(
        {
            "every": 100,  # steps between checkpoints; 0: only at the end and when interrupted
            "keep_last": 2,
            "keep_every": 0,  # also keep each step that is a multiple of this; 0: none
            "keep_best": 0,  # also keep this many with the lowest validation loss
        }
    )
    config.elastic = ConfigDict(
        {
            "silence_s": 30.0,  # a process that is not heard of for so long ends the run
            "stall_s": 600.0,  # so does a step, or the reading of a batch, that takes longer
            "snapshot_every": -1,  # steps between snapshots in memory; -1: as costs under 2 % of the time; 0: none
            "memory_dir": "/dev/shm",  # the RAM disk of each node
        }
    )
    config.eval = ConfigDict(
        {
            "every": 50,  # steps between validations; 0: only at the end
            "num_batches": 4,  # global batches a validation
        }
    )
    config.sample = ConfigDict({"prompt": "def ", "length": 200, "temperature": 0.7})
    config.log_every = 1  # steps between lines of metrics.jsonl
    return config
