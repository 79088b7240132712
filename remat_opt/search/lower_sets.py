"""Strategies of lower sets: Kusumoto, Inoue, Watanabe, Akiba, Koyama 2019 (arXiv:1905.11722, sections 3 and 4).

A lower set of the forward graph holds with a vertex all that it is made from. A strategy is a chain of lower sets from
the empty one to the whole graph. The *block* between two neighbours is evicted but for its *boundary* (what is read
outside the larger set), and recomputed, once, when its backward comes, the last block first. The last block's backward
follows at once, so that it is not evicted (the paper makes it again, too).

    peak(strategy) = max over blocks of  kept before the block + backward(block)
    extra time     = sum over blocks but the last of the seconds of what is no boundary

`backward` is the most bytes live while a block runs backward: what is left of its residuals, with the cotangents of the
plain step at that moment (the paper takes twice the block's bytes and those of its neighbours' gradients).

- Least peak: best(L) = min over L' of max(backward(L'∖L), boundary + best(L')), exact over the family of sets.
- Least time under a limit: the paper's table least kept bytes by (set, seconds so far), without the steps that pass the
  limit. Seconds are in units of their common divisor where that takes at most `MOST_LEVELS` units, fewer where there
  are many sets (then it is exact), else rounded to the nearest of `LEVELS` units.

The family is every lower set while there are at most `MOST_SETS` (exact), else the ancestor closures of vertices and
the cuts of the order of first runs, of which those with small boundaries are taken, spread over the bytes. The formula
only guides: of the strategies for several limits the one with the best simulated schedule is returned.

Limitations: a block is recomputed as a whole and once; the family for large graphs has no proof; what is made before
the forward/backward boundary of `forward.py` only; with a second forward and backward pass (GANs) only the larger one.
"""

from __future__ import annotations

import dataclasses
import fractions
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from remat_opt.search.forward import Forward, forward_part
from remat_opt.search.problem import Problem, Solution
from remat_opt.search.stages import best_of

MOST_SETS = 1200
MOST_LEVELS = 1024
MOST_STEPS = 40_000_000  # pairs of sets × levels
LEVELS = 160
_SETS_OF_LARGE_GRAPHS = 360
_MOST_BITS = 16_000_000  # of all candidate sets together
_PROBES = 10
_NEAR_MINIMUM = (1.0, 1.015, 1.03, 1.06, 1.1)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What the dynamic programme sees: vertices in topological order.

    Attributes:
        predecessors: for each vertex the earlier ones that it reads.
        kept: bytes that saving a vertex costs.
        residual: bytes of a vertex that the backward reads.
        seconds: time to run a vertex again.
        last_read: when the backward reads each vertex for the last time; any increasing measure.
        cotangents: bytes of cotangents that live with the block when the backward reads each vertex for the last time.
    """

    predecessors: Sequence[Sequence[int]]
    kept: Sequence[int]
    residual: Sequence[int]
    seconds: Sequence[float]
    last_read: Sequence[int]
    cotangents: Sequence[int]

    def __len__(self) -> int:
        return len(self.kept)


def solve(problem: Problem, budget: int | None) -> Solution:
    """See `Solver`."""
    plain = problem.plain
    if budget is not None and plain.peak <= budget:
        return plain
    forward = forward_part(problem)
    if not len(forward):
        return plain
    search: _Search = problem.cached("lower_sets", lambda: _Search(forward))
    found = search.near_minimum_peak()
    if budget is not None and any(solution.peak <= budget for solution in found):
        found += search.near_budget(budget)
    return best_of(problem, found, budget)


class _Search:
    """Simulated strategies for limits on the formula's peak; none is simulated twice."""

    def __init__(self, forward: Forward):
        self.forward = forward
        self.blocks = Blocks(task_of(forward), lower_sets_of(forward))
        self.minimum_peak = self.blocks.minimum_peak()
        self.strategies: dict[float, tuple[int, ...]] = {}
        self.solutions: dict[tuple[int, ...], Solution] = {(): forward.problem.plain}

    def simulated(self, limit: float) -> Solution:
        """The strategy for a limit, in bytes; the plain step where there is none."""
        if limit not in self.strategies:
            self.strategies[limit] = self.blocks.minimum_seconds(limit) or ()
        strategy = self.strategies[limit]
        if strategy not in self.solutions:
            self.solutions[strategy] = solution_of(self.forward, [self.blocks.sets[index] for index in strategy])
        return self.solutions[strategy]

    def near_minimum_peak(self) -> list[Solution]:
        """The formula says a little less than the liveness model, so that other limits may be better."""
        return [self.simulated(self.minimum_peak * factor) for factor in _NEAR_MINIMUM]

    def near_budget(self, budget: int) -> list[Solution]:
        """Strategies for the limits of a bisection, the last ones with a simulated peak of just below `budget`."""
        found: list[Solution] = []
        low, high = self.minimum_peak, self.blocks.peak_of_saving_all()
        for _ in range(_PROBES):
            middle = (low + high) / 2
            found.append(self.simulated(middle))
            low, high = (middle, high) if found[-1].peak <= budget else (low, middle)
        return found


