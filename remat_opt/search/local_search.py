"""Local search on arbitrary schedules: evict values over gaps and recompute them (`eviction.py`), one by one.

`descend` lowers one peak after another, on steps of any size. On small steps `lower` evicts until a budget is met, by a
beam search, and `shorten` exchanges: it evicts one value and uses the freed bytes to drop repeats
(`drop_recomputation.fill`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from remat_opt.search.drop_recomputation import fill
from remat_opt.search.eviction import Eviction, Gaps, bytes_above
from remat_opt.search.problem import Problem, Solution, time_first

_BEAM = 4
_SIMULATED = 8  # changes in each step of the beam
_MOST_STEPS = 24
_PATIENCE = 3  # steps of the beam that lower nothing
_MOST_EXCHANGES = 6
_LARGEST = 24  # values at one peak of a descent that may be evicted
_TRIED_AT_ONCE = 4  # of these, simulated
_EFFECTIVE = 0.25  # of what the change lowers that lowers most
_MOST_SIMULATED = 4_000_000  # ops of schedules, in one descent


Option = TypeVar("Option", "Change", Solution)


def descend(problem: Problem, start: Solution, is_allowed: Callable[[Solution], bool]) -> Iterator[Solution]:
    """Schedules of less and less peak: in each one value more is evicted at the peak of the one before.

    Of the changes that lower the peak by not much less than the best of them does, the one that costs least, in time
    and in FLOPs, for each byte. Where none is left, repeats that this peak has room to save are taken out, once, and
    what that gives back can be spent again.

    Args:
        problem: the step.
        start: where to begin.
        is_allowed: which schedules may be taken.
    """
    solution, filled_at, simulated = start, -1, 0
    while simulated < _MOST_SIMULATED:
        found: Solution | None = None
        for tried in _promising_first(problem, solution):
            simulated += sum(len(one.liveness.live) for one in tried)
            lower = [one for one in tried if _height(one) < _height(solution) and is_allowed(one)]
            if lower:
                found = _worth_most(problem, solution, lower)
                break
        if found is None:
            if solution.peak == filled_at:
                return
            filled_at = solution.peak
            found = fill(problem, solution, filled_at)
            if _price(problem, found) >= _price(problem, solution):
                return
        yield (solution := found)


def _promising_first(problem: Problem, solution: Solution) -> Iterator[list[Solution]]:
    """Schedules with one value more evicted at the peak, a few at a time, those that promise most first: of the
    largest buffers there, down to those that are too small to lower it effectively."""
    gaps = Gaps(problem, solution)
    evictions: dict[Eviction, None] = {}
    most = 0
    for gap in itertools.islice(gaps.at(solution.liveness.peak_position), _LARGEST):
        if gaps.lives.size[gap.buffer] < _EFFECTIVE * most:
            break
        for extend in (solution.peak - 1, -1):
            eviction = gaps.evict(gap, extend=extend)
            if eviction is None:
                break
            if (eviction.peak, eviction.moments) < _height(solution):
                evictions[eviction] = None
                most = max(most, solution.peak - eviction.peak)
            if not eviction.extends:
                break  # without that it is the same

    def rate(one: Eviction) -> tuple[bool, float]:
        price = _part_of_step(problem, one.extra_seconds, one.extra_flops)
        return solution.peak - one.peak < _EFFECTIVE * most, price / max(solution.peak - one.peak, 1)

    ordered = sorted(evictions, key=rate)
    for first in range(0, len(ordered), _TRIED_AT_ONCE):
        yield [gaps.scheduled(one.reader, one.recomputed) for one in ordered[first : first + _TRIED_AT_ONCE]]


def _height(solution: Solution) -> tuple[int, int]:
    """The peak, and how often it is reached: of several peaks of one height each has to be lowered."""
    return solution.peak, solution.liveness.moments_at_peak


def _price(problem: Problem, solution: Solution) -> float:
    return _part_of_step(problem, solution.extra_seconds, solution.schedule.extra_flops(problem.graph))


def _part_of_step(problem: Problem, seconds: float, flops: float) -> float:
    """Time and FLOPs, each as a part of the step's, added."""
    return seconds / (problem.graph.seconds or 1) + flops / (problem.graph.flops or 1)


