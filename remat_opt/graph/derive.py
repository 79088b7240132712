"""From a choice of what to save to a schedule.

A choice is a set of saved values and positions of the program's order: *cuts*, which divide it into segments, and
*turning points*, at which everything is forgotten that was made before and is not saved. Ops behind a turning point
that read a forgotten value make it again first, and with it all that is still wanted of the same segment.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Sequence

from remat_opt.graph.graph import Graph, Kind
from remat_opt.graph.schedule import Run, Schedule, join_runs


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a search decides.

    Attributes:
        saved: values kept from where they are first made to their last use.
        turning_points: positions in the order of first runs at which everything else is forgotten.
        cuts: positions at which segments begin; each turning point is one, too.
    """

    saved: frozenset[int] = frozenset()
    turning_points: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()


def early_order(graph: Graph) -> tuple[int, ...]:
    """Program order, with the optimizer's updates moved up to where their gradients are ready.

    An update is elementwise work that leads to outputs only. It waits for the last reader of the donated argument whose
    place its result takes, so that it can be done in place; what only feeds it (a decayed moment) is done just before.
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
        if tail[index] and outputs.isdisjoint(graph.ops[index].outputs):
            users = [rank[user] for value in graph.ops[index].outputs for user in graph.users[value]]
            rank[index] = max(rank[index], min(users, default=index))
    return tuple(sorted(range(len(graph.ops)), key=lambda index: (rank[index], tail[index], index)))


def _tail_ops(graph: Graph) -> list[bool]:
    tail = [False] * len(graph.ops)
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        if op.kind is Kind.ELEMENTWISE and op.repeatable:
            tail[index] = all(tail[user] for value in op.outputs for user in graph.users[value])
    return tail


def derive(graph: Graph, choice: Choice, order: Sequence[int]) -> Schedule:
    """Build the schedule of a choice.

    Args:
        graph: the step.
        choice: saved values and turning points.
        order: every op once, in the order of first runs.
    """
    return _Derivation(graph, choice, order).run()


class _Derivation:
    def __init__(self, graph: Graph, choice: Choice, order: Sequence[int]):
        self.graph = graph
        self.order = order
        self.points = sorted(set(choice.turning_points))
        self.made_at = [-1] * len(graph.sizes)
        for position, op in enumerate(order):
            for value in graph.ops[op].outputs:
                self.made_at[value] = position
        self.kept = [value in choice.saved for value in range(len(graph.sizes))]
        for value in (*graph.inputs, *graph.outputs):  # there in any case
            self.kept[value] = True
        for op in graph.ops:
            if not op.repeatable:
                for value in op.outputs:
                    self.kept[value] = True
        self.position_of = {op: position for position, op in enumerate(order)}
        cuts = sorted({*choice.cuts, *choice.turning_points})
        self.segment = [bisect.bisect_right(cuts, self.position_of[op]) for op in range(len(graph.ops))]

    def run(self) -> Schedule:
        runs: list[Run] = []
        held: set[int] = set()  # unsaved values that were made again since the last turning point
        start = 0
        members: dict[int, list[int]] = {}
        for position in (*self.points, len(self.order)):
            epoch = self.order[start:position]
            wanted = self._wanted_reads(epoch, start)
            pending: list[int] = []
            for op in epoch:
                missing = [value for value in self.graph.ops[op].inputs if self._forgotten(value, start, held)]
                if missing:
                    runs.append(Run(tuple(pending)))
                    pending = []
                    again, made = self._recompute(missing, members, wanted, start, held)
                    runs.append(Run(again, recomputed=True))
                    held |= made
                pending.append(op)
            runs.append(Run(tuple(pending)))
            for op in epoch:
                members.setdefault(self.segment[op], []).append(op)
            held, start = set(), position
        return join_runs(runs)

    def _wanted_reads(self, epoch: Sequence[int], start: int) -> set[int]:
        """Unsaved values of earlier epochs that this one reads."""
        return {v for op in epoch for v in self.graph.ops[op].inputs if not self.kept[v] and self.made_at[v] < start}

    def _forgotten(self, value: int, start: int, held: Collection[int]) -> bool:
        return not self.kept[value] and self.made_at[value] < start and value not in held

    def _recompute(
        self, missing: list[int], members: dict[int, list[int]], wanted: set[int], start: int, held: Collection[int]
    ) -> tuple[tuple[int, ...], set[int]]:
        """All ops that make the missing values again, and with them what else is wanted of their segments.

        What these ops read of other segments is made again with them and is not held: those segments' own turn comes.
        """
        producer = self.graph.producer
        segments = {self.segment[producer[value]] for value in missing}
        needed: set[int] = set(missing)
        for segment in segments:
            for op in members[segment]:
                needed.update(v for v in self.graph.ops[op].outputs if v in wanted and v not in held)
        ops: set[int] = set()
        stack = list(needed)
        while stack:
            value = stack.pop()
            op = producer[value]
            if op in ops:
                continue
            ops.add(op)
            stack.extend(v for v in self.graph.ops[op].inputs if self._forgotten(v, start, held))
        return tuple(sorted(ops, key=self.position_of.__getitem__)), needed
