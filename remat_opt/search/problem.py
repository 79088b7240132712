"""What every search is given and what it returns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from remat_opt.graph.derive import Choice, derive, early_order
from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Liveness, simulate
from remat_opt.graph.schedule import Run, Schedule


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A graph with the order in which its ops run for the first time.

    Attributes:
        graph: the step.
        memo: what searches keep from one budget to the next, by name.
    """

    graph: Graph
    memo: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Program order, updates as early as they can be."""
        return early_order(self.graph)

    @functools.cached_property
    def plain(self) -> Solution:
        """Everything saved, in `order`."""
        schedule = Schedule((Run(self.order),)) if self.order else Schedule(())
        return Solution(Choice(), schedule, simulate(self.graph, schedule), 0.0)

    def solution(self, choice: Choice) -> Solution:
        """Derive and simulate the schedule of a choice."""
        schedule = derive(self.graph, choice, self.order)
        held = choice.saved & self._read_after(min(choice.turning_points, default=len(self.order)), schedule)
        choice = dataclasses.replace(choice, saved=held)  # what nobody reads again was not saved for anything
        return Solution(choice, schedule, simulate(self.graph, schedule), schedule.extra_seconds(self.graph))

    def _read_after(self, turn: int, schedule: Schedule) -> frozenset[int]:
        """Values that are read behind a turning point, or to recompute something."""
        behind = (*self.order[turn:], *schedule.recomputed)
        return frozenset(value for op in behind for value in self.graph.ops[op].inputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """A schedule with what the liveness model says of it (bytes) and its estimated extra time (seconds)."""

    choice: Choice
    schedule: Schedule
    liveness: Liveness
    extra_seconds: float

    @property
    def peak(self) -> int:
        """Peak of temporary memory in bytes."""
        return self.liveness.peak


Solver = Callable[[Problem, "int | None"], Solution]
"""`solve(problem, budget)`: the least extra time with a peak of at most `budget` bytes, or, where that cannot be
reached or `budget` is None, the least peak that the algorithm finds."""
