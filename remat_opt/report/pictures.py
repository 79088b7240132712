"""Explanations and frontiers as pictures. The one file that imports matplotlib, and only when something is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remat_opt.report.curves import Curve
from remat_opt.report.findings import Findings
from remat_opt.report.units import format_bytes, format_change

_BEFORE, _AFTER = "#8c8c8c", "#1f6fb4"


def draw_live_memory(explanation: Findings) -> Any:
    """A matplotlib figure of live memory (MB) over estimated time (ms), before and after.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plan = explanation.plan
    figure = _figure_class()(figsize=(9, 4.5), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    _draw(axes, explanation.before, _BEFORE, "as given")
    if not plan.is_plain:
        _draw(axes, explanation.after, _AFTER, "planned")
        _shade_recomputation(axes, explanation.after)
    axes.set_xlim(0, 1e3 * max(explanation.before.seconds, explanation.after.seconds))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"estimated time on {plan.target} (ms)")
    axes.set_ylabel("live temporary memory (MB)")
    change = format_change(explanation.after.peak, explanation.before.peak)
    axes.set_title("Nothing is recomputed" if plan.is_plain else f"Predicted peak {change}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def draw_frontier(points: Sequence[tuple[float, int]], title: str, cost: str, label: str = "predicted") -> Any:
    """A matplotlib figure of temporary memory (MB) against what it costs (%).

    Args:
        points: the cost as a share of the plain step's, and bytes; no point is beaten in both by another.
        title: of the picture.
        cost: what is counted, "time" or "FLOPs".
        label: of the curve.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _figure_class()(figsize=(7, 4.5), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    points = sorted(points)
    shares, sizes = [100 * share for share, _ in points], [size / 1e6 for _, size in points]
    axes.step(shares, sizes, where="post", color=_AFTER, alpha=0.5, label=label)
    axes.set_xlabel(f"extra {cost} (% of the plain step)")
    axes.set_ylabel("temporary memory (MB)")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def save(figure: Any, path: str | Path) -> None:
    """Write a figure to a file; its ending says which format."""
    figure.savefig(path)


def as_svg(figure: Any) -> str:
    """A figure as an element of an HTML page."""
    written = io.StringIO()
    figure.savefig(written, format="svg")
    return written.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure  # without pyplot: no window, no global state
    except ImportError as error:
        raise ImportError(
            'expected matplotlib, to draw the picture; write: pip install "remat_opt[plot]" '
            "(print shows the same as text)"
        ) from error
    return Figure


def _draw(axes: Any, curve: Curve, colour: str, label: str) -> None:
    axes.stairs(curve.live / 1e6, 1e3 * curve.begins, color=colour, label=f"{label}: {format_bytes(curve.peak)}")
    axes.stairs(curve.live / 1e6, 1e3 * curve.begins, color=colour, fill=True, alpha=0.15)
    axes.plot(1e3 * curve.peak_seconds, curve.peak / 1e6, marker="v", color=colour)


def _shade_recomputation(axes: Any, curve: Curve) -> None:
    label = "recomputation"
    begin = None
    for index, again in enumerate(curve.recomputed):
        if again and begin is None:
            begin = curve.begins[index]
        elif not again and begin is not None:
            span = (1e3 * begin, 1e3 * curve.begins[index])
            axes.axvspan(*span, ymax=0.02, color=_AFTER, alpha=0.6, linewidth=0, label=label)
            begin, label = None, "_"  # one entry in the legend
