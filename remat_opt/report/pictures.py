"""Explanations and frontiers as pictures. The one file that imports matplotlib, and only when something is drawn."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remat_opt.report.curves import Curve
from remat_opt.report.findings import Findings
from remat_opt.report.lives import Place
from remat_opt.units import format_bytes, format_change

_BEFORE, _AFTER, _HOST, _AGAIN, _LOOP = "#8c8c8c", "#1f6fb4", "#2a8f6a", "#d9651e", "#d5d9e0"
_COLOURS = {Place.SAVED: _AFTER, Place.FREED: "#a5c8e6", Place.RECOMPUTED: _AGAIN, Place.HOST: _HOST}
_WIDTH, _TOP, _ROW = 11.0, 3.4, 0.2  # inches: of the figure, of the curves, of one tensor
_LONGEST = 52  # characters of a tensor's name
_CHARACTER = 0.06  # inches, of the small letters
_SMALL = 8


def draw_step(explanation: Findings) -> Any:
    """A matplotlib figure of a step over its estimated time (ms).

    Above is live memory (MB), before and after, and in the host's memory; below are loops, what is recomputed, and
    where the largest tensors are.

    Raises:
        ImportError: matplotlib is not installed.
    """
    lives = explanation.lives
    rows = len(lives) + len(_bars(explanation))
    figure_class, heights = _figure_class(), (_TOP, max(rows, 1) * _ROW)
    figure = figure_class(figsize=(_WIDTH, sum(heights) + 1.2), layout="constrained", dpi=150)
    above, below = figure.subplots(2, sharex=True, height_ratios=heights)
    _draw_curves(above, explanation)
    _draw_lives(below, explanation)
    above.set_xlim(0, 1e3 * max(explanation.before.seconds, explanation.after.seconds))
    below.set_xlabel(f"estimated time on {explanation.plan.target} (ms)")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_curves(axes: Any, explanation: Findings) -> None:
    plan, predicted = explanation.plan, explanation.predicted
    _draw(axes, explanation.before, _BEFORE, "as given")
    if not plan.is_plain:
        _draw(axes, explanation.after, _AFTER, "planned")
    if predicted.host_bytes:
        _draw(axes, explanation.on_host, _HOST, "on the host")
    axes.set_ylim(bottom=0)
    share = ", of one device" if explanation.devices > 1 else ""
    axes.set_ylabel(f"live temporary memory (MB{share})")
    change = format_change(explanation.after.peak, explanation.before.peak)
    axes.set_title(
        "Nothing is recomputed" if plan.is_plain else f"Predicted peak {change}", loc="left", fontsize="medium"
    )
    _legend(axes)


def _draw_lives(axes: Any, explanation: Findings) -> None:
    bars, lives = _bars(explanation), explanation.lives
    for row, (_, colour, spans) in enumerate(bars):
        axes.broken_barh([_scaled(begin, end) for begin, end, _ in spans], (row - 0.4, 0.8), color=colour)
        _write_into(axes, explanation, row, spans)
    for row, life in enumerate(lives, len(bars)):
        for before, after in itertools.pairwise(life.spans):
            axes.hlines(row, 1e3 * before.end, 1e3 * after.begin, color=_BEFORE, linewidth=0.8, linestyle=":")
        for span in life.spans:
            axes.broken_barh([_scaled(span.begin, span.end)], (row - 0.35, 0.7), color=_COLOURS[span.place])
        axes.text(
            1.01, row, format_bytes(life.size), transform=axes.get_yaxis_transform(), va="center", fontsize=_SMALL
        )
    labels = [*(label for label, _, _ in bars), *_labels([life.name for life in lives])]
    axes.set_yticks(range(len(labels)), labels, fontsize=_SMALL)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    if lives:
        axes.set_title("The largest tensors", loc="left", fontsize="medium")
        shown = {span.place for life in lives for span in life.spans}
        for place in (place for place in Place if place in shown):
            axes.broken_barh([], (0, 0), color=_COLOURS[place], label=place.value)  # for the legend alone
        _legend(axes)


def _bars(explanation: Findings) -> list[tuple[str, str, list[tuple[float, float, str]]]]:
    """What stands above the tensors: a label, a colour, and begins and ends with what is written into the bar."""
    loops, again = explanation.loop_times, _recomputation(explanation.after)
    return [("loops", _LOOP, loops)] * bool(loops) + [("recomputation", _AGAIN, again)] * bool(again)


def _recomputation(curve: Curve) -> list[tuple[float, float, str]]:
    edges = np.flatnonzero(np.diff(curve.recomputed, prepend=False, append=False))
    return [(float(curve.begins[first]), float(curve.begins[end]), "") for first, end in edges.reshape(-1, 2)]


def _write_into(axes: Any, explanation: Findings, row: int, spans: list[tuple[float, float, str]]) -> None:
    """Write what the bars of a row are into those that are wide enough."""
    per_second = 0.55 * _WIDTH / max(explanation.before.seconds, explanation.after.seconds)
    for begin, end, text in spans:
        for shorter in (text, text.partition(" in reverse")[0], "".join(filter(str.isdigit, text))):
            if shorter and len(shorter) * _CHARACTER < (end - begin) * per_second:
                middle = 1e3 * (begin + end) / 2
                axes.text(middle, row, shorter, ha="center", va="center_baseline", fontsize=_SMALL)
                break


def _scaled(begin: float, end: float) -> tuple[float, float]:
    """Begin and width in milliseconds."""
    return 1e3 * begin, 1e3 * (end - begin)


def _labels(names: Sequence[str]) -> list[str]:
    """Names without the module that all are in, the end of those that are still too long."""
    root = names[0].partition("/")[0] + "/" if names else ""
    if all(name.startswith(root) for name in names):
        names = [name.removeprefix(root) for name in names]
    return [name if len(name) <= _LONGEST else "…" + name[1 - _LONGEST :] for name in names]


def _legend(axes: Any) -> None:
    """Above the axes, at the right, where nothing is drawn."""
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes.legend(**place, frameon=False, ncols=4, columnspacing=1.2, handlelength=1.4, fontsize=_SMALL)


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
