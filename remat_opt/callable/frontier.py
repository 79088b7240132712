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
        peak_bytes: peak of temporary memory, of one device.
        extra_seconds: estimated time of the recomputation, and of waiting for the host; negative where the plan is
            faster than the plain step, since what is not stored is not moved.
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

    Attributes:
        points: the points. The original step is the last of them unless one that needs less memory is as fast.
        devices: on how many the step runs; `Plan.predicted` is of all of them together.
    """

    points: tuple[FrontierPoint, ...]
    devices: int = 1

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
        points = [(self._share_of_time(point), point.peak_bytes) for point in self.points]
        return draw_frontier(points, f"Memory against time on {given.target}", "time")

    def _repr_html_(self) -> str:
        return to_html(str(self), self._figure)

    def _share_of_time(self, point: FrontierPoint) -> float:
        return self.devices * point.extra_seconds / (point.plan.predicted.seconds or 1)

    def __str__(self) -> str:
        given = self.points[-1].plan
        has_host = any(point.plan.predicted.host_bytes for point in self.points)
        head = f"{'temporary, predicted':>20}  {'of plain':>8}  {'extra FLOPs':>11}  {'extra time':>10}"
        lines = [head + (f"  {'on the host':>12}" if has_host else "")]
        plain = given.predicted.plain_peak_bytes / self.devices
        for point in self.points:
            flops = point.extra_flops / max(given.predicted.flops, 1)
            line = _line(point.peak_bytes, plain, flops, self._share_of_time(point))
            line += f"  {point.plan.predicted.host_bytes / 1e6:9.1f} MB" if has_host else ""
            if line[_SIZE:] != lines[-1][_SIZE:]:  # of equal shares the least memory
                lines.append(line)
        if given.is_plain:
            lines[-1] += "  plain"
        else:
            lines.append(f"{_line(plain, plain, 0.0, 0.0)}  plain")
        return "\n".join(lines)


_SIZE = 20  # characters of the peak in a line


def _line(peak: float, plain: float, extra_flops: float, extra_time: float) -> str:
    return f"{peak / 1e6:17.1f} MB  {peak / max(plain, 1):8.0%}  {extra_flops:11.1%}  {extra_time:10.1%}"


def trace_frontier(function: OptimizedFunction, args: tuple, kwargs: dict, *, budgets: int) -> Frontier:
    """The Pareto front that a search found; of the other solvers, of their answers to budgets up to the plain peak."""
    prepared, settings = function.prepare(*args, **kwargs), function.settings
    with SearchProgress() as progress, reporting_to(progress):
        every = Forms(prepared, settings).frontier(budgets)
    devices = function.devices(prepared, args, kwargs)
    return Frontier(tuple(_point(decision_of(found, settings).plan, devices) for found in every), devices)


def _point(plan: Plan, devices: int) -> FrontierPoint:
    found = plan.predicted
    return FrontierPoint(found.peak_bytes // devices, found.extra_seconds / devices, found.extra_flops, plan)
