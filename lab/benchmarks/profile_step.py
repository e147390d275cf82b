"""Traces a step of the quickstart, and records the times of compute and collectives of each device.

    python -m lab.benchmarks.profile_step

configs/quickstart.py runs to step STEP, which `profile.start` traces. Adds a line to
results/measured/profile_step.jsonl, from which `lab.pages` draws docs/images/profile.png.
"""

import sys
from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure

from configs import base, quickstart
from lab.benchmarks.runner import WORKDIR, Key, program, run_missing, train
from lab.plots import draw_timelines
from lab.records import MEASURED, Line
from training.devices import use_devices
from training.experiment import make_experiment
from training.metrics.run_files import RunFiles
from training.profiling import BETWEEN, COMPUTE, INSIDE, Span, device_spans

RESULTS = MEASURED / "profile_step.jsonl"
STEP = 12
KEYS = {"num_steps": STEP, "profile.start": STEP, "profile.steps": 1, "eval.every": 0, "sample.length": 0}
GAP_S = 5e-4  # spans of a kind that are nearer are one in the record


@program
def main() -> int:
    """Traces the step if the record lacks it; returns 1 if the run failed."""
    return run_missing(RESULTS, [{"config": "configs/quickstart.py", "step": STEP}], measured)


def measured(key: Key) -> dict[str, Any]:
    """Returns the spans in seconds of each device, by kind, from the start of the step."""
    run, command = train(WORKDIR / "profile_step", key["config"], KEYS)
    devices = traced(run)
    start = min(span[0] for spans in devices for span in spans)
    kinds = (COMPUTE, INSIDE, BETWEEN)
    lanes = [{kind: joined(spans, kind, start) for kind in kinds} for spans in devices]
    return {"command": command, "devices": lanes}


def traced(run: RunFiles) -> list[list[Span]]:
    """Returns the spans of each device in a run's trace. Compiles the step again, to know the kinds of operations.

    ValueError if the trace has no operation of the step.
    """
    settings = quickstart.get_config()
    settings.update_from_flattened_dict(KEYS)
    config = base.typed(settings)
    use_devices(config)
    experiment = make_experiment(config)
    text = experiment.compile_train_step().as_text() or ""
    spans = device_spans(run.run_dir / "profile", text, experiment.plan.layout.shape)
    if not any(spans):
        raise ValueError(f"{run.run_dir / 'profile'} has no operation of step {STEP}; run the benchmark again")
    return spans


def joined(spans: Iterable[Span], kind: str, start_ns: float) -> list[tuple[float, float]]:
    """Returns the (start, end) in seconds of the spans of a kind, and joins spans with less than GAP_S between them."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((a, b) for a, b, of in spans if of == kind):
        first, last = round((start - start_ns) / 1e9, 5), round((end - start_ns) / 1e9, 5)
        if found and first - found[-1][1] < GAP_S:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def picture(line: Line, *, is_dark: bool) -> Figure:
    """Returns the picture of a step."""
    label = lambda kind: kind if kind == COMPUTE else f"collectives {kind}"
    lanes = {
        f"node {i // 2}, device {i % 2}": {label(kind): spans for kind, spans in kinds.items()}
        for i, kinds in enumerate(line["devices"])
    }
    return draw_timelines(lanes, f"seconds from the start of step {line['step']}", is_dark=is_dark)


if __name__ == "__main__":
    sys.exit(main())
