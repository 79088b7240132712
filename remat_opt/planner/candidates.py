"""The forms that a step can have, and the search over all of them.

A step's loops can stay unchanged, or be rewritten for less memory and more time. The same holds for loop bodies that
have a turning point of their own. Each form is a program with its own graph, and every search works on any of them. A
question about a step is put to all its forms, and the best answer is taken. So loops and the rest of the step are
compared by one liveness model and one sum of time.

Gap: the forms are a sample. Pairs of loops are replaced by smaller ones one after another (`loops/choose.py`), and all
bodies get the same share of the range between their least and their plain peaks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from remat_opt.loops.choose import MOST_EXTRA, MOST_EXTRA_TWICE, WORTH_A_SECOND, LoopChoices, ways_to_write
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.processes import solve
from remat_opt.search import Problem, Solution, search_of
from remat_opt.search.problem import pareto_front
from remat_opt.search.remembering import remembered
from remat_opt.search.watching import part

LEVELS = 7  # of the memory of loops
LEVELS_OF_LARGE = 1
LARGE = 2000  # ops, above which few forms are searched
LEVELS_INSIDE = (0.75, 0.5, 0.25, 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A schedule of one form of a step; bytes, seconds and FLOPs are predictions.

    Attributes:
        prepared: the form.
        solution: the schedule of its graph.
    """

    prepared: Prepared
    solution: Solution

    @property
    def peak(self) -> int:
        """Peak of temporary memory in bytes."""
        return self.prepared.plain_peak if self.runs_as_given else self.prepared.in_memory(self.solution.peak)

    @property
    def extra_seconds(self) -> float:
        """Time minus that of the original step, in seconds; negative where loops that save less are faster."""
        return self.prepared.extra_seconds + self.solution.extra_seconds

    @property
    def extra_flops(self) -> float:
        """FLOPs minus those of the original step."""
        return self.prepared.extra_flops + self.solution.schedule.extra_flops(self.prepared.bridge.graph)

    @property
    def runs_as_given(self) -> bool:
        """Whether nothing is changed."""
        return not self.prepared.is_rewritten and not self.solution.schedule.recomputed

    def is_the_same_as(self, other: Found) -> bool:
        """Whether both candidates emit the same step."""
        return self.prepared is other.prepared and self.solution.schedule == other.solution.schedule


