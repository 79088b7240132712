"""Candidate generators: the plans that several models of a step offer for a budget, simulated."""

from __future__ import annotations

import functools
from typing import Any

from remat_opt.graph.derive import Choice
from remat_opt.search.caching import cached_method
from remat_opt.search.cuts import Cuts, SegmentCosts
from remat_opt.search.problem import Problem, Solution
from remat_opt.search.rotor import models_of_graph, nested_plans
from remat_opt.search.segments import Option, choice_of, minimum_peak, minimum_seconds, table_of
from remat_opt.search.stages import Plans, stages_before

_MOST_CUTS = 160  # of segments with options
_MOST_STAGES = 48  # of nested plans
_MOST_NEAR_MINIMUM = 8


class CandidateGenerator:
    """The candidate generators before one forward/backward boundary, which also offer what fits of earlier plans.

    Args:
        problem: the step.
        forward_end: the forward/backward boundary, a position in the order of first runs.
    """

    def __init__(self, problem: Problem, forward_end: int):
        self.problem = problem
        self.forward_end = forward_end

    def with_options(self, budget: int) -> list[Solution]:
        """Segments with options that fit a budget."""
        return self._with_options(self._capacity(budget)).all_within(budget)

    def nested(self, budget: int) -> list[Solution]:
        """Nested plans that fit a budget."""
        return [solution for family in self._nested(self._capacity(budget)) for solution in family.all_within(budget)]

    def minimum_nested(self) -> list[Solution]:
        """Nested plans near the least peak."""
        coarse = [s for family in self._nested(self._capacity(None)) for s in family.near_minimum(_MOST_NEAR_MINIMUM)]
        least = min(solution.peak for solution in (*coarse, self.problem.plain))
        return [
            *coarse,
            *(s for family in self._nested(self._capacity(least)) for s in family.near_minimum(_MOST_NEAR_MINIMUM)),
        ]

    @cached_method
    def minimum_choice(self, with_later: bool, keep: bool) -> Choice:
        """The choice of least memory by the recurrence of `segments.minimum_peak`.

        Args:
            with_later: whether later residuals count beside a segment.
            keep: whether segments may be kept.
        """
        costs, order = self._all_cuts(with_later), self.problem.order
        options = (Option.KEEP, Option.RECOMPUTE) if keep else (Option.RECOMPUTE,)
        return choice_of(costs, order, minimum_peak(table_of(costs, order, options)))

    @cached_method
    def _all_cuts(self, with_later: bool) -> SegmentCosts:
        cuts = Cuts(self.problem.graph, self.problem.order, self.forward_end)
        return SegmentCosts(cuts, self.problem.plain.liveness, with_later=with_later)

    def choice_within(self, budget: int) -> Choice | None:
        """The choice of least time that segments with options take for a budget, by their own figures."""
        fitting = [plan for needs, plan in self._options(self._capacity(budget)) if needs <= budget]
        return choice_of(self._costs, self.problem.order, fitting[-1]) if fitting else None

    def _capacity(self, budget: int | None) -> int:
        """A size of memory above a budget, of few: programmes are solved for sizes, plans picked for budgets."""
        capacity = max(self.problem.plain.peak, 1)
        while budget is not None and capacity // 2 >= budget * 5 // 4 and capacity > 1:
            capacity //= 2
        return capacity

    @functools.cached_property
    def _costs(self) -> SegmentCosts:
        cuts = Cuts(self.problem.graph, self.problem.order, self.forward_end, _MOST_CUTS)
        return SegmentCosts(cuts, self.problem.plain.liveness)

    @cached_method
    def _options(self, capacity: int) -> list[tuple[int, Any]]:
        return minimum_seconds(table_of(self._costs, self.problem.order), capacity)

    @cached_method
    def _with_options(self, capacity: int) -> Plans:
        plans = self._options(capacity)

        def solution(index: int) -> Solution:
            return self.problem.solution(choice_of(self._costs, self.problem.order, plans[index][1]))

        return Plans([needs for needs, _ in plans], solution)

    @cached_method
    def _nested(self, capacity: int) -> tuple[Plans, ...]:
        stages = stages_before(self.problem, self.forward_end, _MOST_STAGES)
        return tuple(nested_plans(stages, model, capacity) for model in models_of_graph(stages)[:2])
