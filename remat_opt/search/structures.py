"""Structures: schedules of little memory that say where segments begin; `auto.py` searches from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from remat_opt.graph.derive import Choice
from remat_opt.search import chen, feng_huang, hong, lower_sets, rotor
from remat_opt.search.caching import cached_method
from remat_opt.search.candidate_generator import CandidateGenerator
from remat_opt.search.forward import forward_backward_boundary, peak_in_order
from remat_opt.search.problem import Problem, Solution, memory_first
from remat_opt.search.progress import report_progress

SHARE_OF_STRUCTURES = 0.4  # of the time of a whole frontier, about
SOME_OPS = 1200  # up to which `rotor` is asked for its least memory, and `lower_sets` for budgets
_VARIANTS = ((False, True), (False, False), (True, True), (True, False))  # of `CandidateGenerator.minimum_choice`
_MOST_PASSES = 12  # peaks that are lowered one after another
_VERY_FEW_OPS = 64  # up to which values are evicted one by one
_FEW_OPS = 400  # up to which every model is tried at every forward/backward boundary, and the other solvers are asked


class Structures:
    """The structures of one problem."""

    def __init__(self, problem: Problem):
        self.problem = problem

    @functools.cached_property
    def structures(self) -> list[Solution]:
        """Schedules of little memory: they say where segments begin, and budgets are filled from there."""
        problem, ends = self.problem, self.forward_ends if self.is_small else self.forward_ends[:1]
        found = [*self.one_level, lower_sets.solve(problem, None)]
        found += [solution for end in ends for solution in self.generator(end).minimum_nested()]
        if self.is_small:
            found += [solver.solve(problem, None) for solver in (hong, feng_huang, chen)]
        if len(problem.order) <= SOME_OPS:
            found.append(rotor.solve(problem, None))
        return found

    @functools.cached_property
    def one_level(self) -> list[Solution]:
        """One level of segments: at the plain step's peak, then at the peak that remains, and so on while it falls."""
        found = [self.problem.plain]
        # The op at the peak counts as backward; where that is cheap, it is tried as forward too.
        variants = [(shift, *which) for shift in ((0, 1) if self.is_small else (0,)) for which in _VARIANTS]
        for number, variant in enumerate(variants):
            report_progress(SHARE_OF_STRUCTURES * number / (len(variants) + 2))
            found += self.lower_peaks(*variant)
        if self.forward_ends[0] != peak_in_order(self.problem.plain):
            generator = self.generator(self.forward_ends[0])
            found += (self.problem.solution(generator.minimum_choice(*which)) for which in _VARIANTS)
        return found

    def lower_peaks(self, shift: int, with_later: bool, keep: bool) -> list[Solution]:
        found = [self.problem.plain]
        for candidate in self.lowered(lambda end: self.generator(end).minimum_choice(with_later, keep), shift):
            if candidate.peak > found[-1].peak or not candidate.schedule.recomputed:
                break
            found.append(candidate)  # where the peak stays, another one of the same height is next
        return found[1:]

    def lowered(self, choice_before: Callable[[int], Choice | None], shift: int = 0) -> Iterator[Solution]:
        """The plain step with what is chosen before its peak, then with what is chosen before the peak that remains,
        too, and so on, until a peak comes again or nothing is chosen."""
        best, tried = self.problem.plain, set[int]()
        while len(tried) < _MOST_PASSES:
            forward_end = min(peak_in_order(best) + shift, len(self.problem.order))
            choice = None if forward_end in tried else choice_before(forward_end)
            if choice is None:
                break
            tried.add(forward_end)
            best = self.problem.solution(_merge(best.choice, choice))
            yield best

    # Forward/backward boundaries

    @property
    def is_small(self) -> bool:
        """Whether everything can be tried."""
        return len(self.problem.order) <= _FEW_OPS

    @property
    def is_tiny(self) -> bool:
        """Whether values can be tried one by one."""
        return len(self.problem.order) <= _VERY_FEW_OPS

    @functools.cached_property
    def forward_ends(self) -> tuple[int, ...]:
        """Boundaries to try, the better first: at the plain step's peak, and where most bytes lie idle."""
        forward_ends = dict.fromkeys((peak_in_order(self.problem.plain), forward_backward_boundary(self.problem)))

        def least(forward_end: int) -> tuple[float, float]:
            choices = (self.generator(forward_end).minimum_choice(*which) for which in _VARIANTS)
            return min(memory_first(self.problem.solution(choice)) for choice in choices)

        forward_ends = sorted(forward_ends, key=least)
        return tuple(forward_ends if self.is_small else forward_ends[:1])

    @cached_method
    def generator(self, forward_end: int) -> CandidateGenerator:
        """The models before a forward/backward boundary."""
        return CandidateGenerator(self.problem, forward_end)


def _merge(first: Choice, second: Choice) -> Choice:
    return Choice(
        first.saved | second.saved,
        tuple(sorted({*first.boundaries, *second.boundaries})),
        tuple(sorted({*first.cuts, *second.cuts})),
    )
