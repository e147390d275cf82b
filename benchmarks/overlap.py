"""Says what of a train step's traffic is hidden behind compute on H100s, by replaying the compiled program.

    python -m benchmarks.overlap --config=configs/bert_10b.py --nodes=16 --devices_per_node=8 --rate=100gbit,400gbit

`--rate` is that of a node's link, several with commas between; `--xla_flags` are added to those of the compilation.
No GPU is needed, but XLA for GPUs is (`make .venv/h100/installed`). The figures are the planner's, and once more with
matrix products at 450 TFLOP/s: slow kernels hide more. A line for each rate and speed of the kernels: seconds that each
kind of traffic takes, and in brackets those that the kernels wait for it. The replay has a queue for each network
level, jax 0.10.2 one stream for all collectives: what is exposed is a lower bound. Compiled programs are kept, so that
other rates of the same program take no time. Exit codes: 0 done; 2 bad configuration.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from absl import flags

from cluster.links import Links
from configs import command_line
from metrics.units import format_bytes
from planner.clusters import PRODUCTS, find_cluster, with_rate
from planner.compile import CompiledStep, compile_step
from planner.replay import replay
from planner.timeline import Timeline, Use
from runtime.exit_codes import ExitCode
from sharding.hlo_program import Program, parse_program

CLUSTER = "p5.48xlarge"  # whose devices and links inside the node they are
PRODUCTS_TFLOPS = (PRODUCTS["H100"][0], 450)  # of matrix products: the planner's, and slow ones, half of the peak


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code; a user's mistake is one line."""
    values = command_line.new_flags()
    flags.DEFINE_integer("nodes", 16, "nodes of the cluster", flag_values=values, lower_bound=1)
    flags.DEFINE_integer("devices_per_node", 8, "devices of each node", flag_values=values, lower_bound=1)
    flags.DEFINE_list("rate", ["100gbit"], "rates of a node's link", flag_values=values)
    flags.DEFINE_string("xla_flags", "", "more flags for XLA", flag_values=values)
    try:
        if command_line.asks_for_help(argv):
            print(command_line.help_text(__doc__ or "", argv, values))
            return 0
        command_line.parse(argv, values)
        rates = {rate: Links(rate=rate).rate_bits() for rate in values.rate}
        config = [word for word in argv[1:] if word.startswith(("--config=", "--config."))]
        step = compile_step(
            config, nodes=values.nodes, devices_per_node=values.devices_per_node, xla_flags=values.xla_flags
        )
        program = parse_program(step.text)
        for rate, bits in rates.items():
            for tflops in PRODUCTS_TFLOPS:
                print(line(f"{rate}, {tflops} TFLOP/s", replayed(program, step, bits, tflops), step))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    return 0


def replayed(program: Program, step: CompiledStep, rate_bits: float, tflops: float) -> Timeline:
    """Returns the step's timeline on nodes with links of `rate_bits` per second and matrix products at `tflops`."""
    cluster = replace(with_rate(find_cluster(CLUSTER), rate_bits), devices_per_node=step.shape.devices_per_node)
    device = cluster.compute(step.shape.num_devices)
    device = replace(device, matmul_fraction=1e12 * tflops / device.peak_flops["bf16"])
    return replay(program, step.shape, device, cluster.network(), peak_bytes=step.peak_bytes)


def line(title: str, timeline: Timeline, step: CompiledStep) -> str:
    """Returns the line of a replay."""
    parts = {"hop two": timeline.use("hop_two"), "gathers + hop one": timeline.use("gather", "hop_one")}
    known = sum(parts.values(), Use())
    everything = timeline.use()
    parts["other"] = Use(0, everything.busy_s - known.busy_s, everything.exposed_s - known.exposed_s)
    uses = "  ".join(f"{name} {use.busy_s:.2f} ({use.exposed_s:.2f})" for name, use in parts.items())
    memory = f"{format_bytes(step.argument_bytes)} arguments, {format_bytes(step.temporary_bytes)} temporaries"
    return f"{title}: compute {timeline.compute_s:.2f}  {uses}  step {timeline.step_s:.2f} s;  {memory}"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
