"""Quantities as people read them. One place, so that every report writes them alike: MB is 10^6 bytes."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Bytes as "84.6 MB"; MB up to 10 GB, so that figures of one report can be compared at a glance."""
    size = abs(count)
    if size < 1e3:
        return f"{count:.0f} bytes"
    if size < 1e5:
        return f"{count / 1e3:.1f} kB"
    if size < 1e10:
        return f"{count / 1e6:,.1f} MB"
    return f"{count / 1e9:,.1f} GB"


def format_flops(count: float) -> str:
    """Floating point operations as "18.9 GFLOP"."""
    for scale, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")):
        if abs(count) >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:.0f} FLOP"


def format_seconds(seconds: float) -> str:
    """Seconds as "68 ms", "1.70 s" or "2 min 05 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def format_change(after: float, before: float) -> str:
    """The relative change as "−70 %" or "+31 %"; small ones with a digit more, "±0 %" for none, "" from nothing."""
    if not before:
        return ""
    percent = 100 * (after - before) / before
    digits = 0 if abs(percent) >= 9.5 else 1
    if round(percent, digits) == 0:
        return "±0 %"
    sign = "−" if percent < 0 else "+"
    return f"{sign}{abs(percent):.{digits}f} %"


def format_count(count: int, noun: str) -> str:
    """A number with its noun: "1 tensor", "26 tensors"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
