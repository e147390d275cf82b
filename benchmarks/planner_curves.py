"""Plans a model of about 10 B parameters for 8 to 4096 A100s with several strategies, and draws what it costs.

    python -m benchmarks.planner_curves [--report]

Records the plans in results/derived/planner_curves.json and draws docs/images/planner_curves.png; `--report` only
draws. XLA for GPUs is needed (`make .venv/h100/installed`); nineteen programs are compiled, which takes minutes on 2
cores. Without its search for tiles of a fused softmax XLA compiles them faster; their compute is slower, all alike.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.records import DERIVED
from planner.curves import draw_curves
from planner.report import from_json

ROOT = Path(__file__).resolve().parent.parent
RECORD = DERIVED / "planner_curves.json"
PICTURE = ROOT / "docs" / "images" / "planner_curves.png"
MODEL = {  # BERT 10B's parameters in sizes that 4096 divides
    "batch.global_size": 32768,
    "model.num_layers": 48,
    "model.hidden": 4096,
    "model.intermediate": 16384,
    "model.num_heads": 64,
    "model.vocab_multiple": 4096,
}
STRATEGIES = (
    "hsdp",
    "zero3",
    "mics(64)",
    "custom+parameters=node+gradients=node+optimizer=all",
    "zero3+gather_inter=int8+hop_one_inter=int8",
)
FLAGS = ("--cluster=p4d.24xlarge", "--nodes=1,8,64,512", "--xla_flags=--xla_disable_hlo_passes=triton-softmax-rewriter")


def main() -> int:
    """Plans, records and draws; returns the exit code."""
    parser = argparse.ArgumentParser(description="Cost from 8 to 4096 devices.", allow_abbrev=False)
    parser.add_argument("--report", action="store_true", help="only draw, from the record")
    options = parser.parse_args()
    if not options.report:
        model = ["--config=configs/bert_10b.py", *(f"--config.{key}={value}" for key, value in MODEL.items())]
        command = [sys.executable, "-m", "planner", *model, *FLAGS, f"--strategy={','.join(STRATEGIES)}", "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return done.returncode
        RECORD.write_text(done.stdout)
    plans = from_json(RECORD.read_text())
    title = f"{plans[0].title.rpartition(', on ')[0]}, on nodes of {plans[0].cluster}"
    draw_curves(plans, title).savefig(PICTURE, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
