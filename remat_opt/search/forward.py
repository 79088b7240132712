"""The forward part of a step as a small graph of buffers, for searches that know forward graphs only.

The *forward/backward boundary* is found by *gaps*: a buffer's gap is its longest idle time between two of its events
(its birth and its reads). A residual, which the forward pass makes and the backward pass reads, is idle across the
forward/backward boundary, and the gaps of residuals are nested. The plain step's peak is a worse guide: in a VGG it
comes well after the forward/backward boundary, when few bytes of residuals have been freed and the cotangents have
grown.

Vertices are the ops before it that a recomputation could need. These are none:
- results of the step and of ops that may not run twice: they are there in any case;
- the smallest values, together at most 1/512 of the bytes (statistics, scalars): they are always saved;
- *twigs*, elementwise work on arguments alone that joins the graph at one op, as a weight's copy in another dtype: they
  are recomputed with that op.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence

import numpy as np

from remat_opt.graph.derive import Choice, derive
from remat_opt.graph.graph import Kind
from remat_opt.search.problem import Problem, Solution

SMALL_SHARE = 1 / 512


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """The ops before the forward/backward boundary that may run again; vertex i is op `ops[i]`, in the order of first
    runs.

    Attributes:
        problem: the step.
        forward_end: the forward/backward boundary, a position in the order of first runs.
        ops: for each vertex its op.
        values: for each vertex the results that are saved or evicted with it.
        predecessors: for each vertex the vertices whose values it reads.
        nearest: for each vertex the last vertex that it depends on, also through values that are saved in any case; −1
            where there is none.
        always: values that are saved in any case.
    """

    problem: Problem
    forward_end: int
    ops: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    nearest: tuple[int, ...]
    always: frozenset[int]

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def sizes(self) -> list[int]:
        """Bytes that are kept when a vertex is saved."""
        sizes = self.problem.graph.sizes
        return [sum(sizes[value] for value in values) for values in self.values]

    @property
    def seconds(self) -> list[float]:
        """Seconds to run each vertex again."""
        return [self.problem.graph.ops[op].seconds for op in self.ops]

    def saved(self, vertices: Collection[int]) -> frozenset[int]:
        """The values of some vertices, and what is always saved."""
        return self.always.union(*(self.values[vertex] for vertex in vertices))

    def solution(self, saved: Collection[int], block: Sequence[int]) -> Solution:
        """Evict at the forward/backward boundary what is not saved; the vertices of a block are recomputed together.

        Args:
            saved: vertices that are kept.
            block: for each vertex its block. `Choice` knows segments of neighbouring ops only: where blocks interleave,
                the schedule derived from the solution's choice is another one.
        """
        graph, order = self.problem.graph, self.problem.order
        choice = Choice(self.saved(saved), (self.forward_end,))
        blocks = dict(zip(self.ops, block, strict=True))
        following = max(block, default=0)
        segment = [following + 1] * len(graph.ops)
        for op in reversed(order[: self.forward_end]):  # what is no vertex goes with the vertex behind it
            following = blocks.get(op, following)
            segment[op] = following
        return self.problem.scheduled(derive(graph, choice, order, segment), choice)

    def solution_of_cuts(self, saved: Collection[int], positions: Collection[int]) -> Solution:
        """Cut the order of first runs at positions; what was made before the last and is not saved is evicted there.

        The last stretch is kept, since its backward follows at once.
        """
        cuts = tuple(sorted({*positions}))
        return self.problem.solution(Choice(self.saved(saved), cuts[-1:], cuts))


def forward_backward_boundary(problem: Problem) -> int:
    """The position in the order of first runs at which the program stops going forward.

    Gaps are taken from the longest to the shortest, each that lies within the one before; the first has to be where the
    most byte-steps lie idle. Gradients that wait for the step's end lie across residuals' gaps, and cotangents are
    short-lived, so that neither is mistaken for a residual.
    """
    gaps: list[tuple[int, int, int]] = []  # length, first position behind the earlier event, bytes
    for buffer in problem.plain.liveness.buffers:
        events = [buffer.birth, *buffer.reads]
        if buffer.size and len(events) > 1:
            length, before = max((after - before, before) for before, after in itertools.pairwise(events))
            gaps.append((length, before + 1, buffer.size))
    idle = np.zeros(len(problem.order) + 3)
    for length, start, size in gaps:
        idle[start] += float(size) * length
        idle[start + length] -= float(size) * length
    most = int(np.cumsum(idle).argmax())
    within: tuple[int, int] | None = None
    for length, start, _ in sorted(gaps, key=lambda gap: (-gap[0], gap[1])):
        if (start <= most < start + length) if within is None else (within[0] <= start and start + length <= within[1]):
            within = start, start + length
    return within[0] if within else most


def forward_part(problem: Problem) -> Forward:
    """The forward graph of a step; without vertices where nothing can be recomputed."""
    return problem.cached("forward", lambda: _forward_part(problem))


def _forward_part(problem: Problem) -> Forward:
    graph, order = problem.graph, problem.order
    forward_end = forward_backward_boundary(problem)
    there = {*graph.inputs, *graph.outputs, *graph.constants}
    there.update(value for op in graph.ops if not op.repeatable for value in op.outputs)
    made = [v for op in order[:forward_end] for v in graph.ops[op].outputs if v not in there]
    always = _smallest(made, graph.sizes)
    there |= always
    needed = {v for op in order[forward_end:] for v in graph.ops[op].inputs}.intersection(made) - always
    stack = list(needed)
    while stack:
        for value in graph.ops[graph.producer[stack.pop()]].inputs:
            if value not in there and value not in needed:
                needed.add(value)
                stack.append(value)
    ops = [op for op in order[:forward_end] if not needed.isdisjoint(graph.ops[op].outputs)]
    reads = {op: sorted({graph.producer[v] for v in graph.ops[op].inputs if v in needed}) for op in ops}
    twigs = _twigs([op for op in ops if graph.ops[op].kind is Kind.ELEMENTWISE], ops, reads)
    ops = [op for op in ops if op not in twigs]
    vertex = {op: index for index, op in enumerate(ops)}
    return Forward(
        problem,
        forward_end,
        tuple(ops),
        tuple(tuple(v for v in graph.ops[op].outputs if v in needed) for op in ops),
        tuple(tuple(sorted(vertex[read] for read in reads[op] if read not in twigs)) for op in ops),
        _nearest(problem, forward_end, vertex),
        frozenset(always),
    )


def _nearest(problem: Problem, forward_end: int, vertex: dict[int, int]) -> tuple[int, ...]:
    last = dict.fromkeys(problem.graph.inputs, -1)  # for each value its vertex, or the last one that it depends on
    nearest: list[int] = []
    for index in problem.order[:forward_end]:
        op = problem.graph.ops[index]
        before = max((last[value] for value in op.inputs), default=-1)
        if index in vertex:
            nearest.append(before)
        last.update(dict.fromkeys(op.outputs, vertex.get(index, before)))
    return tuple(nearest)


def _smallest(values: Sequence[int], sizes: Sequence[int]) -> set[int]:
    """The smallest values that together have at most `SMALL_SHARE` of the bytes, all of a size or none."""
    left = sum(sizes[value] for value in values) * SMALL_SHARE
    smallest: set[int] = set()
    for size, same in itertools.groupby(sorted(values, key=sizes.__getitem__), key=sizes.__getitem__):
        group = list(same)
        left -= size * len(group)
        if left < 0:
            break
        smallest.update(group)
    return smallest


def _twigs(elementwise: Collection[int], ops: Sequence[int], reads: dict[int, list[int]]) -> set[int]:
    """Elementwise ops without predecessors whose only reader has another predecessor, too."""
    readers: dict[int, int] = dict.fromkeys(ops, 0)
    for op in ops:
        for read in reads[op]:
            readers[read] += 1
    candidates = {op for op in elementwise if not reads[op] and readers[op] == 1}
    twigs: set[int] = set()
    for op in ops:
        found = candidates.intersection(reads[op])
        if len(found) < len(reads[op]):
            twigs |= found
    return twigs


def peak_in_order(solution: Solution) -> int:
    """How many ops had run for the first time when the peak was reached."""
    return int(np.count_nonzero(solution.occurrences.first_runs < solution.liveness.peak_position))
