"""Prints placement and bytes of every parameter, without allocating or compiling anything.

    python -m planner.table --config=configs/mics_paper.py:bert_10b --devices=128 --devices_per_node=8 --png=mesh.png

`--devices` simulates a cluster; without it the devices are the config's or this machine's. The output has the mesh, the
three scopes, and for each parameter its shape, its spec and its bytes of parameter, gradient and optimizer state on a
device. Exit codes: 0 done; 2 bad configuration.
"""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from absl import flags

from configs import command_line
from configs.schema import Config
from runtime.command_line import check_file, complain, prepare_output
from runtime.exit_codes import ExitCode
from runtime.files.pages import columns
from runtime.files.paths import user_path
from sharding import drawing
from sharding.replicas import replica_key
from sharding.spec import ParamSpec, Placement, is_placement
from sharding.state import by_name, owner
from training.experiment import Experiment, make_experiment
from training.memory import REST, bytes_by_name, nbytes
from training.metrics.units import format_bytes, format_count

SPEC_WIDTH = 35
MOST_DEVICES = 16_384  # jax makes each of them, on this machine


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A parameter, or optimizer state without one, with the bytes of parameter, gradient and optimizer state."""

    name: str
    shape: tuple[int, ...] = ()
    spec: tuple[str, ...] = ()  # lines
    device_bytes: tuple[int, int, int]  # on one device
    whole_bytes: tuple[int, int, int]  # on one device if nothing were sharded


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code. A user's mistake is reported in one line."""
    prepare_output()
    values = command_line.new_flags()
    flags.DEFINE_integer("devices", None, "devices of a cluster that is not here", flag_values=values)
    flags.DEFINE_integer("devices_per_node", None, "devices of each node", flag_values=values)
    flags.DEFINE_string("png", None, "file for a picture of the mesh", flag_values=values)
    try:
        if command_line.asks_for_help(argv):
            print(command_line.help_text(__doc__ or "", argv, values))
            return 0
        config = command_line.parse(argv, values)
        if values.png:
            check_file(user_path(values.png), "--png")
        experiment = _described(start_devices(config, values.devices, values.devices_per_node))
        print(table_text(experiment))
        if values.png:
            user_path(values.png).write_bytes(drawing.mesh_png(experiment.plan.layout))
            print(f"\npicture of the mesh: {values.png}")
    except (ValueError, OSError) as error:
        return complain(ValueError(error))
    return ExitCode.FINISHED


def start_devices(config: Config, devices: int | None, devices_per_node: int | None) -> Config:
    """Creates virtual devices if the flags or the config ask for them. Returns the config with the flags' devices."""
    asked = {"num_cpu_devices": devices, "devices_per_node": devices_per_node}
    for key, value in asked.items():
        if value is not None and value < 1:
            raise ValueError(f"--{key.removeprefix('num_cpu_')}={value} must be at least 1")
    given = {key: value for key, value in asked.items() if value}
    mesh = replace(config.mesh, **given)
    if given and mesh.devices_per_node and mesh.num_cpu_devices % mesh.devices_per_node:
        names = {"num_cpu_devices": "--devices", "devices_per_node": "--devices_per_node"}
        count, node = (f"{names[key] if key in given else f'mesh.{key}'}={getattr(mesh, key)}" for key in asked)
        raise ValueError(f"{count} is not a multiple of {node}; change --devices or --devices_per_node")
    if mesh.num_cpu_devices > MOST_DEVICES:
        raise ValueError(f"{mesh.num_cpu_devices} devices are too many, jax must make each: {MOST_DEVICES} at most")
    if mesh.num_cpu_devices > 0:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", mesh.num_cpu_devices)
    return replace(config, mesh=mesh)


def _described(config: Config) -> Experiment:
    """Returns the experiment. If it does not fit this machine, the error explains how to simulate another one."""
    try:
        return make_experiment(config)
    except ValueError as error:
        if config.mesh.num_cpu_devices:
            raise
        here = f"{jax.device_count()} {jax.default_backend()} device{'s' if jax.device_count() > 1 else ''}"
        raise ValueError(
            f"{error} (there: {here}; for a cluster that is not here, --devices=N --devices_per_node=K)"
        ) from error