def task_of(forward: Forward) -> Task:
    """The figures of a step, from the plain step's buffers."""
    problem, forward_end = forward.problem, forward.forward_end
    buffers = {buffer.value: buffer for buffer in problem.plain.liveness.buffers}
    cotangents = np.zeros(len(problem.order) + 3, dtype=np.int64)
    for buffer in buffers.values():
        if buffer.birth >= forward_end:
            cotangents[buffer.birth] += buffer.size
            cotangents[buffer.death + 1] -= buffer.size
    cotangents = np.cumsum(cotangents)
    stored = [[buffers[value] for value in values if value in buffers] for values in forward.values]
    read = [[buffer for buffer in held if buffer.death >= forward_end] for held in stored]
    last_read = [max((buffer.death for buffer in held), default=forward_end) for held in read]
    ends = sorted(set(last_read))
    before = dict(zip(ends, [forward_end, *ends[:-1]], strict=True))
    return Task(
        forward.predecessors,
        forward.sizes,
        [sum(buffer.size for buffer in held) for held in read],
        forward.seconds,
        last_read,
        [int(cotangents[before[end] : end + 1].max()) for end in last_read],
    )


def lower_sets_of(forward: Forward) -> list[int]:
    """The family of lower sets, as bit sets, the empty and the whole one included, each before its supersets."""
    exact = all_lower_sets(forward.predecessors, MOST_SETS)
    return exact if exact is not None else some_lower_sets(forward, _SETS_OF_LARGE_GRAPHS)


def all_lower_sets(predecessors: Sequence[Sequence[int]], most: int) -> list[int] | None:
    """Every lower set as a bit set, by number of vertices; None where there are more than `most`."""
    needs = [sum(1 << one for one in before) for before in predecessors]
    found = [0]
    for vertex, before in enumerate(needs):
        found += [lower | 1 << vertex for lower in found if lower & before == before]
        if len(found) > most:
            return None
    return sorted(found, key=lambda lower: (lower.bit_count(), lower))


def some_lower_sets(forward: Forward, most: int) -> list[int]:
    """Ancestor closures and cuts of the order, of those the ones with small boundaries."""
    closures: list[int] = []
    for vertex, before in enumerate(forward.predecessors):
        closure = 1 << vertex
        for one in before:
            closure |= closures[one]
        closures.append(closure)
    whole = (1 << len(forward)) - 1
    every = -(-2 * len(forward) ** 2 // _MOST_BITS)  # of many vertices only some
    cuts = ((1 << count) - 1 for count in range(every, len(forward), every))
    sets = sorted({*closures[::every], *cuts} - {0, whole})
    members = _members(sets, len(forward))
    sizes = np.array(forward.sizes, dtype=float)
    boundary = _boundaries(members, forward.predecessors) @ sizes
    total = members @ sizes
    stretch = np.minimum((total / max(sizes.sum(), 1) * most).astype(int), most - 1)
    best: dict[int, int] = {}
    for index in sorted(range(len(sets)), key=lambda i: (boundary[i], -total[i], sets[i])):
        best.setdefault(int(stretch[index]), index)
    chosen = {sets[index] for index in best.values()}
    return sorted({0, whole, *chosen}, key=lambda lower: (lower.bit_count(), lower))


def _members(sets: Sequence[int], count: int) -> np.ndarray:
    """One row of zeros and ones for each bit set."""
    width = (count + 7) // 8
    packed = np.frombuffer(b"".join(one.to_bytes(width, "little") for one in sets), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(sets), width), axis=1, bitorder="little")[:, :count].astype(float)


