"""Numbers as people read them (pure)."""

from __future__ import annotations

import math
import time

NOTHING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """A number with some significant digits and a letter for thousands: 1,234 · 12.3k · 4.56M."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if abs(value) >= 1e4:
        return _with_unit(value, digits)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.{digits}g}"


def loss(value: float | None) -> str:
    """A loss."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.4f}"


def size(value: float | None) -> str:
    """Bytes."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{_with_unit(value, 3, ' ')}B" if abs(value) >= 999.5 else f"{value:.0f} B"


def _with_unit(value: float, digits: int, space: str = "") -> str:
    """In thousands, millions and so on, of which there are fewer than a thousand after rounding too."""
    for power, unit in enumerate("kMGTPE", 1):
        scaled = f"{value / 1000**power:.{digits}g}"
        if abs(float(scaled)) < 1000:
            return f"{scaled}{space}{unit}"
    return f"{value:.{digits}g}{space}"


def speed(value: float | None) -> str:
    """Bytes per second."""
    return NOTHING if value is None else f"{size(value)}/s"


def duration(seconds: float | None) -> str:
    """A span of time, in the two units that matter."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    for large, small, names in ((86400, 3600, "dh"), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    return f"{whole} s"


def ago(then: float, now: float) -> str:
    """How long since."""
    return "just now" if now - then < 2 else f"{duration(now - then)} ago"


def clock(at: float | None) -> str:
    """Date and time, in this machine's zone."""
    return NOTHING if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def times(ratio: float | None) -> str:
    """How many times as much."""
    return NOTHING if ratio is None or not math.isfinite(ratio) else f"{ratio:.1f}×"


def epochs(count: int) -> str:
    """1 epoch, 2 epochs."""
    return f"{count:,} epoch" + ("" if count == 1 else "s")