def _worth_most(problem: Problem, solution: Solution, lower: list[Solution]) -> Solution:
    most, price = max(solution.peak - one.peak for one in lower), _price(problem, solution)
    effective = [one for one in lower if solution.peak - one.peak >= _EFFECTIVE * most]
    rates = {one: (_price(problem, one) - price) / max(solution.peak - one.peak, 1) for one in effective}
    return min(effective, key=lambda one: (rates[one], _height(one)))


def lower(problem: Problem, start: Solution, budget: int) -> Solution | None:
    """A schedule within a budget, from one that is not, by evicting values; None where none was found."""
    beam, seen = [start], {_key(start)}
    least, failed = bytes_above(start.liveness.live, budget), 0
    for _ in range(_MOST_STEPS):
        changes = [change for solution in beam for change in changes_of(problem, solution, budget)]
        promising = _best(changes, [change.eviction.above for change in changes], start, budget, _SIMULATED)
        simulated = {_key(one): one for one in (change.scheduled() for change in promising)}
        found = [one for key, one in simulated.items() if key not in seen]
        seen.update(simulated)
        fitting = [solution for solution in found if solution.peak <= budget]
        if fitting:
            return min((fill(problem, solution, budget) for solution in fitting), key=time_first)
        if not found:
            return None
        above = [bytes_above(solution.liveness.live, budget) for solution in found]
        least, failed = (min(above), 0) if min(above) < least else (least, failed + 1)
        if failed == _PATIENCE:
            return None
        beam = _best(found, above, start, budget, _BEAM)
    return None


def shorten(problem: Problem, solution: Solution, budget: int) -> Solution:
    """A schedule that takes no longer and fits, too, by evicting one value and keeping others in its place."""
    for _ in range(_MOST_EXCHANGES):
        cheapest = sorted(changes_of(problem, solution, budget), key=lambda one: one.extra_seconds)[:_SIMULATED]
        fitting = [one for one in (change.scheduled() for change in cheapest) if one.peak <= budget]
        best = min((fill(problem, one, budget) for one in fitting), key=time_first, default=solution)
        if best.extra_seconds >= solution.extra_seconds:
            break
        solution = best
    return solution


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """A value that may be evicted, with what is known of the schedule before it is simulated."""

    gaps: Gaps
    eviction: Eviction

    @property
    def extra_seconds(self) -> float:
        """Of all repeats."""
        return self.gaps.solution.extra_seconds + self.eviction.extra_seconds

    def scheduled(self) -> Solution:
        return self.gaps.scheduled(self.eviction.reader, self.eviction.recomputed)


def changes_of(problem: Problem, solution: Solution, budget: int) -> Iterator[Change]:
    """One value more evicted over the first moment that is above a budget, or at the peak.

    What it is made of is kept until then where that stays within the budget, and recomputed, too, where it does not;
    and, as another schedule, always recomputed.
    """
    gaps = Gaps(problem, solution)
    above = np.flatnonzero(solution.liveness.live > budget)
    moment = int(above[0]) if len(above) else solution.liveness.peak_position
    for gap in gaps.at(moment):
        for extend in (budget, -1):
            eviction = gaps.evict(gap, extend=extend, budget=budget)
            if eviction is None:
                break
            yield Change(gaps, eviction)
            if not eviction.extends:
                break  # without that it is the same


def _best(found: Sequence[Option], above: Sequence[float], start: Solution, budget: int, count: int) -> list[Option]:
    """Half for the fewest bytes above the budget, half for the least time for each byte that is lowered."""
    at_start = bytes_above(start.liveness.live, budget)

    def rate(index: int) -> float:
        lowered = at_start - above[index]
        return (found[index].extra_seconds - start.extra_seconds) / lowered if lowered > 0 else np.inf

    by_height = sorted(range(len(found)), key=lambda index: (above[index], found[index].extra_seconds))
    by_rate = sorted(range(len(found)), key=lambda index: (rate(index), above[index]))
    best = dict.fromkeys((*by_height[: count // 2], *by_rate[:count]))
    return [found[index] for index in itertools.islice(best, count)]


def _key(solution: Solution) -> tuple[int, ...]:
    return solution.schedule.order
