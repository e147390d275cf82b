"""Validates configs against simulated device counts. Compiles nothing and reads no data.

    python -m training.check < requests.json

A request is `{"argv": [...], "nodes": 4, "devices_per_node": 2}`, with the arguments of a train.py. Without nodes, the
section `mesh` defines the devices. Prints a JSON list of messages, "" for a valid config.
"""

import json
import sys
from dataclasses import replace

import jax

from configs import command_line
from configs.schema import Config
from runtime.files.json_objects import JsonMapping
from training.experiment import make_experiment


def main() -> int:
    """Reads the requests from stdin, prints the answers and returns the exit code."""
    configs = [_config(request) for request in json.load(sys.stdin)]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(config.mesh.num_cpu_devices for config in configs))
    print(json.dumps([complaint(config) for config in configs]))
    return 0


def _config(request: JsonMapping) -> Config:
    """Returns the config of a request, with its devices in the section `mesh`."""
    argv = ["train.py", *request["argv"]]
    config = command_line.parse(argv)
    if not request["nodes"]:
        return config
    nodes, local = request["nodes"], request["devices_per_node"]
    return replace(config, mesh=replace(config.mesh, num_cpu_devices=nodes * local, devices_per_node=local))


def complaint(config: Config) -> str:
    """Returns a one-line error for a config on the devices of its section `mesh`, or "" if it is valid."""
    try:
        make_experiment(config, jax.devices()[: config.mesh.num_cpu_devices])
    except ValueError as error:
        return " ".join(str(error).split())
    return ""


if __name__ == "__main__":
    sys.exit(main())
