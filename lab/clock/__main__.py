"""Computes the time of a step on CPU nodes with slow links, without running it.

    python -m lab.clock --config=configs/quickstart.py --config.sharding.strategy=ddp \
        --config.sharding.partition_size=0 --nodes=4 --rate=10mbit,50mbit --latency=0ms,20ms --step_s=0.1

The step is compiled for the nodes, and its collectives are timed as gloo performs them. `--step_s` states the seconds
of a step without communication, such as a step on one node that has no other work. Overrides such as
`--config.local_sgd.inner_steps=10` change the exchange. With several `--nodes` the global batch grows with them.
`--slow`, `--spread` and `--leaves_per_hour` add simulated rounds of such replicas (seeded). All output is computed.
Exit codes: 0 done; 2 bad option.
"""

import sys
from collections.abc import Sequence

from absl import flags

from configs import command_line
from lab.clock.fleet import Fleet, run_rounds
from lab.clock.steps import compiled, interval_of, step_time
from launch.emulate.links import Links
from runtime.command_line import complain, prepare_output
from runtime.exit_codes import ExitCode
from runtime.files.pages import columns
from training.metrics.units import format_bytes, format_percent, format_seconds

HEAD = ("nodes", "rate", "latency", "step", "compute", "bytes", "round trips", "waiting", "a node sends")
LISTS = {"nodes": ("4", "numbers of nodes"), "rate": ("200mbit", "rates of a node's link, as for tc, or none")}
LISTS |= {"latency": ("0ms", "latencies between nodes, one way")}
FLEET = {
    "slow": (1.0, "one replica's steps take this many times as long"),
    "spread": (0.0, "spread of each step's seconds, as a logarithm"),
    "leaves_per_hour": (0.0, "leaves of each replica per hour"),
    "away_s": (60.0, "seconds from a leave to the return"),
    "pause_s": (0.0, "seconds that a leave stops all other replicas"),
}


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns the exit code."""
    prepare_output()
    values = command_line.new_flags()
    for name, (text, meaning) in LISTS.items():
        flags.DEFINE_list(name, [text], meaning, flag_values=values)
    flags.DEFINE_integer("devices_per_node", 1, "devices of a node", lower_bound=1, flag_values=values)
    for name, (number, meaning) in {"step_s": (0.0, "seconds of a step without communication"), **FLEET}.items():
        flags.DEFINE_float(name, number, meaning, lower_bound=0.0, flag_values=values)
    try:
        if command_line.asks_for_help(argv):
            print(command_line.help_text(__doc__ or "", argv, values))
        else:
            print("\n".join(columns(table(argv, values), left=0)))
    except (ValueError, OSError, RuntimeError) as error:
        return complain(ValueError(str(error)))
    return ExitCode.FINISHED


def table(argv: Sequence[str], values: flags.FlagValues) -> list[Sequence[str]]:
    """Returns a row for each number of nodes and each link, below the names of the columns."""
    config = command_line.parse(argv, values)
    if not values.step_s:
        raise ValueError("--step_s is missing; give the seconds of a step without communication, such as 0.1")
    if not all(count.isdecimal() and int(count) for count in values.nodes):
        raise ValueError(f"--nodes={','.join(values.nodes)}: give numbers of nodes, such as 4,16")
    links = [Links(rate=rate, latency=latency) for latency in values.latency for rate in values.rate]
    is_fleet = values.slow != 1 or values.spread or values.leaves_per_hour
    rows: list[Sequence[str]] = [(*HEAD, *(("step of such replicas", "useful") if is_fleet else ()))]
    for nodes in map(int, values.nodes):
        rows_in_step = config.batch.global_size * nodes // int(values.nodes[0])
        words = [word for word in argv[1:] if word.startswith("--config")]
        step = compiled([*words, f"--config.batch.global_size={rows_in_step}"], nodes, values.devices_per_node)
        for link in links:
            found, interval = step_time(step, config, link, values.step_s), interval_of(config)
            parts = map(format_seconds, (found.step_s, found.compute_s, found.bytes_s, found.trips_s))
            shares = format_percent(found.waiting), format_bytes(found.sent_bytes)
            cells = [str(nodes), link.rate, link.latency, *parts, *shares]
            if is_fleet:
                fleet = Fleet(replicas=nodes, **{name: getattr(values, name) for name in FLEET})
                exchange_s = interval * (found.step_s - found.compute_s)
                times = run_rounds(fleet, compute_s=found.compute_s, exchange_s=exchange_s, interval=interval)
                cells += [format_seconds(times.step_s), format_percent(times.useful)]
            rows.append(cells)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv))
