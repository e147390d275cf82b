"""Numbers as readable text (`4.2 MB`, `118 ms`, `1h 04m`, `12,345`)."""

import math

UNKNOWN = "\N{EN DASH}"  # a missing number

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(count: float) -> str:
    """Returns a byte count with a decimal prefix, as for link speeds (`4.19 MB`)."""
    if not math.isfinite(count):
        return str(count)
    value, unit = abs(float(count)), 0
    while value >= 999.5 and unit < len(_BYTES) - 1:
        value, unit = value / 1000, unit + 1
    sign = "-" if count < 0 else ""
    return f"{sign}{value:.0f} B" if unit == 0 else f"{sign}{_three_digits(value)} {_BYTES[unit]}"


def format_seconds(seconds: float) -> str:
    """Returns a duration, from microseconds to days (`350 us`, `118 ms`, `1.24 s`, `3m 05s`, `1h 04m`, `2d 03h`)."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def format_count(value: float) -> str:
    """Returns a count with thousands separators, or with a prefix from a million on (`12,345`, `3.21 M`)."""
    if not math.isfinite(value):
        return str(value)
    for limit, prefix in ((999.5e9, "T"), (999.5e6, "G"), (999.5e3, "M")):
        if abs(value) >= limit:
            return f"{_three_digits(value / (limit / 999.5) / 1000)} {prefix}"
    return f"{value:,.0f}" if abs(value) >= 99.95 or value == int(value) else _three_digits(value)


def format_loss(value: float) -> str:
    """Returns a loss with four decimals."""
    return f"{value:.4f}" if math.isfinite(value) else str(value)


def format_percent(fraction: float) -> str:
    """Returns a fraction as a percentage (`41.3 %`)."""
    return f"{100 * fraction:.1f} %" if math.isfinite(fraction) else str(fraction)


def _three_digits(value: float) -> str:
    """Returns three significant digits of a number under 1000, without an exponent."""
    magnitude = abs(value)
    return f"{value:.{0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2}f}"
