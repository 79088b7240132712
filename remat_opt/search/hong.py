"""Optimal checkpoints of a chain: Hong, Tsai, Wang, Liu, Wu 2025, "GPU memory usage optimization for backward
propagation in deep network training" (arXiv:2502.12499, JPDC).

A chain of n values of d_k bytes; the checkpoints stay, and the values between two of them are made again when their
segment runs backward. The first and the last value are always checkpoints.

*First objective* (`first_objective`, O(n³)): the bytes of all checkpoints and the most bytes between two of them. For
each of the O(n²) possible values C of the second term, the lightest path over segments of at most C.

*Revised objective*: when a segment runs backward, the checkpoints behind it are free already. So the peak is a maximum
over prefixes,

    M(n − 1) = d_{n−1},   M(i) = d_i + min over j > i of max(M(j), U(i, j)),

with U(i, j) the transient bytes while segment (i, j] runs backward. `revised_objective` is this recurrence, O(n²);
`revised_objective_monotone` is the paper's O(n) version with a deque, exact where U falls neither when a segment grows
at its end nor when it grows at its start (`is_monotone`), and wrong elsewhere.

*On graphs* the values of the chain are the sets that cross cuts of the topological order, and U comes from the plain
step's live sets. What is new at a cut depends on the cut before, and the recurrence is

    M(i) = min over j of max(backward(i, j), forward(i, j), crossing(i, j) + M(j))   recomputed
                     or  max(backward(i, j), kept(i, j) + M(j))                      kept,

where a kept segment is one whose every value is a checkpoint. For a budget the same recurrence gives the least seconds
of recomputation for every size of memory, in slots; the answers are simulated.

Gaps: one level of recomputation, one turning point; at most `MOST_STAGES` cuts; the deque is not used on graphs, where
crossing(i, j) depends on i.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from remat_opt.search.problem import Problem, Solution
from remat_opt.search.remembering import remembered
from remat_opt.search.segments import Option, Plan, Table, choice_of, least_peak, least_seconds, table_of
from remat_opt.search.stages import Stages, best_of, solve_by_models, stages_before_peak, sweep

MOST_STAGES = 120
Transient = Callable[[int, int], int]
"""U(i, j): the most bytes live while segment (i, j] runs backward, without the checkpoints up to i."""
Checkpoints = tuple[int, ...]


def first_objective(sizes: Sequence[int]) -> tuple[int, Checkpoints]:
    """The least sum of checkpoint bytes and of the most bytes between two neighbouring checkpoints."""
    before = _sums(sizes)
    count = len(sizes)
    terms = {before[k] - before[j + 1] for k in range(count) for j in range(k)} or {0}
    best: tuple[int, Checkpoints] | None = None
    for term in sorted(terms):
        path = _lightest_path(sizes, before, term)
        if path is not None and (best is None or path[0] + term < best[0]):
            best = (path[0] + term, path[1])
    assert best is not None  # the largest term allows the segment from end to end
    return best


def _sums(sizes: Sequence[int]) -> list[int]:
    """Bytes of all values before each index."""
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    return before


def _lightest_path(sizes: Sequence[int], before: Sequence[int], term: int) -> tuple[int, Checkpoints] | None:
    """The checkpoints of least bytes with at most `term` bytes between neighbours, O(n): a minimum over a window."""
    weight, origin = [sizes[0]], [-1]
    window: deque[int] = deque([0])  # indices with rising weights
    for k in range(1, len(sizes)):
        while window and before[k] - before[window[0] + 1] > term:
            window.popleft()
        if not window:
            return None
        weight.append(weight[window[0]] + sizes[k])
        origin.append(window[0])
        while window and weight[window[-1]] > weight[k]:
            window.pop()
        window.append(k)
    path = [len(sizes) - 1]
    while origin[path[-1]] >= 0:
        path.append(origin[path[-1]])
    return weight[-1], tuple(reversed(path))


def revised_objective(sizes: Sequence[int], transient: Transient) -> tuple[int, Checkpoints]:
    """M(0) in bytes and its checkpoints, for any U: O(n²)."""
    last = len(sizes) - 1
    peak = [0] * last + [sizes[last]]
    following = [-1] * (last + 1)
    for i in range(last - 1, -1, -1):
        following[i] = min(range(i + 1, last + 1), key=lambda j: max(peak[j], transient(i, j)))
        peak[i] = sizes[i] + max(peak[following[i]], transient(i, following[i]))
    return peak[0], _follow(following)


def revised_objective_monotone(sizes: Sequence[int], transient: Transient) -> tuple[int, Checkpoints]:
    """M(0) in bytes and its checkpoints in O(n) evaluations of U; exact only where `is_monotone`.

    The deque holds the candidates j in order, M falling. A new one takes out those behind it that need no less. As i
    falls U rises, so that the best candidate only moves to the front: the back goes when the one before it is no worse.
    """
    last = len(sizes) - 1
    peak = [0] * last + [sizes[last]]
    following = [-1] * (last + 1)
    candidates: deque[int] = deque([last])
    for i in range(last - 1, -1, -1):
        back = max(peak[candidates[-1]], transient(i, candidates[-1]))
        while len(candidates) > 1:
            other = max(peak[candidates[-2]], transient(i, candidates[-2]))
            if other > back:
                break
            candidates.pop()
            back = other
        following[i] = candidates[-1]
        peak[i] = sizes[i] + back
        while candidates and peak[candidates[0]] >= peak[i]:
            candidates.popleft()
        candidates.appendleft(i)
    return peak[0], _follow(following)


def is_monotone(count: int, transient: Transient) -> bool:
    """Whether U(i, j) ≤ U(i, j + 1) and U(i + 1, j) ≤ U(i, j) for all segments of a chain of `count` values."""
    longer = all(transient(i, j) <= transient(i, j + 1) for i in range(count) for j in range(i + 1, count - 1))
    return longer and all(transient(i + 1, j) <= transient(i, j) for j in range(count) for i in range(j - 1))


def recomputed_and_gradients(sizes: Sequence[int]) -> Transient:
    """The paper's U of a chain: the bytes between i and j, and those of the largest gradient, as large as its value."""
    before = _sums(sizes)
    largest = [list(sizes)]  # largest[p][k]: of the 2^p values from k
    while 2 ** len(largest) <= len(sizes):
        width = 2 ** (len(largest) - 1)
        row = largest[-1]
        largest.append([max(row[k], row[k + width]) for k in range(len(row) - width)])

    def transient(i: int, j: int) -> int:
        power = (j - i).bit_length() - 1
        return before[j] - before[i + 1] + max(largest[power][i + 1], largest[power][j + 1 - 2**power])

    return transient


