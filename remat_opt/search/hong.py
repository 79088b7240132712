"""Optimal checkpoints of a chain: Hong, Tsai, Wang, Liu, Wu 2025, "GPU memory usage optimization for backward
propagation in deep network training" (arXiv:2502.12499, JPDC).

A chain of n values of d_k bytes; the checkpoints stay, and the values between two of them are recomputed when their
segment runs backward. The first and the last value are always checkpoints. When a segment runs backward, the
checkpoints behind it are free already. So the peak is a maximum over prefixes,

    M(n − 1) = d_{n−1},   M(i) = d_i + min over j > i of max(M(j), U(i, j)),

with U(i, j) the transient bytes while segment (i, j] runs backward (the paper's revised objective).

*On graphs* the values of the chain are the sets that cross cuts of the topological order, and U comes from the plain
step's live sets. What is new at a cut depends on the cut before, and the recurrence is

    M(i) = min over j of max(backward(i, j), forward(i, j), crossing(i, j) + M(j))   recomputed
                     or  max(backward(i, j), kept(i, j) + M(j))                      kept,

where a kept segment is one whose every value is a checkpoint. For a budget the same recurrence gives the least seconds
of recomputation for every size of memory, in slots; the answers are simulated.

Limitations: one level of recomputation, one forward/backward boundary; at most `MOST_STAGES` cuts; the paper's O(n)
version with a deque is not used, since crossing(i, j) depends on i.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from remat_opt.search.problem import Problem, Solution
from remat_opt.search.segments import Option, Plan, Table, choice_of, minimum_peak, minimum_seconds, table_of
from remat_opt.search.stages import Plans, Stages, solve_by_models

MOST_STAGES = 120


def solve(problem: Problem, budget: int | None) -> Solution:
    """See `Solver`."""
    return solve_by_models(problem, budget, MOST_STAGES, _tables, _Plans)


class _Plans(Plans):
    """Plans for every size of memory up to a capacity in bytes, and those of least memory by two recurrences."""

    def __init__(self, stages: Stages, table: Table, capacity: int):
        plans = minimum_seconds(table, capacity)
        super().__init__([needs for needs, _ in plans], lambda index: _solution(stages, plans[index][1]))
        self.stages, self.table = stages, table

    def near(self, budget: int | None) -> list[Solution]:
        return [*self.of_minimum_peak, *super().near(budget)]

    @functools.cached_property
    def of_minimum_peak(self) -> list[Solution]:
        """A plan that keeps nothing may do better where the plain step's live sets mislead."""
        return [_solution(self.stages, minimum_peak(one)) for one in (_without_keeping(self.table), self.table)]


def _solution(stages: Stages, plan: Plan) -> Solution:
    return stages.problem.solution(choice_of(stages.costs, stages.problem.order, plan))


def _tables(stages: Stages) -> tuple[Table, Table, Table]:
    """What segments take, and twice what they may take instead.

    The second counts later segments' residuals beside a segment. The third halves what a backward run needs beyond what
    is kept, because its most may come together with less of the rest than the plain step's order says.
    """
    options = (Option.KEEP, Option.RECOMPUTE)
    alone, with_later = (table_of(costs, stages.problem.order, options) for costs in (stages.costs, stages.with_later))
    count = len(stages)
    backward, kept = stages.costs.backward[:, :count], stages.costs.kept[:, :count]
    halved = (np.minimum(backward, kept) + backward) // 2
    needs = np.stack([halved, np.maximum(halved, stages.costs.forward[:, :count])])
    return alone, with_later, dataclasses.replace(alone, needs=needs)


def _without_keeping(table: Table) -> Table:
    return dataclasses.replace(
        table, options=table.options[1:], stays=table.stays[1:], needs=table.needs[1:], seconds=table.seconds[1:]
    )