def _boundaries(members: np.ndarray, predecessors: Sequence[Sequence[int]]) -> np.ndarray:
    """For each set its vertices that are read outside it."""
    boundary = np.zeros_like(members)
    for vertex, before in enumerate(predecessors):
        for one in before:
            boundary[:, one] = np.maximum(boundary[:, one], members[:, one] * (1 - members[:, vertex]))
    return boundary


class Blocks:
    """The blocks between all pairs of nested sets, and the two recurrences over them."""

    def __init__(self, task: Task, sets: Sequence[int]):
        self.sets = sets
        self.task = task
        members = _members(sets, len(task))
        outside = 1 - members
        boundary = _boundaries(members, task.predecessors)
        seconds, kept = np.array(task.seconds, dtype=float), np.array(task.kept, dtype=float)
        self.nested = (members @ outside.T == 0) & ~np.eye(len(sets), dtype=bool)
        self.boundary = outside @ (boundary * kept).T
        self.unit, self.levels = _time_unit(task.seconds, min(MOST_LEVELS, MOST_STEPS // len(sets) ** 2))
        again = (members @ seconds)[None, :] - (members @ seconds)[:, None] - outside @ (boundary * seconds).T
        self.steps = np.rint(np.where(self.nested, again, 0) / self.unit).astype(np.int64)
        self.steps[:, -1] = 0  # the last block is not recomputed
        self.backward = self._backward(members, outside)

    def _backward(self, members: np.ndarray, outside: np.ndarray) -> np.ndarray:
        """The most bytes live while the block from set i (row) to set j (column) runs backward."""
        task = self.task
        remaining = np.zeros(self.nested.shape)
        peak = np.zeros(self.nested.shape)
        order = sorted(range(len(task)), key=lambda vertex: (-task.last_read[vertex], vertex))
        # Neighbours that stand in the same sets run backward together in every block.
        for _, together in itertools.groupby(order, key=lambda vertex: members[:, vertex].tobytes()):
            vertices = list(together)
            block = _block(np.flatnonzero(outside[:, vertices[0]]), np.flatnonzero(members[:, vertices[0]]))
            grown = np.cumsum([task.residual[vertex] for vertex in vertices])
            above = int((grown + [task.cotangents[vertex] for vertex in vertices]).max())
            peak[block] = np.maximum(peak[block], remaining[block] + above)
            remaining[block] += grown[-1]
        return np.where(self.nested, peak, np.inf)

    def minimum_peak(self) -> float:
        """The least peak of a strategy, in bytes."""
        best = np.full(len(self.sets), np.inf)
        best[-1] = 0
        for index in range(len(self.sets) - 2, -1, -1):
            best[index] = np.maximum(self.backward[index], self.boundary[index] + best).min()
        return float(best[0])

    def peak_of_saving_all(self) -> float:
        """The peak of the strategy of one block."""
        return float(self.backward[0, -1])

    def minimum_seconds(self, limit: float) -> tuple[int, ...] | None:
        """The strategy with the least extra time and a peak of at most `limit` bytes, the least kept bytes among
        equals; indices of its sets without the empty one. None where there is none."""
        table = _KeptBytes(self, limit)
        for index in range(1, len(self.sets)):
            table.fill(index)
        possible = np.flatnonzero(np.isfinite(table.kept[-1]))
        if not len(possible):
            return None
        level, index = int(possible[0]), len(self.sets) - 1
        strategy: list[int] = []
        while index:
            strategy.append(index)
            before = table.came_from(index, level)
            level, index = level - int(self.steps[before, index]), before
        return tuple(reversed(strategy))


def _block(rows: np.ndarray, columns: np.ndarray) -> tuple[Any, ...]:
    """The index of some rows and columns: of a chain's they stand side by side, and are a view instead of a copy."""
    stretches = [slice(one[0], one[-1] + 1) if one[-1] - one[0] < len(one) else one for one in (rows, columns)]
    return tuple(stretches) if any(isinstance(one, slice) for one in stretches) else np.ix_(rows, columns)


class _KeptBytes:
    """The least kept bytes by set and seconds so far, of strategies within a limit.

    Which set a strategy comes from is asked again where one is read out of the table: to note it for each entry takes
    longer than to find the bytes.

    Attributes:
        kept: [set, seconds in units].
    """

    def __init__(self, blocks: Blocks, limit: float):
        self.blocks, count, self.width = blocks, len(blocks.sets), blocks.levels + 1
        padded = np.full((count, 2 * self.width), np.inf)  # seconds below zero first
        self.kept = padded[:, self.width :]
        self.kept[0, 0] = 0
        self.shifted = np.lib.stride_tricks.sliding_window_view(padded, self.width, axis=1)
        self.least = np.full(count, np.inf)  # of each set
        self.least[0] = 0
        self.longest = np.zeros(count, dtype=np.int64)  # seconds of a strategy that comes to each set, at most
        self.room = np.ascontiguousarray((limit * (1 + 1e-12) - blocks.backward).T)  # [to, from], none where not nested

    def fill(self, index: int) -> None:
        """What a set's strategies keep, once that is known of all sets in it."""
        sets = self._sets_before(index)
        if not len(sets):
            return
        found = self._with(index, sets).min(axis=0)
        self.kept[index, : len(found)] = found
        self.least[index] = found.min()
        self.longest[index] = len(found) - 1

    def came_from(self, index: int, level: int) -> int:
        """The set before one in a strategy, the first of equals."""
        sets = self._sets_before(index)
        return int(sets[self._with(index, sets)[:, level].argmin()])

    def _sets_before(self, index: int) -> np.ndarray:
        """The sets in one that leave room for the block between them."""
        return np.flatnonzero(self.least <= self.room[index])

    def _with(self, index: int, sets: np.ndarray) -> np.ndarray:
        """Kept bytes by set before one and seconds, infinite where there is no room for the block between them."""
        steps = self.blocks.steps[sets, index]
        width = min(int((self.longest[sets] + steps).max()) + 1, self.width)
        total = self.shifted[:, :, :width][sets, self.width - np.minimum(steps, self.width)]
        np.copyto(total, np.inf, where=total > self.room[index, sets][:, None])
        total += self.blocks.boundary[sets, index][:, None]
        return total


def _time_unit(seconds: Sequence[float], most: int) -> tuple[float, int]:
    """The unit of time in seconds, and how many of them all vertices take together: exact if that is at most `most`."""
    exact = [fractions.Fraction(one) for one in seconds if one > 0]
    if not exact:
        return 1.0, 0
    scale = math.lcm(*(one.denominator for one in exact))
    divisor = math.gcd(*(int(one * scale) for one in exact))
    levels = sum(exact) * scale / divisor
    if levels <= most:
        return float(fractions.Fraction(divisor, scale)), int(levels)
    return float(sum(exact)) / LEVELS, LEVELS + LEVELS // 4  # roundings add up


def solution_of(forward: Forward, strategy: Sequence[int]) -> Solution:
    """The schedule of a chain of lower sets, without the empty one."""
    block = [0] * len(forward)
    saved: set[int] = set()
    below = 0
    for index, lower in enumerate(strategy):
        inside = [vertex for vertex in range(len(forward)) if (lower & ~below) >> vertex & 1]
        for vertex in inside:
            block[vertex] = index
        if index == len(strategy) - 1:
            saved.update(inside)
        below = lower
    for lower in strategy[:-1]:
        for vertex, before in enumerate(forward.predecessors):
            if not lower >> vertex & 1:
                saved.update(one for one in before if lower >> one & 1)
    return forward.solution(saved, block)
