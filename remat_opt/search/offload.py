"""Moves saved values to the host's memory: a third choice beside saving and recomputing them.

`move_out` takes a schedule to a budget as a cache would that knows the future: at the first op at which more is live
than the budget allows, the buffer goes that is read last (Belády 1966), and so on to the end of the step. Copies out
begin as soon as a value is made. Copies back begin as late as they can and still hide, and where there is room.

`OffloadSearch` asks for that from all schedules of the frontier. Those that recompute little have more to move, those
that recompute much have less; the least time wins, stalls and recomputation counted alike (`Solution.extra_seconds`).

Gaps: a value goes to the host once, in the longest time in which it is not read; values that are recomputed do not go.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from remat_opt.graph.schedule import Schedule, Transfer
from remat_opt.graph.transfers import places
from remat_opt.search.caching import cached_method
from remat_opt.search.problem import Problem, Solution, memory_first, pareto_front, time_first

SMALLEST = 1 << 20  # bytes: a smaller copy takes about as long as it takes to start one
_LEVELS = (0.25, 0.5, 0.75, 1.0, 1.5)  # times what hides in the step, above a budget: where moving out starts
_HALVINGS = 6  # of the budgets between what takes longer than one forward pass and what does not
_LEVELS_OF_FRONTIER = 12


@dataclasses.dataclass(frozen=True, slots=True)
class _Gap:
    """The longest time in which nothing reads a buffer.

    Attributes:
        value: the buffer's value.
        size: in bytes.
        made: the place of the op that makes it.
        start: of the first op after the last one that makes or reads it.
        stop: where it has to be back: before the next op that reads it.
    """

    value: int
    size: int
    made: int
    start: int
    stop: int


class _Moves:
    """The places of one schedule, its gaps, and what is live at each place."""

    def __init__(self, problem: Problem, solution: Solution):
        graph, schedule, lives = problem.graph, solution.schedule, solution.liveness.lives
        occurrences = solution.occurrences
        self.bandwidth = problem.host_bandwidth or 0.0
        self.position = occurrences.position
        self.seconds = np.concatenate([[0.0], np.cumsum(graph.op_seconds[occurrences.op])])
        before = np.concatenate([[-1], self.position[:-1]]) + 1  # the barrier of a recomputed run stands before its op
        live = solution.liveness.live
        self.live = np.maximum(live[self.position], live[before])
        self.allowed = np.fromiter(places(schedule), dtype=np.int64)
        self.gaps = self._gaps(graph, lives, occurrences)

    def _gaps(self, graph, lives, occurrences) -> list[_Gap]:
        place_of = np.full(int(self.position[-1]) + 2, len(self.position))
        place_of[self.position] = np.arange(len(self.position))
        fits = (lives.size >= SMALLEST) & (lives.read_counts > 0)
        fits[: len(graph.inputs)] = False
        outputs, found = {*graph.outputs}, []
        for index in np.flatnonzero(fits).tolist():
            value, made = int(lives.value[index]), int(place_of[lives.birth[index]])
            if value in outputs or occurrences.recomputed[made]:
                continue
            reads = lives.reads[lives.reads_start[index] : lives.reads_start[index + 1]]
            events = np.concatenate([[made], place_of[reads]])
            longest = int(np.argmax(self.seconds[events[1:]] - self.seconds[events[:-1] + 1]))
            start, stop = int(events[longest]) + 1, self.allowed_before(int(events[longest + 1]))
            if self.allowed_after(start) < stop:
                found.append(_Gap(value, int(lives.size[index]), made, self.allowed_after(start), stop))
        return found

    def allowed_before(self, place: int) -> int:
        """The last place up to this one at which a copy may begin or end."""
        return int(self.allowed[np.searchsorted(self.allowed, place, side="right") - 1])

    def allowed_after(self, place: int) -> int:
        """The first such place from this one on."""
        at = np.searchsorted(self.allowed, place)
        return int(self.allowed[at]) if at < len(self.allowed) else len(self.position)

    def choose(self, budget: int) -> dict[_Gap, int] | None:
        """Gaps that are to be used, each with the place before which its copy out has to be done."""
        live, waiting, chosen = self.live.copy(), sorted(self.gaps, key=lambda gap: gap.start), {}
        there: list[_Gap] = []
        over = np.flatnonzero(live > budget)
        while len(over):
            place = int(over[0])
            while waiting and waiting[0].start <= place:
                there.append(waiting.pop(0))
            there = [gap for gap in there if gap.stop > place]
            if not there:
                return None
            gap = max(there, key=lambda gap: (gap.stop, gap.size, gap.value))
            there.remove(gap)
            chosen[gap] = self.allowed_before(place)
            live[max(chosen[gap], gap.start) : gap.stop] -= gap.size
            over = np.flatnonzero(live > budget)
        return chosen

    def transfers(self, chosen: dict[_Gap, int], budget: int) -> tuple[Transfer, ...]:
        """Copies out as early as they are done, but in time; copies back as late as they hide, but where there is
        room."""
        gone, free = {}, 0.0
        for gap in sorted(chosen, key=lambda gap: gap.made):
            free = max(free, float(self.seconds[gap.made + 1])) + gap.size / self.bandwidth
            done = int(np.searchsorted(self.seconds, free))
            gone[gap] = max(gap.start, min(self.allowed_after(done), chosen[gap]))
        live = self.live.copy()
        for gap in chosen:
            live[gone[gap] : gap.stop] -= gap.size
        found, free = [], np.inf
        for gap in sorted(chosen, key=lambda gap: -gap.stop):
            free = min(free, float(self.seconds[gap.stop])) - gap.size / self.bandwidth
            begin = self.allowed_before(max(int(np.searchsorted(self.seconds, free, side="right")) - 1, 0))
            full = np.flatnonzero(live[gone[gap] : gap.stop] + gap.size > budget)
            first = gone[gap] + int(full[-1]) + 1 if len(full) else gone[gap] + 1
            back = max(begin, self.allowed_after(first))
            if back < gap.stop:
                live[back : gap.stop] += gap.size
            found.append(Transfer(gone[gap], min(back, gap.stop), gap.value))
        return tuple(sorted(found))


def move_out(problem: Problem, solution: Solution, budget: int) -> Solution | None:
    """A schedule with values moved to the host until it fits a budget; None where too few can be moved.

    Args:
        problem: with the bandwidth of the host's memory.
        solution: a schedule without transfers.
        budget: of live bytes.
    """
    if not solution.schedule.runs:
        return None
    moves = problem.cached(f"moves {id(solution)}", lambda: (solution, _Moves(problem, solution)))[1]
    chosen = moves.choose(budget)
    if chosen is None:
        return None
    schedule = Schedule(solution.schedule.runs, moves.transfers(chosen, budget))
    return problem.scheduled(schedule, solution.choice)


class RecomputeSearch(Protocol):
    """What is asked of `auto.Search`."""

    def within(self, budget: int) -> Solution: ...
    def at(self, budget: int, below: Solution) -> Solution: ...
    def is_one_pass(self, solution: Solution) -> bool: ...
    @property
    def is_small(self) -> bool: ...
    @property
    def low_end(self) -> list[Solution]: ...
    @property
    def minimum_memory(self) -> Solution: ...
    @property
    def minimum_at_any_cost(self) -> Solution: ...
    @property
    def most_barriers(self) -> Solution: ...
    @property
    def frontier(self) -> tuple[Solution, ...]: ...
    @property
    def short_frontier(self) -> tuple[Solution, ...]: ...


class OffloadSearch:
    """The search of one problem whose values may go to the host; asked as `auto.Search`.

    Args:
        problem: with the bandwidth of the host's memory.
        recomputing: the search for schedules that only recompute.
    """

    def __init__(self, problem: Problem, recomputing: RecomputeSearch):
        self.problem = problem
        self.recomputing = recomputing

    @property
    def most_barriers(self) -> Solution:
        """See `auto.Search.most_barriers`."""
        return self.recomputing.most_barriers

    def is_one_pass(self, solution: Solution) -> bool:
        """See `auto.Search.is_one_pass`; stalls count, too."""
        return self.recomputing.is_one_pass(solution)

    def within(self, budget: int) -> Solution:
        """The least extra time within a budget, or the least peak where nothing fits."""
        fitting = [one for one in self.near(budget) if one.peak <= budget]
        return min(fitting, key=time_first) if fitting else self.minimum_at_any_cost

    @cached_method
    def near(self, budget: int) -> tuple[Solution, ...]:
        """Schedules that meet a budget with and without transfers, and the least memory."""
        alone = self.recomputing.within(budget)
        if alone is self.problem.plain:
            return (alone,)
        return (alone, *self._moved(self._starts(budget, alone), budget))

    def _moved(self, starts: Sequence[Solution], budget: int) -> list[Solution]:
        moved = (move_out(self.problem, start, budget) for start in starts if start.peak > budget)
        return [solution for solution in moved if solution is not None]

    def _starts(self, budget: int, alone: Solution) -> Sequence[Solution]:
        """Schedules of more memory than a budget, by about what hides."""
        search, found = self.recomputing, [alone]
        if search.is_small:
            return search.frontier
        for factor in _LEVELS:
            limit = budget + int(factor * self.bytes_that_hide)
            if found[-1].peak <= limit < self.problem.plain.peak:
                found.append(search.at(limit, found[-1]))
        return [*found, self.problem.plain, *search.low_end]

    @property
    def bytes_that_hide(self) -> float:
        """What can go to the host in half of the step's time, and come back in the other half."""
        return 0.5 * self.problem.graph.seconds * (self.problem.host_bandwidth or 0.0)

    @functools.cached_property
    def minimum_memory(self) -> Solution:
        """The least peak with at most the time and the FLOPs of one extra forward pass."""
        return self._minimum(self.recomputing.minimum_memory, self.is_one_pass)

    @functools.cached_property
    def minimum_at_any_cost(self) -> Solution:
        """The least peak."""
        return self._minimum(self.recomputing.minimum_at_any_cost, lambda _: True)

    def _minimum(self, best: Solution, is_allowed: Callable[[Solution], bool]) -> Solution:
        """The least peak that is allowed: values move out from schedules that have little of it already."""
        starts, low = [best, *self.recomputing.low_end], 0
        for _ in range(_HALVINGS):
            budget = (low + best.peak) // 2
            found = [one for one in self._moved(starts, budget) if one.peak < best.peak and is_allowed(one)]
            low, best = (low, min(found, key=memory_first)) if found else (budget, best)
        return best

    @functools.cached_property
    def frontier(self) -> tuple[Solution, ...]:
        """From the least memory to the plain step."""
        return self._with_transfers(self.recomputing.frontier)

    @functools.cached_property
    def short_frontier(self) -> tuple[Solution, ...]:
        """The same from its two ends."""
        return self._with_transfers(self.recomputing.short_frontier)

    def _with_transfers(self, front: Sequence[Solution]) -> tuple[Solution, ...]:
        least, plain = self.minimum_memory.peak, self.problem.plain.peak
        budgets = [least + (plain - least) * level // _LEVELS_OF_FRONTIER for level in range(_LEVELS_OF_FRONTIER)]
        moved = (one for budget in budgets for one in self._moved(front, budget))
        return pareto_front([*front, self.minimum_memory, *moved])

