"""Segments that save all expensive results (of products, convolutions, reductions, opaque ops), and nothing else.

`jax.checkpoint_policies.dots_saveable` saves the same, but here the rest is recomputed segment by segment. Segments
with options (`segments.py`) come near, but they also save the values that cross their ends: in a residual network the
sum at the end of a block, which elementwise work alone can recompute. If that work is small compared to the products,
nothing is faster for a large budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Kind
from remat_opt.search.drop_recomputation import fill
from remat_opt.search.problem import Problem, Solution, memory_first, time_first

_STEP = 1.01  # from one budget to the next


def keep_expensive_results(problem: Problem, segmented: Iterable[Solution]) -> Iterator[Solution]:
    """Schedules that keep expensive results, from the least memory to the plain step, filled for one budget after
    another.

    Args:
        problem: the step.
        segmented: solutions whose segments are taken; those of least memory and of least time are followed.
    """
    choices = dict.fromkeys(_keep_expensive(problem, one.choice) for one in segmented if one.choice.boundaries)
    found = list(map(problem.solution, choices))
    for solution in dict.fromkeys(min(found, key=order) for order in (memory_first, time_first)) if found else ():
        budget = solution.peak
        while budget < problem.plain.peak:
            yield solution
            budget = math.ceil(budget * _STEP)
            solution = fill(problem, solution, budget)


def _keep_expensive(problem: Problem, choice: Choice) -> Choice:
    graph = problem.graph
    before = problem.order[: max(choice.boundaries)]
    expensive = (v for op in before if graph.ops[op].kind is not Kind.ELEMENTWISE for v in graph.ops[op].outputs)
    return Choice(frozenset(expensive), choice.boundaries, choice.cuts)
