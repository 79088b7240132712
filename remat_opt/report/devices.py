"""The table of devices, as `python -m remat_opt targets` prints it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from remat_opt.targets import Target, extra_for, is_installed
from remat_opt.units import format_bytes, format_flops

_HEADINGS = ("target", "memory", "bfloat16", "float32", "memory/s", "host/s", "compiler", "device")


def device_records(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """Each device as a dictionary for JSON: bytes, bytes per second and FLOP/s."""
    return [
        {
            "name": target.name,
            "description": target.description,
            "memory_bytes": target.memory_bytes,
            "flops": dict(target.flops),
            "bandwidth": target.bandwidth,
            "host_bandwidth": target.host_bandwidth,
            "compiler_is_installed": is_installed(target),
        }
        for target in targets
    ]


def device_table(targets: Iterable[Target]) -> str:
    """The devices, one a line: memory, FLOP/s, bandwidth of the memory and to the host, and their compiler."""
    rows = [_HEADINGS, *map(_row, targets)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 0 < at < 6 else cell.ljust(width) for at, (cell, width) in enumerate(cells)
        ).rstrip()
        for cells in (zip(row, widths, strict=True) for row in rows)
    )


def _row(target: Target) -> tuple[str, ...]:
    return (
        target.name,
        "the host's" if target.memory_bytes is None else format_bytes(target.memory_bytes),
        *(f"{format_flops(target.flops[dtype])}/s" for dtype in ("bfloat16", "float32")),
        format_bytes(target.bandwidth),
        "–" if target.host_bandwidth is None else format_bytes(target.host_bandwidth),
        "installed" if is_installed(target) else f"remat_opt[{extra_for(target)}]",
        target.description,
    )