def table_text(experiment: Experiment) -> str:
    """Returns the output of the program, at most 120 columns wide."""
    sharding, model, layout = experiment.config.sharding, experiment.model, experiment.plan.layout
    size = f"({sharding.partition_size})" if sharding.strategy == "mics" else ""
    rows = table_rows(experiment)
    letters = len({layout.parameters, layout.gradients, layout.optimizer}) > 1
    titles = ["P parameter", "G gradient", "O optimizer"] if letters else ["parameter", "gradient", "optimizer"]
    cells = [["bytes on each device", "shape", "spec (of P, G and O)" if letters else "spec", *titles]]
    for row in rows:
        numbers = [format_bytes(count) if count else "" for count in row.device_bytes]
        cells.append([row.name, " x ".join(map(str, row.shape)), row.spec[0], *numbers])
        cells += [["", "", spec, "", "", ""] for spec in row.spec[1:]]
    for name, key in {"each device": "device_bytes", "one device, not sharded": "whole_bytes"}.items():
        sums = [sum(column) for column in zip(*(getattr(row, key) for row in rows), strict=True)]
        cells.append([name, "", f"{format_bytes(sum(sums))} in all", *map(format_bytes, sums)])
    head, *lines = columns(cells, left=3)
    rule = "-" * len(head)
    return "\n".join(
        [
            f"{'model':<16}{model.config.kind}, {format_count(model.num_params)} parameters",
            f"{'strategy':<16}{sharding.strategy}{size}, {experiment.config.optimizer.name}",
            drawing.mesh_text(layout),
            *("", head, rule, *lines[:-2], rule, *lines[-2:]),
        ]
    )


def table_rows(experiment: Experiment) -> list[TableRow]:
    """Returns a row for each parameter and one for optimizer state without a parameter."""
    plan, layout, held = experiment.plan, experiment.plan.layout, bytes_by_name(experiment)
    specs: dict[str, ParamSpec] = by_name(experiment.model.param_specs(), lambda x: isinstance(x, ParamSpec))
    placements: dict[str, Placement] = by_name(plan.all_placements, is_placement)
    params: dict[str, jax.ShapeDtypeStruct] = by_name(experiment.state_shapes.all_params)
    whole = dict.fromkeys([*params, REST], 0)  # bytes of the optimizer's state
    by_replica = False
    for path, leaf in jax.tree_util.tree_leaves_with_path(experiment.state_shapes.chain):
        name = owner(path, leaf, params) or REST
        replica = replica_key(path)
        if replica is None:
            whole[name] += nbytes(leaf)
        elif replica.combine == "mean":  # copies: a single device has one, and no residual, because it sends nothing
            by_replica = True
            whole[name] += nbytes(leaf) // layout.num_replicas
    rows = [
        TableRow(
            name=name,
            shape=x.shape,
            spec=_aloud(specs[name], placements[name], experiment),
            device_bytes=held[name],
            whole_bytes=(nbytes(x), 0 if specs[name].frozen else nbytes(x), whole[name]),
        )
        for name, x in params.items()
    ]
    other = TableRow(
        name=REST,
        spec=("whole in every replica" if by_replica else "whole on every device",),
        device_bytes=held[REST],
        whole_bytes=(0, 0, whole[REST]),
    )
    return [*rows, other]


def _aloud(spec: ParamSpec, placement: Placement, experiment: Experiment) -> tuple[str, ...]:
    """Returns the spec as lines to read aloud: `layers, embed by shard_intra, mlp`; a line per distinct scope."""
    layout = experiment.plan.layout
    by_scope: dict[str, str] = {}  # line -> letters of the scopes
    for letter, scope in (("P", layout.parameters), ("G", layout.gradients), ("O", layout.optimizer)):
        dims = []
        for dim, axes in zip(spec.dims, placement.pspec(scope), strict=True):
            by = " and ".join(axes) if isinstance(axes, tuple) else axes
            dims.append(f"{dim} by {by}" if by else dim)
        by_scope[", ".join(dims)] = by_scope.get(", ".join(dims), "") + letter
    lines = [*by_scope] if len(by_scope) == 1 else [f"{letters}: {text}" for text, letters in by_scope.items()]
    return tuple(part for text in lines for part in textwrap.wrap(text, SPEC_WIDTH, subsequent_indent="  "))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
