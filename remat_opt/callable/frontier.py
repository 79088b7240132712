"""`frontier`: the Pareto front of memory and time for one step, to print or to choose a plan from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remat_opt.callable.function import OptimizedFunction
from remat_opt.planner.forms import Forms
from remat_opt.planner.plan import Plan
from remat_opt.planner.planning import decision_of
from remat_opt.planner.progress import SearchProgress
from remat_opt.report.notebook import to_html
from remat_opt.report.pictures import draw_frontier, save
from remat_opt.search.progress import reporting_to


@dataclasses.dataclass(frozen=True)
class FrontierPoint:
    """One schedule that no other found schedule beats in both memory and time. All figures are predictions.

    Attributes:
        peak_bytes: peak of temporary memory.
        extra_seconds: estimated time of the recomputation, and of waiting for the host.
        extra_flops: FLOPs of the recomputation.
        plan: the plan to give to `optimize(fun, plan=point.plan)`.
    """

    peak_bytes: int
    extra_seconds: float
    extra_flops: float
    plan: Plan


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The points from the least memory to the least time; iterates over them.

    `print` it for a table, `.save("frontier.png")` draws it.
    """

    points: tuple[FrontierPoint, ...]

    def __iter__(self) -> Iterator[FrontierPoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> FrontierPoint:
        return self.points[index]

    def cheapest_within(self, peak_bytes: int) -> FrontierPoint:
        """The point of least extra time whose predicted peak is at most `peak_bytes`.

        Raises:
            ValueError: there is none; the message says the least peak.
        """
        fitting = [point for point in self.points if point.peak_bytes <= peak_bytes]
        if not fitting:
            raise ValueError(f"expected at least {self.points[0].peak_bytes} bytes, got {peak_bytes}")
        return fitting[-1]

    def save(self, path: str | Path) -> None:
        """Draw temporary memory against estimated extra time into a file; its ending says which format.

        Raises:
            ImportError: matplotlib is not installed; the message says what to install.
        """
        save(self._figure(), path)

    def _figure(self) -> Any:
        given = self.points[-1].plan
        points = [(point.extra_seconds / (given.predicted.seconds or 1), point.peak_bytes) for point in self.points]
        return draw_frontier(points, f"Memory against time on {given.target}", "time")

    def _repr_html_(self) -> str:
        return to_html(str(self), self._figure)

    def __str__(self) -> str:
        given = self.points[-1].plan.predicted
        has_host = any(point.plan.predicted.host_bytes for point in self.points)
        head = f"{'peak':>12}  {'of plain':>8}  {'extra FLOPs':>11}  {'extra time':>10}"
        lines = [head + (f"  {'on the host':>12}" if has_host else "")]
        for point in self.points:
            host = f"  {point.plan.predicted.host_bytes / 1e6:9.1f} MB" if has_host else ""
            lines.append(
                f"{point.peak_bytes / 1e6:9.1f} MB  {point.peak_bytes / max(given.plain_peak_bytes, 1):8.0%}  "
                f"{point.extra_flops / max(given.flops, 1):11.1%}  {point.extra_seconds / (given.seconds or 1):10.1%}"
                f"{host}"
            )
        return "\n".join(lines)


def trace_frontier(function: OptimizedFunction, args: tuple, kwargs: dict, *, budgets: int) -> Frontier:
    """The Pareto front that a search found; of the other solvers, of their answers to budgets up to the plain peak."""
    prepared, settings = function.prepare(*args, **kwargs), function.settings
    with SearchProgress() as progress, reporting_to(progress):
        every = Forms(prepared, settings).frontier(budgets)
    plans = [decision_of(found, settings).plan for found in every]
    return Frontier(
        tuple(
            FrontierPoint(plan.predicted.peak_bytes, plan.predicted.extra_seconds, plan.predicted.extra_flops, plan)
            for plan in plans
        )
    )
