"""The default search: candidates from several models, then local search on the schedule, value by value.

1. *Structures* (`structures.py`) are schedules of little memory; they say where segments begin. They come from
   segments of least memory (with and without counting later residuals beside a segment), nested plans, and lower sets
   (`lower_sets.py`).
2. *Candidate generators* (`candidate_generator.py`). For a budget: segments with options, and nested plans on small
   steps or if no segments fit. Each model orders its plans from least memory to least time; those that just fit are
   found by simulation. On small steps the answers of the other solvers join the frontier, on larger ones those of lower
   sets.
3. *Expensive results* (`expensive.py`). Segments that save the results of products and the like, and nothing else.
4. *Several peaks.* If the remaining peak lies elsewhere (a second forward and backward pass, as in a GAN step),
   segments are added there, as long as the peak falls.
5. *Local search.* `drop_recomputation.fill` drops recomputation from each structure and candidate, value by value,
   while the budget allows it. From the structures of least memory `local_search.descend` lowers one peak after another,
   value by value. On very small steps `local_search.py` looks for arbitrary schedules for each budget.

One table has the costs of all pairs of cuts, so that identical blocks need no special treatment.

The result is a Pareto frontier in memory and time. It has schedules for `LEVELS` budgets between the least and the
plain peak; between two of them, what a descent from the larger finds; and in the remaining gaps, what can be saved from
the smaller one. A budget picks from it; of a large step, from what is made of it round the budget. Without a budget the
answer is what compilers allocate about the least memory for, with at most one extra forward pass of time. Gap: ops of
first runs keep their order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from remat_opt.search import chen, feng_huang, hong, lower_sets, rotor
from remat_opt.search.caching import cached_method
from remat_opt.search.drop_recomputation import fill
from remat_opt.search.expensive import keep_expensive_results
from remat_opt.search.forward import forward_backward_boundary
from remat_opt.search.local_search import descend, lower, shorten
from remat_opt.search.offload import OffloadSearch
from remat_opt.search.problem import Problem, Solution, memory_first, pareto_front, time_first
from remat_opt.search.progress import report_progress
from remat_opt.search.structures import SHARE_OF_STRUCTURES, SOME_OPS, Structures

LEVELS = 20
_MOST_ATTEMPTS = 4  # at meeting a budget by asking for less
_HALVINGS = 5  # of the budgets between what takes longer than one forward pass and what does not
_LOWERED = 0.9  # times the peak is asked for next where values are tried one by one
_NEXT = 0.99  # times the peak of one schedule is that of the next, in a descent
_NEAR = 1.25  # times the least peak, up to where a compiler may need less than for the least one
_ABOUT_A_THIRD = 0.325  # a count apart from ours says up to 2.4 % more on networks of small cells
_MOST_OF_THE_STEP = 0.35  # its FLOPs, that a forward pass is, about: a backward one takes twice as many
_ABOUT = 1.02  # times the least peak is no more memory, about
_AS_SMALL = 1.03  # times the least that is allocated, between which the peak decides
_ROUND_A_BUDGET = (0.9, 0.95, 1.0, 1.06, 1.25)  # times a budget
_FROM_BELOW = 2  # schedules below a gap of the frontier, from which it is filled
_MOST_PARTS = 3  # of a gap
_MOST_FILLED = 4  # schedules for one budget that are filled


def solve(problem: Problem, budget: int | None) -> Solution:
    """See `Solver`."""
    search = search_of(problem)
    return search.least_allocated if budget is None else search.within(budget)


def search_of(problem: Problem) -> Search | OffloadSearch:
    """The problem's search, made once."""

    def make() -> Search | OffloadSearch:
        search = Search(problem)
        return search if problem.host_bandwidth is None else OffloadSearch(problem, search)

    return problem.cached("auto", make)


def _different(solutions: Iterable[Solution]) -> list[Solution]:
    """The first of each peak and time."""
    return list({memory_first(solution): solution for solution in reversed(list(solutions))}.values())[::-1]


