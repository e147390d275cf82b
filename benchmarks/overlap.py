"""Says what of a train step's traffic is hidden behind compute on H100s, by replaying the compiled program.

    python -m benchmarks.overlap --config=configs/bert_10b.py --nodes=16 --devices_per_node=8 --rate=100gbit,400gbit

`--rate` is that of a node's link, several with commas between; `--xla_flags` are added to those of the compilation.
No GPU is needed, but XLA for GPUs is (`make .venv/h100/installed`). A line for each rate: seconds that each kind of
traffic takes, and in brackets those that the kernels wait for it. Compiled programs are kept, so that other rates of
the same program take no time. Exit codes: 0 done; 2 bad configuration.
"""

import sys
from collections.abc import Sequence
from math import inf

from absl import flags

from cluster.links import Links
from configs import command_line
from metrics.units import format_bytes
from planner.compile import CompiledStep, compile_step
from planner.hardware import Device, Network
from planner.replay import replay
from planner.timeline import Timeline, Use
from runtime.exit_codes import ExitCode
from sharding.hlo_program import Program, parse_program

# achieved: half of an H100's bf16 peak, three quarters of its memory bandwidth and of NVLink 4; no latencies
H100 = Device(
    peak_flops={"bf16": 989e12, "f16": 989e12, "f32": 495e12},
    matmul_fraction=0.455,
    memory_bandwidth=2.6e12,
    functions_per_s=inf,
    launch_s=0,
)
INTRA_BANDWIDTH = 370e9


def network(devices_per_node: int, rate_bits: float) -> Network:
    """Returns a network whose nodes have a link of `rate_bits` per second."""
    return Network(
        devices_per_node=devices_per_node,
        intra_bandwidth=INTRA_BANDWIDTH,
        intra_latency_s=0,
        node_bandwidth=rate_bits / 8,
        inter_latency_s=0,
        all_to_all_fraction=1,
        tree_fractions=(),
    )


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code; a user's mistake is one line."""
    values = command_line.new_flags(argv)
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
            print(line(rate, replayed(program, step, bits), step))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    return 0


def replayed(program: Program, step: CompiledStep, rate_bits: float) -> Timeline:
    """Returns the step's timeline on nodes with links of `rate_bits` per second."""
    here = network(step.shape.devices_per_node, rate_bits)
    return replay(program, step.shape, H100, here, peak_bytes=step.peak_bytes)


def line(rate: str, timeline: Timeline, step: CompiledStep) -> str:
    """Returns the line of a rate."""
    parts = {"hop two": timeline.use("hop_two"), "gathers + hop one": timeline.use("gather", "hop_one")}
    known = sum(parts.values(), Use())
    everything = timeline.use()
    parts["other"] = Use(0, everything.busy_s - known.busy_s, everything.exposed_s - known.exposed_s)
    uses = "  ".join(f"{name} {use.busy_s:.2f} ({use.exposed_s:.2f})" for name, use in parts.items())
    memory = f"{format_bytes(step.argument_bytes)} arguments, {format_bytes(step.temporary_bytes)} temporaries"
    return f"{rate}: compute {timeline.compute_s:.2f}  {uses}  step {timeline.step_s:.2f} s;  {memory}"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