def _follow(following: Sequence[int]) -> Checkpoints:
    path = [0]
    while following[path[-1]] >= 0:
        path.append(following[path[-1]])
    return tuple(path)


def solve(problem: Problem, budget: int | None) -> Solution:
    """See `Solver`."""
    stages = stages_before_peak(problem, MOST_STAGES)
    if stages is None or (budget is not None and problem.plain.peak <= budget):
        return problem.plain

    tables = _tables(stages)

    def simulated(number: int, capacity: int, limit: int | None) -> Solution:
        name = f"segments of table {number} within {capacity}"  # the same for many budgets
        plans = problem.kept(name, lambda: _Plans(stages, tables[number], capacity))
        return best_of(problem, [*plans.of_least_peak, *sweep(plans.solution, len(plans), limit)], limit)

    return solve_by_models(problem, budget, range(len(tables)), simulated)


class _Plans:
    """Plans for every size of memory up to a capacity in bytes, those of least memory first; simulated when asked."""

    def __init__(self, stages: Stages, table: Table, capacity: int):
        self._stages, self._table = stages, table
        self._plans = least_seconds(table, capacity)

    def __len__(self) -> int:
        return len(self._plans)

    @remembered
    def solution(self, index: int) -> Solution:
        return _solution(self._stages, self._plans[index])

    @functools.cached_property
    def of_least_peak(self) -> list[Solution]:
        """A plan that keeps nothing may do better where the plain step's live sets mislead."""
        return [_solution(self._stages, least_peak(one)) for one in (_without_keeping(self._table), self._table)]


def _solution(stages: Stages, plan: Plan) -> Solution:
    return stages.problem.solution(choice_of(stages.costs, stages.problem.order, plan))


def _tables(stages: Stages) -> tuple[Table, Table, Table]:
    """What segments take, and twice what they may take instead.

    The second counts later segments' residuals beside a segment. The third halves what a backward run needs beyond what
    is kept, because its most may come together with less of the rest than the plain step's order says.
    """
    options = (Option.KEEP, Option.RECOMPUTE)
    alone, beside = (table_of(costs, stages.problem.order, options) for costs in (stages.costs, stages.beside))
    count = len(stages)
    backward, kept = stages.costs.backward[:, :count], stages.costs.kept[:, :count]
    halved = (np.minimum(backward, kept) + backward) // 2
    needs = np.stack([halved, np.maximum(halved, stages.costs.forward[:, :count])])
    return alone, beside, dataclasses.replace(alone, needs=needs)


def _without_keeping(table: Table) -> Table:
    return dataclasses.replace(
        table, options=table.options[1:], stays=table.stays[1:], needs=table.needs[1:], seconds=table.seconds[1:]
    )
