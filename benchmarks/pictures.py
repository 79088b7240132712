"""Pictures of plans: memory and the largest tensors over the step, and memory against FLOPs.

    python -m benchmarks.pictures                          # those that the pages show beside the tables' own
    python -m benchmarks.pictures gpt_h200_offload

Those of a table's rows come with `python -m benchmarks.run … --pictures`. Steps are planned again, nothing is compiled.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import remat_opt
from benchmarks.tables import POLICIES, Row
from benchmarks.variants import example_of
from remat_opt.report import pictures as drawing

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STEPS: Mapping[str, tuple[Row, dict[str, Any]]] = {
    "gpt_h200_offload": (Row("gpt"), {"budget": 0.3, "offload": True}),
    "gpt_scan_h200_step": (Row("gpt_scan"), {}),
}
"""Pictures of single steps, with what `optimize` is told."""

_OURS, _OTHERS = "#1f6fb4", "#c1622d"


def draw_row(row: Row, target: str, results: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw a row's two pictures; it is planned again, nothing is compiled.

    Args:
        row: the network.
        target: name of the target.
        results: of the row's variants, whose compiled figures become points.
        folder: to write to.

    Returns:
        The files: `<network>_<target>_step.png` and `<network>_<target>_frontier.png`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    step, frontier = (folder / f"{row.network}_{target}_{name}.png" for name in ("step", "frontier"))
    optimized, args = draw_step(row, step, target=target)
    found = remat_opt.frontier(optimized, *args, target=target)
    draw_frontier(f"{row.network} on {target}", found, results, frontier)
    return [step, frontier]


def draw_step(row: Row, path: Path, **options: Any) -> tuple[Any, tuple]:
    """Draw a row's step, planned with some options of `optimize`; the planned step and its arguments."""
    example = example_of(row)
    optimized = remat_opt.optimize(
        example.train_step, verify=False, donate_argnums=example.donate_argnums, **{"target": "h200", **options}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat_opt.RematWarning)
        optimized.explain(*example.abstract_args).save(path)
    return optimized, example.abstract_args


def draw_frontier(
    title: str, frontier: remat_opt.Frontier, results: Mapping[str, Mapping[str, Any]], path: Path
) -> None:
    """Draw memory (MB) against extra FLOPs (%): the predicted frontier, and what was compiled as points.

    Args:
        title: of the picture.
        frontier: ours, as predicted.
        results: of `benchmarks.variants.measure_variant`, by variant; those without a figure are left out.
        path: of the PNG.
    """
    points = _fewest_flops([(point.extra_flops / point.plan.predicted.flops, point.peak_bytes) for point in frontier])
    figure = drawing.draw_frontier(points, title, "FLOPs", "our frontier, predicted")
    (axes,) = figure.axes
    mine, others = _points(results, True), _points(results, False)
    axes.plot(*_axes_of(mine), "o", color=_OURS, label="ours, compiled")
    axes.plot(*_axes_of(others), "s", color=_OTHERS, label="other methods, compiled")
    axes.autoscale(axis="y")
    axes.set_ylim(bottom=0)
    widest = max([*(100 * share for share, _ in points), *_axes_of(others)[0], 1.0])
    for names, extra, size in _labels(others, 0.1 * widest, 0.05 * axes.get_ylim()[1]):
        offset, side = ((-6, 4), "right") if extra > 0.5 * widest else ((6, 4), "left")
        axes.annotate(names, (extra, size), xytext=offset, textcoords="offset points", fontsize=8, ha=side)
    axes.legend(frameon=False)
    drawing.save(figure, path)


def _fewest_flops(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The points that no other beats in memory and FLOPs; a frontier is one in memory and time."""
    least = itertools.accumulate((size for _, size in sorted(points)), min)
    return [point for point, size in zip(sorted(points), least, strict=True) if point[1] == size]


def _points(results: Mapping[str, Mapping[str, Any]], ours: bool) -> dict[str, tuple[float, float]]:
    """Extra FLOPs (%) and memory (MB) of the variants that were compiled: ours, or all others."""
    return {
        _label(name): (100 * found["extra_flops"], found["temp_bytes"] / 1e6)
        for name, found in results.items()
        if "temp_bytes" in found and name.startswith("ours") == ours
    }


def _label(name: str) -> str:
    short = name.removesuffix("_saveable").replace("dots_with_no_batch_dims", "dots, no batch")
    return f"policy {short}" if name in POLICIES else name


def _labels(points: Mapping[str, tuple[float, float]], wide: float, high: float) -> list[tuple[str, float, float]]:
    """The names of the points with their places, those of points that lie close to each other in one."""
    labels: list[tuple[str, float, float]] = []
    for name, (extra, size) in points.items():
        for place, (names, x, y) in enumerate(labels):
            if abs(extra - x) < wide and abs(size - y) < high:
                labels[place] = (f"{names}; {name}", x, y)
                break
        else:
            labels.append((name, extra, size))
    return labels


def _axes_of(points: Mapping[str, tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [extra for extra, _ in points.values()], [size for _, size in points.values()]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(STEPS), help=f"of {', '.join(STEPS)}; default: all")
    for name in parser.parse_args().names:
        row, options = STEPS[name]
        draw_step(row, PICTURES / f"{name}.png", **options)
        print(PICTURES / f"{name}.png", flush=True)


if __name__ == "__main__":
    main()
