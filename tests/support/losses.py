"""When the losses of two runs part."""

from collections.abc import Sequence

SAME = 1e-5  # losses that differ by less, relatively, count as equal


def same_until(losses: Sequence[float], others: Sequence[float]) -> tuple[int | None, float]:
    """Returns the first step whose losses differ by more than `SAME`, None if none does, and the most before it."""
    apart = [abs(a - b) / a for a, b in zip(losses, others, strict=True)]
    first = next((i for i, difference in enumerate(apart) if difference > SAME), None)
    return None if first is None else first + 1, max(apart[:first], default=0.0)
