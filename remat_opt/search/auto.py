"""The search that a user gets.

Least memory: segments over cuts at the plain step's peak (`segments.py`); where the peak that remains lies elsewhere (a
second forward and backward pass, as in a GAN step), segments there too, as long as the peak falls.

Under a budget: starting from the least memory, whole segments or only their dear results (products and convolutions)
are saved again, those first that give most time for each byte, as long as the simulated peak stays under the budget.

Gaps: one level of recomputation; the give-back is greedy.
"""

from __future__ import annotations

import dataclasses

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Kind
from remat_opt.search.problem import Problem, Solution
from remat_opt.search.segments import least_memory

_MOST_PASSES = 12


def solve(problem: Problem, budget: int | None) -> Solution:
    """See `Solver`."""
    if budget is not None and problem.plain.peak <= budget:
        return problem.plain
    least = _least_memory(problem)
    if budget is None or least.peak > budget:
        return least
    return _give_back(problem, least, budget)


def _least_memory(problem: Problem) -> Solution:
    candidates = [_lower_peaks(problem, keep) for keep in (True, False)]
    return min(candidates, key=lambda solution: (solution.peak, solution.extra_seconds))


def _lower_peaks(problem: Problem, keep: bool) -> Solution:
    """Segments at the plain step's peak, then at the peak that remains, and so on while it does not rise."""
    best = problem.plain
    tried: set[int] = set()
    for _ in range(_MOST_PASSES):
        turn = _peak_in_order(best)
        if turn in tried:
            break
        tried.add(turn)
        choice = least_memory(problem.graph, problem.order, problem.plain.liveness, turn, keep=keep)
        candidate = problem.solution(_merge(best.choice, choice))
        if candidate.peak > best.peak or not candidate.schedule.recomputed:
            break
        best = candidate  # where the peak stays, another one of the same height is next
    return best


def _peak_in_order(solution: Solution) -> int:
    """How many ops had run for the first time when the peak was reached."""
    position = passed = 0
    for run in solution.schedule.runs:
        length = len(run.ops) + run.recomputed
        if position + length > solution.liveness.peak_position:
            return passed + (0 if run.recomputed else solution.liveness.peak_position - position)
        position += length
        passed += 0 if run.recomputed else len(run.ops)
    return passed


def _merge(first: Choice, second: Choice) -> Choice:
    return Choice(
        first.saved | second.saved,
        tuple(sorted({*first.turning_points, *second.turning_points})),
        tuple(sorted({*first.cuts, *second.cuts})),
    )


def _give_back(problem: Problem, least: Solution, budget: int) -> Solution:
    best = least
    for values in _candidates(problem, least):
        choice = dataclasses.replace(best.choice, saved=best.choice.saved | values)
        candidate = problem.solution(choice)
        if candidate.peak <= budget and candidate.extra_seconds < best.extra_seconds:
            best = candidate
    return best


def _candidates(problem: Problem, least: Solution) -> list[frozenset[int]]:
    """Sets of values that can be saved again: of each recomputed run its dear results, or all that it stores."""
    graph = problem.graph
    stored = {b.value for b in problem.plain.liveness.buffers}
    rated: list[tuple[float, frozenset[int]]] = []
    for run in least.schedule.runs:
        if not run.recomputed:
            continue
        for only_dear in (True, False):
            ops = [op for op in run.ops if not only_dear or graph.ops[op].kind in (Kind.CONTRACTION, Kind.OPAQUE)]
            values = frozenset(v for op in ops for v in graph.ops[op].outputs if v in stored) - least.choice.saved
            size = sum(graph.sizes[value] for value in values)
            if size:
                rated.append((sum(graph.ops[op].seconds for op in ops) / size, values))
    return [values for _, values in sorted(rated, key=lambda pair: (-pair[0], sorted(pair[1])))]
