"""XLA flags for programs that are compiled once and run a few steps: most of a test's time is compiling."""

from importlib.metadata import version

# LLVM's optimiser, and kernels fused by MLIR, take most of the time; the collectives of a program depend on neither.
FLAGS = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):  # the second flag is unknown from 0.11 on, and XLA ends at an unknown one
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
