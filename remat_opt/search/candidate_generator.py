"""Candidate generators: the plans of one model of a step, from least memory to least time.

A model's peak and the simulated peak differ. So the plans whose peaks come near a budget are simulated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from remat_opt.graph.derive import Choice
from remat_opt.search.caching import cached_method
from remat_opt.search.cuts import Cuts, SegmentCosts
from remat_opt.search.problem import Problem, Solution
from remat_opt.search.rotor import NestedPlans, models_of_graph
from remat_opt.search.segments import Option, choice_of, minimum_peak, minimum_seconds_by_memory, table_of
from remat_opt.search.stages import stages_before, sweep

_MOST_CUTS = 160  # of segments with options
_MOST_STAGES = 48  # of nested plans
_MOST_NEAR_MINIMUM = 8


@dataclasses.dataclass(eq=False)
class ModelPlans:
    """Plans of one model for one size of memory.

    Attributes:
        needs: bytes that each plan needs by the model's word, rising.
        evaluate: the simulated schedule of a plan, by its index.
    """

    needs: np.ndarray
    evaluate: Callable[[int], Solution]
    _known: dict[int, Solution] = dataclasses.field(default_factory=dict)

    def solution(self, index: int) -> Solution:
        """A plan's schedule, simulated once."""
        if index not in self._known:
            self._known[index] = self.evaluate(index)
        return self._known[index]

    def near(self, budget: int) -> list[Solution]:
        """Plans that fit, the last of them with a peak just below the budget.

        From the plan that fits by the model's word in growing steps to where plans cease to fit, or begin to.
        """
        count = len(self.needs)
        low, high = -1, count  # fits, as far as is known; does not fit
        at, step = max(int(np.searchsorted(self.needs, budget, side="right")) - 1, 0), 1
        while high - low > 1:
            if self.solution(at).peak <= budget:
                low = at
            else:
                high = at
            if low < 0 or high == count:
                at = min(max(at + (step if high == count else -step), 0), count - 1)
                step *= 2
                if at in (low, high):
                    break
            else:
                at = (low + high) // 2
        return [solution for solution in self._known.values() if solution.peak <= budget]

    def near_minimum(self) -> list[Solution]:
        """Plans near the least peak."""
        return sweep(self.solution, min(len(self.needs), _MOST_NEAR_MINIMUM), None)


class CandidateGenerator:
    """The candidate generators before one forward/backward boundary. Nothing in them depends on what was asked before.

    Args:
        problem: the step.
        forward_end: the forward/backward boundary, a position in the order of first runs.
    """

    def __init__(self, problem: Problem, forward_end: int):
        self.problem = problem
        self.forward_end = forward_end

    def with_options(self, budget: int) -> list[Solution]:
        """Segments with options that fit a budget."""
        return self._with_options(self._capacity(budget)).near(budget)

    def nested(self, budget: int) -> list[Solution]:
        """Nested plans that fit a budget."""
        return [solution for family in self._nested(self._capacity(budget)) for solution in family.near(budget)]

    def minimum_nested(self) -> list[Solution]:
        """Nested plans near the least peak."""
        coarse = [s for family in self._nested(self._capacity(None)) for s in family.near_minimum()]
        least = min(solution.peak for solution in (*coarse, self.problem.plain))
        return [*coarse, *(s for family in self._nested(self._capacity(least)) for s in family.near_minimum())]

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
        return minimum_seconds_by_memory(table_of(self._costs, self.problem.order), capacity)

    @cached_method
    def _with_options(self, capacity: int) -> ModelPlans:
        plans = self._options(capacity)

        def solution(index: int) -> Solution:
            return self.problem.solution(choice_of(self._costs, self.problem.order, plans[index][1]))

        return ModelPlans(np.array([needs for needs, _ in plans]), solution)

    @cached_method
    def _nested(self, capacity: int) -> tuple[ModelPlans, ...]:
        stages = stages_before(self.problem, self.forward_end, _MOST_STAGES)
        plans = [NestedPlans(stages, model, capacity) for model in models_of_graph(stages)[:2]]
        return tuple(ModelPlans(one.needs, one.solution) for one in plans)
