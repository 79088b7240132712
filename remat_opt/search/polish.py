"""Schedules of any form, for small steps: values forgotten over gaps and made again, one after another.

A gap of a buffer is the time between two of its events in which nobody needs it. Forgetting a value over a gap that
covers the peak lowers it there, and costs a repeat (`moves.forget`). `lower` does so until a budget is met, by a beam
search; `shorten` exchanges: one value is forgotten, and what that frees is filled (`moves.fill`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from remat_opt.search.moves import fill, forget
from remat_opt.search.problem import Problem, Solution, time_first

_BEAM = 4
_MOST_STEPS = 24
_MOST_EXCHANGES = 6


def lower(problem: Problem, start: Solution, budget: int) -> Solution | None:
    """A schedule within a budget, from one that is not, by forgetting values; None where none was found."""
    beam = [start]
    seen = {_key(start)}
    for _ in range(_MOST_STEPS):
        found: list[Solution] = []
        for solution in beam:
            for candidate in forgetting(problem, solution, budget):
                if _key(candidate) not in seen:
                    seen.add(_key(candidate))
                    found.append(candidate)
        fitting = [solution for solution in found if solution.peak <= budget]
        if fitting:
            return min((fill(problem, solution, budget) for solution in fitting), key=time_first)
        if not found:
            return None
        beam = _promising(found, start, budget)
    return None


def shorten(problem: Problem, solution: Solution, budget: int) -> Solution:
    """A schedule that takes no longer and fits, too, by forgetting one value and keeping others in its place."""
    for _ in range(_MOST_EXCHANGES):
        exchanged = (fill(problem, one, budget) for one in forgetting(problem, solution, budget) if one.peak <= budget)
        best = min(exchanged, key=time_first, default=solution)
        if best.extra_seconds >= solution.extra_seconds:
            break
        solution = best
    return solution


def forgetting(problem: Problem, solution: Solution, budget: int) -> Iterator[Solution]:
    """The schedules in which one value more is forgotten over the first moment that is above a budget, or at the peak.

    What it is made of is kept until then where that stays within the budget, and made again, too, where it does not;
    and, as another schedule, always made again.
    """
    live = solution.liveness.live
    above = np.flatnonzero(live > budget)
    moment = int(above[0]) if len(above) else solution.liveness.peak_position
    for buffer, read in _gaps(problem, solution, moment):
        schedules = (forget(problem, solution, buffer, read, extend=extend) for extend in (budget, -1))
        for schedule in dict.fromkeys(schedules):
            if schedule is not None:
                yield problem.scheduled(schedule, solution.choice)


def _gaps(problem: Problem, solution: Solution, moment: int) -> Iterable[tuple[int, int]]:
    """Buffers that lie idle at a moment, each with the number of the read behind it."""
    lives = solution.liveness.lives
    there = (lives.birth < moment) & (lives.death > moment) & (lives.size > 0)
    for buffer in np.flatnonzero(there).tolist():
        reads = lives.reads[lives.reads_start[buffer] : lives.reads_start[buffer + 1]]
        read = int(np.searchsorted(reads, moment))
        if read < len(reads) and reads[read] > moment:
            yield buffer, read


def _promising(found: list[Solution], start: Solution, budget: int) -> list[Solution]:
    """Half of the beam for the least that is still above the budget, half for what costs least for what it lowers."""

    def above(solution: Solution) -> float:
        return float(np.maximum(solution.liveness.live - budget, 0).sum())

    at_start = above(start)

    def rate(solution: Solution) -> float:
        lowered = at_start - above(solution)
        return (solution.extra_seconds - start.extra_seconds) / lowered if lowered > 0 else np.inf

    by_height = sorted(found, key=lambda one: (above(one), one.extra_seconds))[: _BEAM // 2]
    by_rate = sorted(found, key=lambda one: (rate(one), above(one)))[:_BEAM]
    return list(dict.fromkeys((*by_height, *by_rate)))[:_BEAM]


def _key(solution: Solution) -> tuple[int, ...]:
    return solution.schedule.order
