"""Small changes of a schedule: an op's repeat taken out, or a value forgotten over a gap and made again behind it.

Searches over segments decide by kind of op and by cut; these moves decide by value, on the simulated schedule itself.
`fill` uses what a budget leaves: it takes repeats out as long as the schedule fits. `forget` is the opposite move, for
`polish.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from remat_opt.graph.graph import Graph
from remat_opt.graph.schedule import Run, Schedule, join_runs
from remat_opt.search.problem import Occurrences, Problem, Solution

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
    return _needed(graph, runs)


def _needed(graph: Graph, runs: Sequence[Run]) -> Schedule:
    """Drop repeats whose results are not read before they are made again."""
    live = set(graph.outputs)
    found: list[Run] = []
    for run in reversed(runs):
        ops: list[int] = []
        for index in reversed(run.ops):
            op = graph.ops[index]
            if run.recomputed and live.isdisjoint(op.outputs):
                continue
            ops.append(index)
            live.difference_update(op.outputs)
            live.update(op.inputs)
        found.append(Run(tuple(reversed(ops)), run.recomputed))
    return join_runs(reversed(found))


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
        solution = problem.scheduled(without(problem.graph, solution.schedule, taken_out), solution.choice)
    return solution


def _affordable(graph: Graph, solution: Solution, budget: int) -> set[int]:
    """Occurrences that can be taken out together without a peak above the budget."""
    if solution.peak > budget:
        return set()
    kept = _Kept(graph, solution)
    repeats = np.flatnonzero(solution.occurrences.recomputed).tolist()
    rate = {at: graph.ops[solution.occurrences.op[at]].seconds / max(kept.cost_of(at)[2], 1) for at in repeats}
    taken_out: set[int] = set()
    for at in sorted(repeats, key=lambda one: (-rate[one], one)):
        begin, end, size = kept.cost_of(at)
        if begin >= end or int(kept.live[begin:end].max()) + size <= budget:
            kept.live[begin:end] += size
            kept.take_out(at)
            taken_out.add(at)
    return taken_out


class _Kept:
    """A schedule's buffers while repeats are taken out of it: what was made before lives on in their place."""

    def __init__(self, graph: Graph, solution: Solution):
        lives = solution.liveness.lives
        self.every = solution.occurrences
        self.made = graph.makes.counts[self.every.op].tolist()
        self.size = graph.size_array[lives.value].tolist()
        self.live = solution.liveness.live.copy()
        self.death = lives.death.tolist()
        self.is_read = (np.diff(lives.reads_start) > 0).tolist()
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


def forget(problem: Problem, solution: Solution, buffer: int, read: int, *, extend: int) -> Schedule | None:
    """Forget a buffer before one of its reads and make its value again there.

    What that needs and is forgotten by then is made again with it, or, where that costs no more than `extend` bytes at
    any moment, kept until there.

    Args:
        problem: the step.
        solution: the schedule to change.
        buffer: index into `solution.liveness.lives`.
        read: index into the buffer's reads; the gap before it is the one over which the value is forgotten.
        extend: the bytes below which the peak of the gap has to stay for an operand to be kept.

    Returns:
        The schedule, or None where the value cannot be made again there.
    """
    graph, lives = problem.graph, solution.liveness.lives
    at = int(lives.reads[lives.reads_start[buffer] + read])
    every = solution.occurrences
    reader = int(np.searchsorted(every.position, at))
    if reader >= len(every.op) or every.position[reader] != at:
        return None  # the return
    live = solution.liveness.live.copy()
    before = int(lives.reads[lives.reads_start[buffer] + read - 1]) if read else int(lives.birth[buffer])
    live[before + 1 : at] -= lives.size[buffer]
    newest: dict[int, int] = {}
    for index, (value, birth) in enumerate(zip(lives.value.tolist(), lives.birth.tolist(), strict=True)):
        if birth < at or index < len(graph.inputs):
            newest[value] = index
    ops: set[int] = set()
    stack = [int(lives.value[buffer])]
    there = {*graph.inputs, *graph.outputs}
    while stack:
        op = graph.producer[stack.pop()]
        if op in ops:
            continue
        if not graph.ops[op].repeatable:
            return None
        ops.add(op)
        for value in graph.ops[op].inputs:
            if value in there:
                continue
            held = newest[value]
            until = int(lives.death[held])
            if held == buffer:
                until = before
            if until >= at:
                continue
            if int(live[until + 1 : at + 1].max(initial=0)) + int(lives.size[held]) <= extend:
                live[until + 1 : at + 1] += lives.size[held]
            else:
                stack.append(value)
    place = {op: index for index, op in enumerate(problem.order)}
    again = tuple(sorted(ops, key=place.__getitem__))
    return _inserted(graph, solution.schedule, every, reader, again)


def _inserted(graph: Graph, schedule: Schedule, every: Occurrences, reader: int, again: Sequence[int]) -> Schedule:
    """A schedule with a recomputed run before an occurrence."""
    which = int(every.run[reader])
    first = reader - int(np.searchsorted(every.run, which))
    run = schedule.runs[which]
    parts = [Run(run.ops[:first], run.recomputed), Run(tuple(again), True), Run(run.ops[first:], run.recomputed)]
    runs = [*schedule.runs[:which], *parts, *schedule.runs[which + 1 :]]
    return _needed(graph, _joined(runs))


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Neighbouring recomputed runs made one where no op stands in both."""
    joined: list[Run] = []
    for run in runs:
        if not run.ops:
            continue
        last = joined[-1] if joined else None
        if last and run.recomputed and last.recomputed and set(last.ops).isdisjoint(run.ops):
            joined[-1] = Run(last.ops + run.ops, True)
        else:
            joined.append(run)
    return joined
