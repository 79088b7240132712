"""The search that a user gets.

Least memory: segments over cuts at the plain step's peak (`segments.py`); where the peak that remains lies elsewhere (a
second forward and backward pass, as in a GAN step), segments there too, as long as the peak falls.

Under a budget: segments with options (`options.py`), likewise peak by peak. Their figures are estimates: where the
simulated peak misses the budget the programme is asked for less, where it leaves room, whole segments or their dear
results are saved again. Where options find nothing, the same is done from the least memory.

Gaps: one level of recomputation.
"""

from __future__ import annotations

import dataclasses

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Kind
from remat_opt.search.cuts import Cuts, SegmentCosts
from remat_opt.search.problem import Problem, Solution
from remat_opt.search.segments import Option, choice_of, least_peak, least_seconds, table_of

_MOST_PASSES = 12  # peaks that are lowered one after another
_MOST_ATTEMPTS = 4  # at meeting a budget by asking for less
_FEW_OPS = 300
_MOST_SAVED_AGAIN = 24  # schedules simulated to use what a budget leaves


def solve(problem: Problem, budget: int | None) -> Solution:
    """See `Solver`."""
    if budget is None:
        least = _least_memory(problem)
        return least if least.peak < problem.plain.peak else problem.plain
    if problem.plain.peak <= budget:
        return problem.plain
    found = _with_options(problem, budget)
    if found is None:
        found = _least_memory(problem)
    return found if found.peak > budget else _save_again(problem, found, budget)


def _with_options(problem: Problem, budget: int) -> Solution | None:
    """The least extra time within the budget that segments with options reach; None where they do not reach it."""
    limit = budget
    for _ in range(_MOST_ATTEMPTS):
        candidate = _lower_peaks_to(problem, limit)
        if candidate.peak <= budget:
            return candidate
        limit = min(limit - 1, limit * budget // candidate.peak)
    return None


def _lower_peaks_to(problem: Problem, limit: int) -> Solution:
    best = problem.plain
    tried: set[int] = set()
    while best.peak > limit and len(tried) < _MOST_PASSES:
        turn = _peak_in_order(best)
        choice = None
        if choice is None:
            break
        tried.add(turn)
        best = problem.solution(_merge(best.choice, choice))
    return best


def _least_memory(problem: Problem) -> Solution:
    # The op at the peak counts as backward; where that is cheap, it is tried as forward too.
    shifts = (0, 1) if len(problem.order) <= _FEW_OPS else (0,)
    candidates = [_lower_peaks(problem, keep, shift) for keep in (True, False) for shift in shifts]
    return min(candidates, key=lambda solution: (solution.peak, solution.extra_seconds))


def _lower_peaks(problem: Problem, keep: bool, shift: int) -> Solution:
    """Segments at the plain step's peak, then at the peak that remains, and so on while it does not rise."""
    best = problem.plain
    tried: set[int] = set()
    for _ in range(_MOST_PASSES):
        turn = min(_peak_in_order(best) + shift, len(problem.order))
        if turn in tried:
            break
        tried.add(turn)
        choice = _choose(_costs(problem, turn), problem.order, keep)
        candidate = problem.solution(_merge(best.choice, choice))
        if candidate.peak > best.peak or not candidate.schedule.recomputed:
            break
        best = candidate  # where the peak stays, another one of the same height is next
    return best


def _costs(problem: Problem, turn: int) -> SegmentCosts:
    costs = problem.memo.setdefault("segments", {})
    if turn not in costs:
        costs[turn] = SegmentCosts(Cuts(problem.graph, problem.order, turn), problem.plain.liveness)
    return costs[turn]


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


def _save_again(problem: Problem, found: Solution, budget: int) -> Solution:
    """Use what the budget leaves: those first that give most time for each byte."""
    best = found
    for values in _candidates(problem, found)[:_MOST_SAVED_AGAIN]:
        choice = dataclasses.replace(best.choice, saved=best.choice.saved | values)
        candidate = problem.solution(choice)
        if candidate.peak <= budget and candidate.extra_seconds < best.extra_seconds:
            best = candidate
    return best


def _candidates(problem: Problem, found: Solution) -> list[frozenset[int]]:
    """Sets of values that can be saved again: of each recomputed run its dear results, or all that it stores."""
    graph = problem.graph
    stored = {b.value for b in problem.plain.liveness.buffers}
    rated: list[tuple[float, frozenset[int]]] = []
    for run in found.schedule.runs:
        if not run.recomputed:
            continue
        for only_dear in (True, False):
            ops = [op for op in run.ops if not only_dear or graph.ops[op].kind in (Kind.CONTRACTION, Kind.OPAQUE)]
            values = frozenset(v for op in ops for v in graph.ops[op].outputs if v in stored) - found.choice.saved
            size = sum(graph.sizes[value] for value in values)
            if size:
                rated.append((sum(graph.ops[op].seconds for op in ops) / size, values))
    return [values for _, values in sorted(rated, key=lambda pair: (-pair[0], sorted(pair[1])))]


def _choose(costs, order, keep):
    table = table_of(costs, order, (Option.KEEP, Option.RECOMPUTE) if keep else (Option.RECOMPUTE,))
    return choice_of(costs, order, least_peak(table))
