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
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from remat_opt.search.problem import Problem, Solution
from remat_opt.search.stages import Stages, best_of, in_slots, later_bytes, segments_choice, stages_before_peak, sweep

MOST_STAGES = 120
SLOTS = 400
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
    best = problem.plain if budget is None else _fitting(stages, tables, budget)
    if budget is not None and best.peak <= budget:
        return best
    found = [(_simulated(stages, table, problem.plain.peak, None), table) for table in tables]
    least, table = min(found, key=lambda pair: (pair[0].peak, pair[0].extra_seconds))
    finer = _simulated(stages, table, least.peak * 5 // 4, None)  # in smaller slots
    best = best_of(problem, [best, least, finer], budget)
    return best_of(problem, [best, _fitting(stages, tables, best.peak)], budget)


def _fitting(stages: Stages, tables: Sequence[_Table], budget: int) -> Solution:
    capacity = min(2 * budget, stages.problem.plain.peak)
    return best_of(stages.problem, [_simulated(stages, table, capacity, budget) for table in tables[:2]], budget)


def _simulated(stages: Stages, table: _Table, capacity: int, budget: int | None) -> Solution:
    """The best of the plans of least peak and of some of least seconds with at most `capacity` bytes, see `sweep`."""

    def solution(plan: _Plan) -> Solution:
        return stages.problem.solution(segments_choice(stages, plan.ends, plan.kept))

    # A plan that keeps nothing may do better where the plain step's live sets mislead.
    least = [solution(_least_peak(table, keep)) for keep in (False, True)]
    plans = _least_seconds(table, capacity)
    some = sweep(lambda index: solution(plans[index]), len(plans), budget)
    return best_of(stages.problem, [*least, *some], budget)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Where segments end, as indices of cuts, and which of them are kept; the rest behind the last end is kept, too."""

    ends: tuple[int, ...] = ()
    kept: tuple[bool, ...] = ()

    def behind(self, end: int, kept: bool) -> _Plan:
        """The plan with one more segment in front of all others."""
        return _Plan((end, *self.ends), (kept, *self.kept))


@dataclasses.dataclass(frozen=True)
class _Table:
    """What the segment from cut i to cut j takes, [i, j] with i < j: bytes and seconds.

    Attributes:
        backward: bytes live while it runs backward.
        again: bytes live while it is made again and runs backward.
        crossing: bytes that stay when it is made again.
        kept: bytes that stay when it is kept.
        last: [i], bytes live while all behind cut i runs backward.
        seconds: of its ops.
    """

    backward: np.ndarray
    again: np.ndarray
    crossing: np.ndarray
    kept: np.ndarray
    last: np.ndarray
    seconds: np.ndarray


def _tables(stages: Stages) -> tuple[_Table, _Table, _Table]:
    """What segments take, and twice what they may take instead.

    The second adds what was made behind a segment and is still there when it runs backward in the plain step; where
    backward ops of several segments mix, that may be too much. The third halves what a backward run needs beyond what
    is kept, because its most may come together with less of the rest than the plain step's order says.
    """
    costs, count = stages.costs, len(stages)
    backward, forward, crossing, kept, later = np.zeros((5, count, count), dtype=np.int64)
    _, behind = later_bytes(stages)
    for i in range(count):
        for j in range(i + 1, count):
            backward[i, j] = costs.backward_peak(i, j)
            forward[i, j] = costs.forward_peak(i, j)
            crossing[i, j] = costs.crossing_bytes(i, j)
            kept[i, j] = costs.kept_bytes(i, j)
            later[i, j] = behind[j - 1]
    last = np.array([costs.backward_peak(i, None) for i in range(count)], dtype=np.int64)
    before = stages.cuts.seconds[stages.cuts.positions]
    seconds = before[None, :] - before[:, None]
    least = np.minimum(backward, kept)

    def table(needed: np.ndarray) -> _Table:
        return _Table(needed, np.maximum(needed, forward), crossing, kept, last, seconds)

    return table(backward), table(backward + later), table((least + backward) // 2)


def _least_peak(table: _Table, keep: bool) -> _Plan:
    """M(0) in bytes; among equal peaks the least seconds. `keep`: whether segments before the last may be kept."""
    count = len(table.last)
    peak, seconds = table.last.copy(), np.zeros(count)
    plans = [_Plan()] * count
    for i in range(count - 2, -1, -1):
        following = slice(i + 1, count)
        peaks = [np.maximum(table.again[i, following], table.crossing[i, following] + peak[following])]
        times = [seconds[following] + table.seconds[i, following]]
        if keep:
            peaks.append(np.maximum(table.backward[i, following], table.kept[i, following] + peak[following]))
            times.append(seconds[following])
        all_peaks, all_times = np.concatenate(peaks), np.concatenate(times)
        best = int(np.lexsort((all_times, all_peaks))[0])
        if (all_peaks[best], all_times[best]) < (peak[i], 0.0):
            kept, offset = divmod(best, count - 1 - i)
            peak[i], seconds[i] = all_peaks[best], all_times[best]
            plans[i] = plans[i + 1 + offset].behind(i + 1 + offset, bool(kept))
    return plans[0]


def _least_seconds(table: _Table, capacity: int) -> list[_Plan]:
    """The plans of least seconds for every size of memory up to `capacity` bytes, those of least memory first."""
    count = len(table.last)
    slot = max(1, -(-capacity // SLOTS))
    rooms = np.arange(-(-capacity // slot) + 1)
    seconds = np.full((count, len(rooms)), np.inf)
    decision = np.full((count, len(rooms)), -1, dtype=np.int64)
    again, backward, last = (-(-bytes_ // slot) for bytes_ in (table.again, table.backward, table.last))
    crossing, kept = in_slots(table.crossing, slot), in_slots(table.kept, slot)
    for i in range(count - 1, -1, -1):
        following = np.arange(i + 1, count)
        options = [np.where(rooms >= last[i], 0.0, np.inf)[None, :]]
        for stays, needs, time in ((kept, backward, 0.0), (crossing, again, table.seconds[i, following, None])):
            left = rooms[None, :] - stays[i, following, None]
            behind = seconds[following[:, None], np.maximum(left, 0)] + time
            options.append(np.where((left >= 0) & (rooms >= needs[i, following, None]), behind, np.inf))
        table_of_options = np.concatenate(options)
        decision[i] = table_of_options.argmin(axis=0)
        seconds[i] = table_of_options.min(axis=0)
    rooms_of_change = [m for m in rooms if seconds[0, m] < (seconds[0, m - 1] if m else np.inf)]
    return [_read_plan(decision, (crossing, kept), int(room)) for room in rooms_of_change]


def _read_plan(decision: np.ndarray, stays: tuple[np.ndarray, np.ndarray], room: int) -> _Plan:
    count = len(decision)
    ends: list[int] = []
    kept: list[bool] = []
    i = 0
    while (option := int(decision[i, room]) - 1) >= 0:
        second, offset = divmod(option, count - 1 - i)
        j = i + 1 + offset
        room -= int(stays[0 if second else 1][i, j])
        ends.append(j)
        kept.append(not second)
        i = j
    return _Plan(tuple(ends), tuple(kept))
