"""Derives a schedule from a choice of what to save.

A choice has a set of saved values and positions in the program's order. *Cuts* divide the order into segments. At
*forward/backward boundaries* every value made before is dropped unless it is saved. An op after a forward/backward
boundary that reads a dropped value recomputes it first, together with everything else that is still needed of the same
segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from remat_opt.graph.graph import Graph, Kind
from remat_opt.graph.schedule import Run, Schedule, join_runs


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a search decides.

    Attributes:
        saved: values kept from where they are first made to their last use.
        boundaries: positions in the order of first runs at which all unsaved values are dropped.
        cuts: positions at which segments begin. Each forward/backward boundary is a cut, too.
    """

    saved: frozenset[int] = frozenset()
    boundaries: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()


def early_order(graph: Graph) -> tuple[int, ...]:
    """Program order, with the optimizer's updates moved up to where their gradients are ready.

    An update is elementwise work that leads to outputs only. It waits for the last reader of the donated argument whose
    buffer it takes over, so that it can run in place. Ops that only feed it (a decayed moment) run just before it,
    unless they free more bytes than they make (one term of a gradient's sum).
    """
    tail = _tail_ops(graph)
    if not any(tail):
        return tuple(range(len(graph.ops)))
    rank = list(range(len(graph.ops)))  # the op after which each op can run
    producer = graph.producer
    given_of = {output: given for given, output in graph.aliases}
    for index, op in enumerate(graph.ops):
        if tail[index]:
            ready = [rank[producer[value]] for value in op.inputs if producer[value] >= 0]
            overwritten = [given_of[output] for output in op.outputs if output in given_of]
            readers = [user for given in overwritten for user in graph.users[given] if not tail[user]]
            rank[index] = min(index, max([-1, *ready, *readers]))
    outputs = set(graph.outputs)
    for index in range(len(graph.ops) - 1, -1, -1):
        if tail[index] and outputs.isdisjoint(graph.ops[index].outputs) and not _frees(graph, index):
            users = [rank[user] for value in graph.ops[index].outputs for user in graph.users[value]]
            rank[index] = max(rank[index], min(users, default=index))
    return tuple(sorted(range(len(graph.ops)), key=lambda index: (rank[index], tail[index], index)))


def _frees(graph: Graph, index: int) -> bool:
    """Whether an op is the last to read more bytes than it makes."""
    op = graph.ops[index]
    read_last = [v for v in set(op.inputs) if graph.producer[v] >= 0 and graph.users[v][-1] == index]
    return sum(graph.sizes[v] for v in read_last) > sum(graph.sizes[v] for v in op.outputs)


def _tail_ops(graph: Graph) -> list[bool]:
    tail = [False] * len(graph.ops)
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        if op.kind is Kind.ELEMENTWISE and op.repeatable:
            tail[index] = all(tail[user] for value in op.outputs for user in graph.users[value])
    return tail


def derive(graph: Graph, choice: Choice, order: Sequence[int], segment: Sequence[int] | None = None) -> Schedule:
    """Build the schedule of a choice.

    Args:
        graph: the step.
        choice: saved values and forward/backward boundaries.
        order: every op once, in the order of first runs.
        segment: for each op the segment with which it is recomputed; without it, the cuts divide `order`.
    """
    return _Derivation(graph, choice, order, segment).run()


class _Derivation:
    def __init__(self, graph: Graph, choice: Choice, order: Sequence[int], segment: Sequence[int] | None):
        self.graph = graph
        self.order = np.array(order, dtype=np.int64)
        self.points = sorted(set(choice.boundaries))
        self.position_of = np.empty_like(self.order)
        self.position_of[self.order] = np.arange(len(order))
        self.made_at = np.full(len(graph.sizes), -1, dtype=np.int64)
        self.made_at[graph.makes.of(self.order)] = np.repeat(np.arange(len(order)), graph.makes.counts[self.order])
        self.kept = np.zeros(len(graph.sizes), dtype=bool)
        self.kept[list(choice.saved)] = True
        self.kept[graph.always_there] = True
        if segment is None:
            cuts = sorted({*choice.cuts, *choice.boundaries})
            self.segment = np.searchsorted(np.array(cuts, dtype=np.int64), self.position_of, side="right")
        else:
            self.segment = np.array(segment, dtype=np.int64)

    def run(self) -> Schedule:
        runs: list[Run] = []
        start = 0
        for stop in (*self.points, len(self.order)):
            runs += self._epoch(start, stop)
            start = stop
        return join_runs(runs)

    def _epoch(self, start: int, stop: int) -> list[Run]:
        """The runs between two forward/backward boundaries."""
        ops = self.order[start:stop]
        reads, at = self.graph.reads.of(ops), np.repeat(np.arange(start, stop), self.graph.reads.counts[ops])
        evicted = ~self.kept[reads] & (self.made_at[reads] < start)
        self.start, self.held = start, set[int]()
        self.wanted = self._by_segment(reads[evicted])
        runs: list[Run] = []
        done = start
        for position, value in zip(at[evicted].tolist(), reads[evicted].tolist(), strict=True):
            if value in self.held:
                continue
            missing = [v for v in self.graph.ops[self.order[position]].inputs if self._is_evicted(v)]
            again, made = self._recompute(missing)
            runs += [Run(tuple(self.order[done:position].tolist())), Run(again, recomputed=True)]
            self.held |= made
            done = position
        return [*runs, Run(tuple(self.order[done:stop].tolist()))]

    def _by_segment(self, values: np.ndarray) -> dict[int, list[int]]:
        """Values that an epoch reads and that were evicted before it, by the segment that makes them."""
        found: dict[int, list[int]] = {}
        for value in dict.fromkeys(values.tolist()):
            found.setdefault(int(self.segment[self.graph.producer[value]]), []).append(value)
        return found

    def _is_evicted(self, value: int) -> bool:
        return not self.kept[value] and self.made_at[value] < self.start and value not in self.held

    def _recompute(self, missing: list[int]) -> tuple[tuple[int, ...], set[int]]:
        """The ops that recompute the missing values and the other values still needed of their segments.

        Values that these ops read from other segments are recomputed with them, but not held: those segments are
        recomputed later.
        """
        producer = self.graph.producer
        segments = {int(self.segment[producer[value]]) for value in missing}
        needed = {v for segment in segments for v in self.wanted.get(segment, ()) if v not in self.held}
        needed.update(missing)
        ops: set[int] = set()
        stack = list(needed)
        while stack:
            op = producer[stack.pop()]
            if op in ops:
                continue
            ops.add(op)
            stack.extend(v for v in self.graph.ops[op].inputs if self._is_evicted(v))
        return tuple(sorted(ops, key=self.position_of.__getitem__)), needed
