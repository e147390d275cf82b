#!/usr/bin/env bash
# Draws every picture of this folder again, from configs and from the records in lab/benchmarks/results; nothing is trained.
# The tables of the pages are written with them.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
draw() {
  "$python" -m planner.table --config=configs/quickstart.py --png="docs/images/mesh_$1.png" "${@:2}" >/dev/null
}
draw mics2
draw mics4 --config.sharding.partition_size=4
draw zero3 --config.sharding.strategy=zero3 --config.sharding.partition_size=0
draw ddp --config.sharding.strategy=ddp --config.sharding.partition_size=0
draw hsdp --config.sharding.strategy=hsdp --config.sharding.partition_size=0 --devices=8 --devices_per_node=4
draw node_node_all --config.sharding.strategy=custom --config.sharding.partition_size=0 \
  --config.sharding.parameters=node --config.sharding.gradients=node --config.sharding.optimizer=all
"$python" -m planner --config=configs/quickstart.py --cluster=emulated --nodes=4 \
  --png=docs/images/timeline.png >/dev/null
"$python" -m lab.pages