class Forms:
    """The forms of one step, made when they are first asked for.

    Args:
        given: the step as it was given.
        solver: name of the search.
        keep_checkpoints: do not look into the user's own `jax.checkpoint` regions.
    """

    def __init__(self, given: Prepared, solver: str, keep_checkpoints: bool = False):
        self.given = given
        self.solver = solver
        self.keep_checkpoints = keep_checkpoints
        self.loops: LoopChoices | None = None  # as they are, once they have been looked at
        self.answers: dict[tuple[Problem, int | None], Solution] = {}  # of the solver, which is asked once

    @functools.cached_property
    def ways(self) -> tuple[LoopChoices, ...]:
        """See `ways_to_write`."""
        program, aliases = self.given.captured.program, self.given.bridge.graph.aliases
        large = len(self.given.bridge.graph.ops) > LARGE
        levels, keep = LEVELS_OF_LARGE if large else LEVELS, self.keep_checkpoints
        steps = self.given.step_search()
        ways = ways_to_write(program, self.given.rates, aliases, levels=levels, keep_checkpoints=keep, steps=steps)
        self.loops = ways[0]
        return ways

    @functools.cached_property
    def all(self) -> tuple[Prepared, ...]:
        """All forms, sorted by the time of their loops. The original step is one of them."""
        inside = LEVELS_INSIDE[:-1] if self.has_gain_inside else ()
        forms = {*self.to_least, *self.of_ways(self.ways), *(self.written(self.ways[0], level) for level in inside)}
        return tuple(sorted(forms, key=lambda form: form.extra_seconds))

    @functools.cached_property
    def to_least(self) -> tuple[Prepared, ...]:
        """The part of `all` that can have the least memory. The others are for budgets."""
        ways = [way for way in self.ways if not way.for_budgets]
        return tuple(
            sorted({*self.of_ways(ways), self.written(self.ways[0], None)}, key=lambda form: form.extra_seconds)
        )

    def of_ways(self, ways: Iterable[LoopChoices]) -> Iterable[Prepared]:
        """Forms with these choices for their loops, and with bodies rewritten for the least memory where that gains."""
        return [self.written(way, 0.0 if self.has_gain_inside else None) for way in ways]

    @functools.cached_property
    def has_gain_inside(self) -> bool:
        """Whether rewriting loop bodies lowers the memory of some body."""
        return self.written(self.ways[0], 0.0).given is not None

    @remembered
    def written(self, loops: LoopChoices, inside: float | None) -> Prepared:
        """See `Prepared.written`."""
        return self.given.written(loops, inside, self.keep_checkpoints)

    @functools.cached_property
    def in_our_order(self) -> Found:
        """The original step in our order, with nothing recomputed; see `Prepared.ordered`."""
        ordered = self.given.unchanged.ordered
        return Found(ordered, ordered.problem.plain)

    def least(self) -> Found:
        """The least memory with at most one extra forward pass; with two where loops then need much less memory."""
        if len(self.to_least) == 1:
            return self.found(self.to_least[0], None)
        once, twice = (
            min(self.limited(most), key=lambda found: (found.peak, found.extra_flops))
            for most in (MOST_EXTRA, MOST_EXTRA_TWICE)
        )
        return twice if twice.peak <= (1 - WORTH_A_SECOND) * once.peak else once

    def limited(self, most: float) -> Iterable[Found]:
        """The least memory of each form whose extra FLOPs are at most a share `most` of the step's FLOPs."""
        for number, form in enumerate(self.to_least):
            bearable = form.loops.most_extra if form.loops is not None else MOST_EXTRA
            flops = min(most, bearable) * self.given.bridge.graph.flops
            with part(number, len(self.to_least)):
                found = self.found(form, None)
                if form.given is None or found.extra_flops <= flops:
                    yield found
                elif form.extra_flops <= flops:
                    every = (Found(form, solution) for solution in self.frontier_of(form, 0))
                    yield min((one for one in every if one.extra_flops <= flops), key=lambda one: one.peak)

    def within(self, limit: int) -> Found:
        """The least time with a peak of at most `limit` bytes, or the least peak at any cost where nothing fits."""
        smallest = best = None
        for number, form in enumerate(self.all):
            if best is not None and form.extra_seconds >= best.extra_seconds:
                break
            with part(number, len(self.all)):
                found = self.found(form, limit)
            if found.peak <= limit and (best is None or found.extra_seconds < best.extra_seconds):
                best = found
            if smallest is None or found.peak < smallest.peak:
                smallest = found
        assert smallest is not None
        return best or smallest

    def frontier(self, budgets: int) -> tuple[Found, ...]:
        """The Pareto front of all forms in memory and time, from the least memory to the least time.

        Args:
            budgets: for how many budgets between the least and the plain peak a solver other than "auto" is asked.
        """
        every: list[Found] = []
        for number, form in enumerate(self.all):
            with part(number, len(self.all)):
                every += (Found(form, solution) for solution in self.frontier_of(form, budgets))
        return pareto_front(every)

    def found(self, form: Prepared, limit: int | None) -> Found:
        """Search one form. If nothing is recomputed and only our order meets the limit, the result has our order."""
        found = self._searched(form, limit)
        ordered = Found(form.ordered, found.solution)
        is_ours = limit is not None and found.runs_as_given and ordered.peak <= limit < found.peak
        return ordered if is_ours else found

    def _searched(self, form: Prepared, limit: int | None) -> Found:
        problem = form.problem
        limit = None if limit is None else form.live_within(limit)
        if limit is not None and self.solver == "auto" and search_of(problem).least_at_any_cost.peak > limit:
            return Found(form, search_of(problem).least_at_any_cost)
        if (problem, limit) not in self.answers:
            self.answers[problem, limit] = solve(self.solver, problem, limit)
        return Found(form, self.answers[problem, limit])

    def frontier_of(self, form: Prepared, budgets: int) -> Sequence[Solution]:
        """The search's schedules for one form, for all budgets."""
        problem = form.problem
        if self.solver == "auto":
            return search_of(problem).frontier
        plain, least = problem.plain, self.found(form, None).solution
        steps = range(1, budgets + 1) if least.peak < plain.peak else ()
        between = (least.peak + (plain.peak - least.peak) * step // (budgets + 1) for step in steps)
        return pareto_front([least, plain, *(self.found(form, budget).solution for budget in between)])
