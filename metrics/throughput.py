"""Step time, tokens or examples per second, and model FLOP/s utilisation, from the times at which steps ended."""

from dataclasses import dataclass

# Dense matrix FLOP/s in bf16 with f32 accumulation (fp16 on V100 and T4, which have no bf16), from the vendors' data
# sheets; half the value where a sheet assumes sparsity. The first pattern contained in the device kind applies.
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
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("V100S", 130e12),
    ("V100-PCIE", 112e12),
    ("V100", 125e12),
    ("T4", 65e12),
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


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The speed of one step; `mfu` is a fraction, or None if the peak or the model's FLOPs are unknown."""

    step_time_s: float
    per_s: float
    unit: str  # tokens | examples
    mfu: float | None

    def scalars(self) -> dict[str, float]:
        """Returns the speed as keys of `metrics.jsonl`."""
        known = {} if self.mfu is None else {"mfu": self.mfu}
        return {"step_time_s": self.step_time_s, f"{self.unit}_per_s": self.per_s} | known


def throughput(
    *,
    step_time_s: float,
    per_step: float,
    unit: str,
    flops_per_step: float | None = None,
    peak_flops_per_s: float | None = None,
) -> Throughput:
    """Returns the speed of a step of `per_step` tokens or examples that took `step_time_s`.

    `flops_per_step` counts the model's FLOPs for the global batch without recomputation; `peak_flops_per_s` is the sum
    over all devices.
    """
    if not step_time_s > 0:
        raise ValueError(f"step_time_s is {step_time_s}; it must be positive")
    mfu = None
    if flops_per_step is not None and peak_flops_per_s is not None:
        mfu = flops_per_step / step_time_s / peak_flops_per_s
    return Throughput(step_time_s=step_time_s, per_s=per_step / step_time_s, unit=unit, mfu=mfu)


class StepTimer:
    """Computes the speed of steps from the times at which they ended; the first time only starts the clock."""

    def __init__(
        self, per_step: float, unit: str, flops_per_step: float | None = None, peak_flops_per_s: float | None = None
    ) -> None:
        self._per_step, self._unit = per_step, unit
        self._flops_per_step = flops_per_step
        self._peak_flops_per_s = peak_flops_per_s
        self._last: tuple[int, float] | None = None
        self._paused_s = 0.0

    def pause(self, seconds: float) -> None:
        """Excludes time spent outside of training (validating, saving a checkpoint) from the next measurement."""
        self._paused_s += seconds

    def done(self, step: int, time_s: float) -> Throughput | None:
        """Returns the speed of the steps since the last call, given that `step` ended at `time_s`."""
        last, self._last = self._last, (step, time_s)
        paused_s, self._paused_s = self._paused_s, 0.0
        if last is None or step <= last[0]:
            return None
        return throughput(
            step_time_s=(time_s - last[1] - paused_s) / (step - last[0]),
            per_step=self._per_step,
            unit=self._unit,
            flops_per_step=self._flops_per_step,
            peak_flops_per_s=self._peak_flops_per_s,
        )
