"""Local search: drop the recomputation of single ops from a schedule.

Searches over segments decide by kind of op and by cut. These moves decide by value, on the simulated schedule. `fill`
uses the memory that a budget leaves: it drops repeats as long as the schedule fits. The opposite move is in
`eviction.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from remat_opt.graph.graph import Graph
from remat_opt.graph.schedule import Run, Schedule, join_runs
from remat_opt.search.problem import Problem, Solution

_MOST_PASSES = 4


def without(graph: Graph, schedule: Schedule, taken_out: Collection[int]) -> Schedule:
    """A schedule without some occurrences (their indices in `Schedule.order`), and without repeats that nobody needs.

    What an occurrence made is then kept from the time before; a repeat whose results nobody reads goes, too.
    """
    runs: list[Run] = []
    index = 0
    for run in schedule.runs:
        ops = tuple(op for at, op in enumerate(run.ops, index) if at not in taken_out)
        index += len(run.ops)
        runs.append(Run(ops, run.recomputed))
    return needed(graph, runs)


def needed(graph: Graph, runs: Sequence[Run]) -> Schedule:
    """Drop repeats whose results are not read before they are recomputed."""
    live = set(graph.outputs)
    first = next((at for at, run in enumerate(runs) if run.recomputed), len(runs))
    found: list[Run] = []
    for run in reversed(runs[first:]):
        if not run.recomputed:
            # What a first run makes was not there before it, and stands in no repeat before it.
            live.update(*map(graph.operands.__getitem__, run.ops))
            found.append(run)
            continue
        ops: list[int] = []
        for index in reversed(run.ops):
            op = graph.ops[index]
            if not live.isdisjoint(op.outputs):
                ops.append(index)
                live.difference_update(op.outputs)
                live.update(op.inputs)
        found.append(Run(tuple(reversed(ops)), recomputed=True))
    return join_runs([*runs[:first], *reversed(found)])


def fill(problem: Problem, solution: Solution, budget: int) -> Solution:
    """Take repeats out while the peak stays within a budget: those first that give most time for each byte kept.

    Args:
        problem: the step.
        solution: a schedule that fits.
        budget: bytes.

    Returns:
        A solution that takes no longer and fits, too.
    """
    if problem.plain.peak <= budget:
        return problem.plain  # one by one, repeats may not get there: with some of them left the peak can be higher
    for _ in range(_MOST_PASSES):
        taken_out = _affordable(problem.graph, solution, budget)
        if not taken_out:
            break
        filled = problem.scheduled(without(problem.graph, solution.schedule, taken_out), solution.origin)
        if filled.peak > budget:  # what is kept can no longer be written over
            break
        solution = filled
    return solution


def _affordable(graph: Graph, solution: Solution, budget: int) -> set[int]:
    """Occurrences that can be taken out together without a peak above the budget."""
    if solution.peak > budget:
        return set()
    kept = _Kept(graph, solution)
    taken_out: set[int] = set()
    for at in _promising(graph, solution, budget):
        begin, end, size = kept.cost_of(at)
        if begin >= end or int(kept.live[begin:end].max()) + size <= budget:
            kept.live[begin:end] += size
            kept.take_out(at)
            taken_out.add(at)
    return taken_out


def _promising(graph: Graph, solution: Solution, budget: int) -> list[int]:
    """Repeats by the time that they give for each byte kept, without those for which there is no room from the start:
    what is taken out leaves no more. Of a value that is made more than twice that is not known so early."""
    lives, every = solution.liveness.lives, solution.occurrences
    at = np.flatnonzero(every.recomputed)
    counts = graph.makes.counts[every.op[at]]
    owner = np.repeat(np.arange(len(at)), counts)
    buffer = np.repeat(every.buffer_start[at] - np.cumsum(counts) + counts, counts) + np.arange(len(owner))
    read = lives.read_counts[buffer] > 0
    size = np.bincount(owner, np.where(read, graph.size_array[lives.value[buffer]], 0), len(at)).astype(np.int64)
    end = every.position[at]
    begin = end.copy()
    np.minimum.at(begin, owner[read], lives.death[every.previous[buffer[read]]] + 1)
    often = np.bincount(owner, np.bincount(lives.value)[lives.value[buffer]] > 2, len(at)) > 0
    fits = (begin >= end) | (most_between(solution.liveness.live, begin, np.maximum(end, begin + 1)) + size <= budget)
    rate = graph.op_seconds[every.op[at]] / np.maximum(size, 1)
    possible = np.flatnonzero(often | fits)
    return at[possible[np.argsort(-rate[possible], kind="stable")]].tolist()


def most_between(values: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The largest value of each stretch from `begin` up to, and without, `end`; none is empty.

    By a sparse table (Bender & Farach-Colton 2000): each stretch is two of a power of two, which may overlap.
    """
    tables = [values]
    while 2 ** len(tables) <= len(values):
        half = 2 ** (len(tables) - 1)
        tables.append(np.maximum(tables[-1][:-half], tables[-1][half:]))
    power = np.frexp(end - begin)[1] - 1
    found = np.empty(len(begin), dtype=values.dtype)
    for level, table in enumerate(tables):
        which = np.flatnonzero(power == level)
        found[which] = np.maximum(table[begin[which]], table[end[which] - 2**level])
    return found


class _Kept:
    """A schedule's buffers while repeats are taken out of it: what was made before lives on in their place."""

    def __init__(self, graph: Graph, solution: Solution):
        lives = solution.liveness.lives
        self.every = solution.occurrences
        self.made = graph.makes.counts[self.every.op].tolist()
        self.size = graph.size_array[lives.value].tolist()
        self.live = solution.liveness.live.copy()
        self.death = lives.death.tolist()
        self.is_read = (lives.read_counts > 0).tolist()
        self.previous = self.every.previous.tolist()
        self.gone = [False] * len(lives)

    def cost_of(self, at: int) -> tuple[int, int, int]:
        """From where to where how many bytes more live when an occurrence is taken out (no fewer than it will be)."""
        end = begin = int(self.every.position[at])
        size = 0
        for buffer in self._buffers(at):
            if self.is_read[buffer]:
                size += self.size[buffer]
                begin = min(begin, self.death[self._before(buffer)] + 1)
        return begin, end, size

    def take_out(self, at: int) -> None:
        """What its readers read is now the buffer before."""
        for buffer in self._buffers(at):
            before = self._before(buffer)
            if self.is_read[buffer]:
                self.death[before] = max(self.death[before], self.death[buffer])
                self.is_read[before] = True
            self.gone[buffer] = True

    def _buffers(self, at: int) -> range:
        start = int(self.every.buffer_start[at])
        return range(start, start + self.made[at])

    def _before(self, buffer: int) -> int:
        before = self.previous[buffer]
        while self.gone[before]:
            before = self.previous[before]
        return before
