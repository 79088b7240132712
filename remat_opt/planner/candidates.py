"""The variants that a step can have, and the search over all of them.

A step's loops can stay unchanged, or be rewritten for less memory and more time. The same holds for loop bodies that
have a forward/backward boundary of their own. Each variant is a program with its own graph, and every search works on
any of them. A question about a step is put to all its variants, and the best answer is taken. So loops and the rest of
the step are compared by one liveness model and one sum of time.

Gap: the variants are a sample. Pairs of loops are replaced by smaller ones one after another (`loops/choose.py`), and
all bodies get the same share of the range between their least and their plain peaks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from remat_opt.loops.choose import MOST_EXTRA, MOST_EXTRA_TWICE, SECOND_PASS_THRESHOLD, LoopChoices, Ways, ways_to_write
from remat_opt.planner.prepared import Prepared
from remat_opt.search import SOLVERS, Problem, Solution, search_of
from remat_opt.search.caching import cached_method
from remat_opt.search.problem import pareto_front
from remat_opt.search.progress import part

LEVELS = 7  # of the memory of loops
LEVELS_OF_LARGE = 1
LARGE = 2000  # ops, above which few variants are searched
LEVELS_INSIDE = (0.75, 0.5, 0.25)
HALVINGS = 3  # of the range between two levels of loops, for a budget
HALVINGS_INSIDE = 4  # of the whole range of bodies, in chunks of the batch


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule of one variant of a step; bytes, seconds and FLOPs are predictions.

    Attributes:
        prepared: the variant.
        solution: the schedule of its graph.
    """

    prepared: Prepared
    solution: Solution

    @property
    def peak(self) -> int:
        """Peak of temporary memory in bytes."""
        return self.prepared.plain_peak if self.is_unchanged else self.prepared.in_memory(self.solution.peak)

    @property
    def extra_seconds(self) -> float:
        """Time minus that of the original step, in seconds; negative where loops that save less are faster."""
        return self.prepared.extra_seconds + self.solution.extra_seconds

    @property
    def extra_flops(self) -> float:
        """FLOPs minus those of the original step."""
        return self.prepared.extra_flops + self.solution.schedule.extra_flops(self.prepared.bridge.graph)

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing is changed."""
        return not self.prepared.is_rewritten and self.solution.schedule.is_plain

    def is_the_same_as(self, other: Candidate) -> bool:
        """Whether both candidates emit the same step."""
        ours, theirs = self.prepared, other.prepared
        is_same_program = ours.bridge is theirs.bridge and ours.is_rewritten == theirs.is_rewritten
        return is_same_program and self.solution.schedule == other.solution.schedule


class Variants:
    """The variants of one step, made when they are first asked for.

    Args:
        original: the original step.
        solver: name of the search.
        keep_checkpoints: do not look into the user's own `jax.checkpoint` regions.
    """

    def __init__(self, original: Prepared, solver: str, keep_checkpoints: bool = False):
        self.original = original
        self.solver = solver
        self.keep_checkpoints = keep_checkpoints
        self.loops: LoopChoices | None = None  # as they are, once they have been looked at
        self.answers: dict[tuple[Problem, int | None], Solution] = {}  # of the solver, which is asked once

    @functools.cached_property
    def ways(self) -> Ways:
        """See `ways_to_write`."""
        program, aliases = self.original.captured.program, self.original.bridge.graph.aliases
        steps, keep = self.original.step_search(), self.keep_checkpoints
        ways = ways_to_write(program, self.original.rates, aliases, keep_checkpoints=keep, steps=steps)
        self.loops = ways.given
        return ways

    @functools.cached_property
    def all(self) -> tuple[Prepared, ...]:
        """Variants for all budgets, sorted by the time of their loops. The original step is one of them."""
        levels = [self.at_level(share) for share in self.levels]
        return _fastest_first([*self.for_minimum_memory, *levels, *self.with_bodies_between])

    @property
    def levels(self) -> list[float]:
        """Shares of the memory of loops, from the least to the original one."""
        levels = LEVELS_OF_LARGE if len(self.original.bridge.graph.ops) > LARGE else LEVELS
        return [level / levels for level in range(levels)]

    def at_level(self, share: float) -> Prepared:
        """A variant with a share of the memory of loops."""
        return self.of_ways([self.ways.between(share)])[0]

    @functools.cached_property
    def for_minimum_memory(self) -> tuple[Prepared, ...]:
        """Variants that can have the least memory, and the original step."""
        inside = (None, 1.0) if self.original.chunks else (None,)  # in chunks our order alone may be all that is needed
        as_given = [self.written(self.ways.given, level) for level in inside]
        return _fastest_first([*self.of_ways(self.ways.least), *as_given])

    @functools.cached_property
    def with_bodies_between(self) -> list[Prepared]:
        """Variants with bodies rewritten for more than the least memory."""
        return [self.written(self.ways.given, level) for level in LEVELS_INSIDE] if self.has_gain_inside else []

    def of_ways(self, ways: Iterable[LoopChoices]) -> list[Prepared]:
        """Variants with these choices for their loops, and with bodies rewritten for the least memory where that
        gains."""
        return [self.written(way, 0.0 if self.has_gain_inside else None) for way in ways]

    @functools.cached_property
    def has_gain_inside(self) -> bool:
        """Whether rewriting loop bodies lowers the memory of some body."""
        return self.written(self.ways.given, 0.0).original is not None

    @cached_method
    def written(self, loops: LoopChoices, inside: float | None) -> Prepared:
        """See `Prepared.written`."""
        return self.original.written(loops, inside, self.keep_checkpoints)

    @functools.cached_property
    def reordered(self) -> Candidate:
        """The step in our order, with nothing recomputed; see `Prepared.ordered`."""
        is_split = self.original.chunks > 0
        ordered = self.written(self.ways.given, 1.0) if is_split else self.original.unchanged.ordered
        return Candidate(ordered, ordered.problem.plain)

    def minimum_memory(self) -> Candidate:
        """The least memory with at most one extra forward pass; with two where loops then need much less memory."""
        if len(self.for_minimum_memory) == 1:
            return self.candidate(self.for_minimum_memory[0], None)
        once, twice = (
            min(
                self.limited(most), default=self.cheapest, key=lambda candidate: (candidate.peak, candidate.extra_flops)
            )
            for most in (MOST_EXTRA, MOST_EXTRA_TWICE)
        )
        return twice if twice.peak <= (1 - SECOND_PASS_THRESHOLD) * once.peak else once

    @property
    def cheapest(self) -> Candidate:
        """The least FLOPs: chunks of a small batch may take more than is allowed, whatever is recomputed."""
        every = (Candidate(variant, variant.problem.plain) for variant in self.for_minimum_memory)
        return min(every, key=lambda candidate: candidate.extra_flops)

    def limited(self, most: float) -> Iterable[Candidate]:
        """The least memory of each variant whose extra FLOPs are at most a share `most` of the step's FLOPs."""
        for number, variant in enumerate(self.for_minimum_memory):
            allowed_extra = variant.loops.most_extra if variant.loops is not None else MOST_EXTRA
            flops = min(most, allowed_extra) * self.original.bridge.graph.flops
            with part(number, len(self.for_minimum_memory)):
                candidate = self.candidate(variant, None)
                if variant.original is None or candidate.extra_flops <= flops:
                    yield candidate
                elif variant.extra_flops <= flops:
                    every = (Candidate(variant, solution) for solution in self.frontier_of(variant, 0))
                    yield min((one for one in every if one.extra_flops <= flops), key=lambda one: one.peak)

    def within(self, limit: int) -> Candidate:
        """The least time with a peak of at most `limit` bytes, or the least peak at any cost where nothing fits."""
        smallest = best = None
        every = self.near(limit)
        for number, variant in enumerate(every):
            if best is not None and variant.extra_seconds >= best.extra_seconds:
                break
            with part(number, len(every)):
                candidate = self.candidate(variant, limit)
            if candidate.peak <= limit and (best is None or candidate.extra_seconds < best.extra_seconds):
                best = candidate
            if smallest is None or candidate.peak < smallest.peak:
                smallest = candidate
        assert smallest is not None
        return best or smallest

    def near(self, limit: int) -> Sequence[Prepared]:
        """Variants for a budget of `limit` bytes, sorted by time. Between the two levels of loops round it, and in
        chunks of the batch in all the range of bodies, halving finds them."""
        if self.original.chunks:
            inside = self.halving(lambda share: self.written(self.ways.given, share), 0.0, 1.0, HALVINGS_INSIDE, limit)
            return _fastest_first([*self.for_minimum_memory, *inside])
        levels = [*self.levels, 1.0] if self.ways.options else []
        for fits, misses in reversed([*itertools.pairwise(levels)]):
            if self.candidate(self.at_level(fits), limit).peak <= limit:
                between = self.halving(self.at_level, fits, misses, HALVINGS, limit)
                return _fastest_first([*self.all, *between])
        return self.all

    def halving(
        self, variant_of: Callable[[float], Prepared], fits: float, misses: float, steps: int, limit: int
    ) -> Iterable[Prepared]:
        """Variants on the way from a share that fits in `limit` bytes to the largest that does."""
        for _ in range(steps):
            share = (fits + misses) / 2
            variant = variant_of(share)
            yield variant
            fits, misses = (share, misses) if self.candidate(variant, limit).peak <= limit else (fits, share)

    def frontier(self, budgets: int) -> tuple[Candidate, ...]:
        """The Pareto front of all variants in memory and time, from the least memory to the least time.

        Args:
            budgets: for how many budgets between the least and the plain peak a solver other than "auto" is asked.
        """
        every: list[Candidate] = []
        for number, variant in enumerate(self.all):
            with part(number, len(self.all)):
                every += (Candidate(variant, solution) for solution in self.frontier_of(variant, budgets))
        return pareto_front(every)

    def candidate(self, variant: Prepared, limit: int | None) -> Candidate:
        """Search one variant. If nothing is recomputed and only our order meets the limit, the result has our order."""
        candidate = self._searched(variant, limit)
        ordered = Candidate(variant.ordered, candidate.solution)
        is_ours = limit is not None and candidate.is_unchanged and ordered.peak <= limit < candidate.peak
        return ordered if is_ours else candidate

    def _searched(self, variant: Prepared, limit: int | None) -> Candidate:
        problem = variant.problem
        limit = None if limit is None else variant.live_within(limit)
        if (problem, limit) not in self.answers:
            self.answers[problem, limit] = SOLVERS[self.solver](problem, limit)
        return Candidate(variant, self.answers[problem, limit])

    def frontier_of(self, variant: Prepared, budgets: int) -> Sequence[Solution]:
        """The search's schedules for one variant, for all budgets."""
        problem = variant.problem
        if self.solver == "auto":
            return search_of(problem).frontier
        plain, least = problem.plain, self.candidate(variant, None).solution
        steps = range(1, budgets + 1) if least.peak < plain.peak else ()
        between = (least.peak + (plain.peak - least.peak) * step // (budgets + 1) for step in steps)
        return pareto_front([least, plain, *(self.candidate(variant, budget).solution for budget in between)])


def _fastest_first(variants: Iterable[Prepared]) -> tuple[Prepared, ...]:
    """Each variant once, sorted by the time of its loops; equal ones as they come, as every process has to."""
    return tuple(sorted(dict.fromkeys(variants), key=lambda variant: variant.extra_seconds))