class Search(Structures):
    """The search for one problem. Results are cached and do not depend on the order of the calls."""

    # Least memory

    @functools.cached_property
    def minimum_memory(self) -> Solution:
        """The least peak with at most one extra forward pass, in time and in FLOPs."""
        return min(filter(self.is_one_pass, self.low_end), key=memory_first)

    @functools.cached_property
    def least_allocated(self) -> Solution:
        """Of the schedules with at most one extra forward pass, what compilers allocate about the least memory for.

        Above the least peak a schedule may leave fewer gaps between its buffers. Between those that leave about as few
        the peak decides: less time means fewer barriers, and compilers an order of their own.
        """
        best, low = self.minimum_memory, [self.minimum_memory]
        for one in sorted(filter(self.is_one_pass, self.low_end), key=memory_first):
            if one.peak > _AS_SMALL * best.allocated:
                break
            low.append(one)
            best = min(one, best, key=lambda one: one.allocated)
        return min((one for one in low if one.allocated <= _AS_SMALL * best.allocated), key=memory_first)

    @functools.cached_property
    def low_end(self) -> list[Solution]:
        """`low_levels`, and descents from those within one extra forward pass, value by value.

        A start with more FLOPs left to spend may end lower than the start that is lowest.
        """
        starts = [one for one in pareto_front(filter(self.is_one_pass, self.low_levels)) if self.is_near(one)]
        ends = dict.fromkeys((starts[0], starts[-1]))
        return [*self.low_levels, *(one for start in ends for one in self.descent(start, self.is_cheap_pass))]

    def is_near(self, solution: Solution) -> bool:
        """Whether its peak is not far above that of `minimum_of_levels`."""
        return solution.peak <= self.minimum_of_levels.peak * _NEAR

    @functools.cached_property
    def minimum_of_levels(self) -> Solution:
        """`minimum_memory` before values are evicted one by one: with fewer and longer runs, which a compiler may do
        better with."""
        return min(filter(self.is_one_pass, self.low_levels), key=memory_first)

    @functools.cached_property
    def low_levels(self) -> list[Solution]:
        """From the least peak of the structures to one with at most one extra forward pass: budgets halve what lies
        between what takes longer and what does not."""
        found = [self.problem.plain, *self.filled_structures]
        below = min(found, key=memory_first)
        for _ in range(_HALVINGS):
            low, high = below.peak, min(filter(self.is_one_pass, found), key=memory_first).peak
            if high - low <= (1 - _NEXT) * low:
                break
            found.append(self.at((low + high) // 2, below))
            if not self.is_one_pass(found[-1]):
                below = min(found[-1], below, key=time_first)
        return found

    @functools.cached_property
    def minimum_at_any_cost(self) -> Solution:
        """The least peak."""
        lowest = min(self.filled_structures, key=memory_first)
        return min((lowest, *self.descent(lowest, lambda _: True)), key=memory_first)

    def descent(self, start: Solution, is_allowed: Callable[[Solution], bool], until: int = 0) -> list[Solution]:
        """Schedules of less and less peak, some percent from one to the next."""
        found = [start]
        for solution in descend(self.problem, start, is_allowed):
            if solution.peak <= until:
                break
            if len(found) > 1 and found[-1].peak > found[-2].peak * _NEXT:
                found.pop()
            found.append(solution)
        return found[1:]

    @functools.cached_property
    def most_barriers(self) -> Solution:
        """The schedule of one level of segments that repeats most and needs about as much memory as `minimum_memory`.

        Each repeat waits at a barrier, and barriers hold the compiler to the order of the model. So repeats that do not
        help in the model may still help when the step is compiled.
        """
        low = [one for one in self.one_level if one.peak <= self.minimum_memory.peak * _ABOUT and self.is_one_pass(one)]
        return max(low, key=lambda one: one.extra_seconds, default=self.minimum_memory)

    def is_one_pass(self, solution: Solution) -> bool:
        """Whether all repeats take at most one forward pass, in time and in FLOPs."""
        seconds, flops = self.one_pass
        return solution.extra_seconds <= seconds and solution.schedule.extra_flops(self.problem.graph) <= flops

    def is_cheap_pass(self, solution: Solution) -> bool:
        """Whether they take less than a third of the step's FLOPs, too: a forward pass where the backward one takes
        twice as many."""
        flops = solution.schedule.extra_flops(self.problem.graph)
        return self.is_one_pass(solution) and flops <= _ABOUT_A_THIRD * self.problem.graph.flops

    @functools.cached_property
    def one_pass(self) -> tuple[float, float]:
        """Seconds and FLOPs of one forward pass: of all before the forward/backward boundary, and of what segments
        repeat.

        Before the forward/backward boundary there may be backward passes, too, as of micro-batches: what segments do
        not repeat counts up to a part of the step's FLOPs.
        """
        graph, forward_end = self.problem.graph, forward_backward_boundary(self.problem)
        repeated = {*min(self.one_level, key=memory_first).schedule.recomputed}
        ops = {*self.problem.order[:forward_end], *repeated}
        most = max(sum(graph.ops[op].flops for op in repeated), _MOST_OF_THE_STEP * graph.flops)
        return sum(graph.ops[op].seconds for op in ops), min(sum(graph.ops[op].flops for op in ops), most)

    @functools.cached_property
    def filled_structures(self) -> list[Solution]:
        """Schedules of little memory, with what of their repeats their own peaks leave room to save."""
        lowest = _different(sorted(self.structures, key=memory_first))[:_MOST_FILLED]
        if self.is_tiny:
            lowest += [self.evicted(solution) for solution in (lowest[0], self.problem.plain)]
        return [*self.one_level, *(fill(self.problem, solution, solution.peak) for solution in lowest)]

    def evicted(self, solution: Solution) -> Solution:
        """Evict values as long as that lowers the peak."""
        while (found := lower(self.problem, solution, int(solution.peak * _LOWERED))) is not None:
            solution = found
        return min((solution, *self.descent(solution, lambda _: True)), key=memory_first)

    # Budgets

    def within(self, budget: int) -> Solution:
        """The least extra time within a budget, or the least peak where nothing fits."""
        if self.problem.plain.peak <= budget:
            return self.problem.plain
        if self.minimum_memory.peak > budget and self.minimum_at_any_cost.peak > budget:
            return self.minimum_at_any_cost
        every = self.frontier if self.is_small else self.near(budget)
        return [solution for solution in every if solution.peak <= budget][-1]

    @cached_method
    def near(self, budget: int) -> tuple[Solution, ...]:
        """The part of the frontier round a budget that some schedule meets."""
        lowest = min(self.low_end, key=memory_first)
        found = [lowest if lowest.peak <= budget else self.minimum_at_any_cost]
        for factor in _ROUND_A_BUDGET:
            if found[-1].peak <= int(budget * factor):
                found.append(self.at(int(budget * factor), found[-1]))
        front = pareto_front([self.problem.plain, *found, *self.low_end, *self.other(budget), *self.expensive])
        best = [one for one in front if one.peak <= budget][-1]
        above = (one for one in found if one.peak > budget)
        front = pareto_front([*front, *(one for start in above for one in self.between(best, start))])
        low = [one for one in front if one.peak <= budget][-_MOST_FILLED:]
        return pareto_front([*front, *(fill(self.problem, one, budget) for one in low)])

    @functools.cached_property
    def expensive(self) -> tuple[Solution, ...]:
        """See `keep_expensive_results`."""
        return tuple(keep_expensive_results(self.problem, self.one_level))

    @functools.cached_property
    def frontier(self) -> tuple[Solution, ...]:
        """From the least memory to the plain step."""
        found = [self.problem.plain, *self.low_end, *map(self.at_level, range(LEVELS))]
        return self.with_descents([*found, *self.others])

    @functools.cached_property
    def short_frontier(self) -> tuple[Solution, ...]:
        """The same from its two ends, without the budgets between them: in a fraction of the time."""
        return self.with_descents([self.problem.plain, *self.low_end])

    def with_descents(self, solutions: Iterable[Solution]) -> tuple[Solution, ...]:
        """The best of some schedules and of what lies between them."""
        front = pareto_front(solutions)
        between = [solution for pair in itertools.pairwise(front) for solution in self.between(*pair)]
        front = pareto_front([*front, *between])
        return pareto_front([*front, *self.filled(front), *self.expensive])

    def filled(self, front: Sequence[Solution]) -> Iterator[Solution]:
        """What can be saved in the gaps of a frontier, from the schedules below each gap."""
        for index, (low, high) in enumerate(itertools.pairwise(front), 1):
            room = high.peak - 1 - low.peak
            parts = max(1, min(_MOST_PARTS, int(room / ((1 - _NEXT) * low.peak))))
            for start in front[max(index - _FROM_BELOW, 0) : index]:
                for part in range(1, parts + 1):
                    yield fill(self.problem, start, low.peak + room * part // parts)

    def between(self, low: Solution, high: Solution) -> list[Solution]:
        """From the second schedule towards the memory of the first, value by value, while that takes less time."""
        return self.descent(high, lambda one: one.extra_seconds < low.extra_seconds, until=low.peak)

    @property
    def others(self) -> Iterator[Solution]:
        """The best of the papers' algorithms for every second level."""
        for level in range(0, LEVELS, 2):
            yield from self.other(self.budget_of(level))

    def other(self, budget: int) -> Iterator[Solution]:
        """The best of the papers' algorithms for a budget, filled; none of a large step."""
        solvers = (rotor, hong, lower_sets, feng_huang, chen) if self.is_small else (lower_sets,)
        answers = [solver.solve(self.problem, budget) for solver in solvers if len(self.problem.order) <= SOME_OPS]
        fitting = sorted((answer for answer in answers if answer.peak <= budget), key=time_first)
        yield from (fill(self.problem, answer, budget) for answer in fitting[:1])

    def budget_of(self, level: int) -> int:
        """Bytes: `LEVELS` even steps from the least peak to the plain one."""
        least, plain = self.minimum_at_any_cost.peak, self.problem.plain.peak
        return least + (plain - least) * level // LEVELS

    @cached_method
    def at_level(self, level: int) -> Solution:
        """The best for a level's budget; it takes no longer than the level below."""
        below = self.at_level(level - 1) if level else self.minimum_at_any_cost
        report_progress(SHARE_OF_STRUCTURES + (1 - SHARE_OF_STRUCTURES) * level / LEVELS)
        same = level and self.budget_of(level) == self.budget_of(level - 1)
        return below if same else self.at(self.budget_of(level), below)

    def at(self, budget: int, below: Solution) -> Solution:
        """The best for one budget, given a schedule that fits."""
        problem = self.problem
        structures = sorted(self.structures, key=memory_first)
        starts = [below, *_different(structures)[:_MOST_FILLED]]
        planned = [
            solution
            for forward_end in self.forward_ends
            for solution in self.generator(forward_end).with_options(budget)
        ]
        if not planned:
            planned = self.several_peaks(budget)
        if self.is_small or not planned:
            planned += [
                solution for forward_end in self.forward_ends for solution in self.generator(forward_end).nested(budget)
            ]
        starts += _different(sorted((s for s in planned if s.peak <= budget), key=time_first))[:_MOST_FILLED]
        if self.is_tiny:
            found = lower(problem, problem.plain, budget)
            starts += [] if found is None else [found]
        filled = [fill(problem, solution, budget) for solution in starts if solution.peak <= budget]
        filled = _different(sorted(filled, key=time_first))
        if self.is_tiny:
            return min((shorten(problem, solution, budget) for solution in filled[:2]), key=time_first)
        return filled[0]

    def several_peaks(self, budget: int) -> list[Solution]:
        """Segments with options at one peak after another; with less memory where the schedule misses the budget."""
        limit = budget
        for _ in range(_MOST_ATTEMPTS):
            candidate = self.problem.plain
            for candidate in self.lowered(lambda end, limit=limit: self.generator(end).choice_within(limit)):
                if candidate.peak <= limit:
                    break
            if candidate.peak <= budget:
                return [candidate]
            limit = min(limit - 1, limit * budget // candidate.peak)
        return []
