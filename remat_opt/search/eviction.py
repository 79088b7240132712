"""Local search: evict a value over a gap and recompute it afterwards. `local_search.py` combines these moves.

A gap of a buffer is the time between two of its events in which nothing reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from remat_opt.graph.schedule import Run, join_runs
from remat_opt.search.drop_recomputation import needed
from remat_opt.search.problem import Problem, Solution


class Gap(NamedTuple):
    """A buffer (index into `Lives`) that lies idle, and the number of the read behind it."""

    buffer: int
    read: int


class Eviction(NamedTuple):
    """A value evicted over one gap.

    Attributes:
        reader: index of the occurrence before which it is recomputed.
        recomputed: the ops that run again there.
        peak: bytes of the schedule's peak then, without what the repeats need while they run.
        moments: how often that peak is reached.
        extra_seconds: of the repeats.
        extra_flops: of the repeats.
        extends: whether something is kept longer for it.
        above: bytes above the budget that was asked for, summed over all moments, without what the repeats need
            while they run.
    """

    reader: int
    recomputed: tuple[int, ...]
    peak: int
    moments: int
    extra_seconds: float
    extra_flops: float
    extends: bool
    above: float


class Gaps:
    """The gaps of one schedule, and what evicting over them does.

    Args:
        problem: the step.
        solution: the schedule.
    """

    def __init__(self, problem: Problem, solution: Solution):
        self.problem = problem
        self.solution = solution
        self.lives = solution.liveness.lives

    def at(self, moment: int) -> Iterator[Gap]:
        """Those that cover a moment, those of the largest buffers first."""
        lives = self.lives
        idle = np.flatnonzero((lives.birth < moment) & (lives.death > moment) & (lives.size > 0))
        for buffer in idle[np.argsort(-lives.size[idle], kind="stable")].tolist():
            reads = lives.reads[lives.reads_start[buffer] : lives.reads_start[buffer + 1]]
            read = int(np.searchsorted(reads, moment))
            if read < len(reads) and reads[read] > moment:
                yield Gap(buffer, read)

    def evict(self, gap: Gap, *, extend: int, budget: int = 0) -> Eviction | None:
        """Evict a buffer over a gap and recompute its value at the end of the gap.

        Values needed for that which are gone by then are recomputed with it, or kept until then if the peak of the
        bytes live in between stays within `extend`. Returns None if the value cannot be recomputed there.
        """
        graph, lives, every = self.problem.graph, self.lives, self.solution.occurrences
        always_there = self.always_there
        at = int(lives.reads[lives.reads_start[gap.buffer] + gap.read])
        reader = int(np.searchsorted(every.position, at))
        if reader >= len(every.op) or every.position[reader] != at:
            return None  # the return
        before = int(lives.reads[lives.reads_start[gap.buffer] + gap.read - 1] if gap.read else lives.birth[gap.buffer])
        live = self.solution.liveness.live.copy()
        live[before + 1 : at] -= lives.size[gap.buffer]
        extends = False
        ops: set[int] = set()
        stack = [int(lives.value[gap.buffer])]
        while stack:
            op = graph.producer[stack.pop()]
            if op in ops:
                continue
            if not graph.ops[op].repeatable:
                return None
            ops.add(op)
            for value in graph.ops[op].inputs:
                if value in always_there:
                    continue
                held = self.newest(value, at)
                until = before if held == gap.buffer else int(lives.death[held])
                if until >= at:
                    continue
                size = int(lives.size[held])
                if size <= extend and int(live[until + 1 : at + 1].max()) + size <= extend:
                    live[until + 1 : at + 1] += size
                    extends = True
                else:
                    stack.append(value)
        peak = int(live.max())
        seconds, flops = sum(graph.ops[op].seconds for op in ops), sum(graph.ops[op].flops for op in ops)
        recomputed = tuple(sorted(ops, key=self.problem.place.__getitem__))
        return Eviction(
            reader,
            recomputed,
            peak,
            int(np.count_nonzero(live == peak)),
            seconds,
            flops,
            extends,
            bytes_above(live, budget),
        )

    @property
    def always_there(self) -> frozenset[int]:
        """Arguments and results."""
        graph = self.problem.graph
        return self.problem.cached("always there", lambda: frozenset((*graph.inputs, *graph.outputs)))

    @functools.cached_property
    def _last(self) -> np.ndarray:
        """The last buffer of each value."""
        last = np.full(len(self.problem.graph.sizes), -1, dtype=np.int64)
        last[self.lives.value] = np.arange(len(self.lives))
        return last

    def newest(self, value: int, at: int) -> int:
        """The buffer that holds a value at a moment, or held it last."""
        buffer = int(self._last[value])
        while self.lives.birth[buffer] >= at:
            buffer = int(self.solution.occurrences.previous[buffer])
        return buffer

    def scheduled(self, reader: int, recomputed: tuple[int, ...]) -> Solution:
        """The schedule with `Eviction.recomputed` before its reader, without repeats that nobody needs any more."""
        schedule, every = self.solution.schedule, self.solution.occurrences
        which = int(every.run[reader])
        first = reader - int(np.searchsorted(every.run, which))
        run = schedule.runs[which]
        parts = (Run(run.ops[:first], run.recomputed), Run(recomputed, True), Run(run.ops[first:], run.recomputed))
        runs = (*schedule.runs[:which], *parts, *schedule.runs[which + 1 :])
        joined = _joined(runs)
        found = self.problem.scheduled(join_runs(joined), self.solution.origin)
        if (
            not found.liveness.lives.has_unread_repeats
        ):  # as nearly always; to simulate takes less than to look for them
            return found
        return self.problem.scheduled(needed(self.problem.graph, joined), self.solution.origin)


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


def bytes_above(live: np.ndarray, budget: int) -> float:
    """Live bytes above a budget, summed over all moments."""
    return float(np.maximum(live - budget, 0).sum())
