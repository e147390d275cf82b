"""XLA flags for programs that are compiled once and run a few steps: most of a test's time is compiling."""

from importlib.metadata import version

# LLVM's optimiser, kernels fused by MLIR, and code in many pieces take most of the time; collectives depend on none.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):  # this flag is unknown from 0.11 on: XLA ends at one
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
