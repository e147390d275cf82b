"""`StepTimer`: step time, tokens or examples per second, and model FLOP/s utilisation."""

# Dense matrix FLOP/s in bf16 with f32 accumulation (fp16 on V100 and T4, which have no bf16), from the vendors' data
# sheets, with half the value if a sheet assumes sparsity. The first pattern contained in the device kind applies.
PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989.5e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.5e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIE", 756.5e12),
    ("H100", 989.5e12),
    ("H800", 989.5e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A30", 165e12),
    ("A40", 149.7e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("V100S", 130e12),
    ("V100-PCIE", 112e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("TPU V5 LITE", 197e12),
    ("TPU V5", 459e12),  # v5p
    ("TPU V6 LITE", 918e12),
    ("TPU7X", 1153.5e12),  # a device is half of a chip
)


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak FLOP/s of one device by its name in jax (`NVIDIA H200`), or None if unknown."""
    words = device_kind.upper().replace("-", " ").split()
    if "MIG" in words:  # a partition of a device
        return None
    for pattern, flops in PEAK_FLOPS:
        wanted = pattern.replace("-", " ").split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return flops
    return None


class StepTimer:
    """Computes the mean speed of steps from the times at which they ended. The first time only starts the clock.

    The mean is over the steps since the last row of the metrics: steps of different kinds, such as steps of local SGD
    with and without an exchange, count as often as they occur. A step has `per_step` tokens or examples (`unit`).
    `flops_per_step` counts the model's FLOPs for the global batch without recomputation. `peak_flops_per_s` is the sum
    over all devices. None: unknown.
    """

    def __init__(
        self, per_step: float, unit: str, flops_per_step: float | None = None, peak_flops_per_s: float | None = None
    ) -> None:
        self._per_step, self._unit = per_step, unit
        self._mfu_s = flops_per_step / peak_flops_per_s if flops_per_step and peak_flops_per_s else None
        self._of_row: tuple[int, float] | None = None  # step and the time at which it ended, without pauses
        self._latest: tuple[int, float] | None = None
        self._paused_s = 0.0

    def pause(self, seconds: float) -> None:
        """Excludes time spent outside of training (validating, saving a checkpoint) from the next measurement."""
        self._paused_s += seconds

    def row_written(self) -> None:
        """Begins the next mean with the step after the latest one."""
        self._of_row = self._latest

    def done(self, step: int, time_s: float) -> dict[str, float]:
        """Returns the speed of the steps since the last row, as keys of `metrics.jsonl`. `step` ended at `time_s`."""
        self._latest = step, time_s - self._paused_s
        if self._of_row is None or step <= self._of_row[0]:
            self._of_row = self._of_row or self._latest
            return {}
        (first, since_s), (_, until_s) = self._of_row, self._latest
        step_time_s = (until_s - since_s) / (step - first)
        if not step_time_s > 0:
            raise ValueError(f"step_time_s is {step_time_s}; it must be positive")
        speed = {"step_time_s": step_time_s, f"{self._unit}_per_s": self._per_step / step_time_s}
        return speed if self._mfu_s is None else speed | {"mfu": self._mfu_s / step_time_s}
