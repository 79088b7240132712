"""Which loops a TPU's compiler makes one kernel of, by XLA's multi-output fusion: elementwise work that is stored, and
sums.

1. What a product makes is summed up in its kernel, and is not stored where nobody else reads it; so is, over columns,
   what elementwise work makes.
2. Of the rest, loops over arrays of one shape are one kernel if they read something in common and neither depends on
   the other: a vector is enough if one of them is a sum; two that are elementwise share an array of their size. So the
   sums of two passes that have nothing else in common run together, and both passes are live at once.

Seen in dumps of libtpu 0.0.51: three sums of a layer normalisation's backward pass over 16 × 64 × 64 numbers, of which
two go along the rows and one along the columns, are one kernel; the sums of three derivatives of a network are nine
results of one kernel with the elementwise work that they end in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence, Set

from jax.extend.core import primitives as P

from remat_opt.compilers.tpu_windows import REDUCE_WINDOW
from remat_opt.graph.dependencies import Dependencies
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.ordering import behind_operands
from remat_opt.program.primitives import CONTRACTION, REDUCTION

# What the model adds, as parts that are cut of an array, is by kind alone what these are by name, too.
PRODUCTS = frozenset(primitive.name for primitive in (*CONTRACTION, REDUCE_WINDOW))
SUMS = frozenset(primitive.name for primitive in REDUCTION)


def with_loops_joined(
    graph: Graph, shapes: Mapping[int, tuple[int, ...]], elements: Sequence[int], accumulated: Container[int]
) -> Graph:
    """A graph of kernels in which loops are done together.

    Args:
        graph: kernels in an order in which they can run.
        shapes: by their results over which array loops go.
        elements: of each value their number.
        accumulated: results of sums over columns.
    """
    return _Loops(graph, shapes, elements, accumulated).joined()


class _Loops:
    """Loops, and which of them become one kernel, with the product whose result they read or without."""

    def __init__(
        self,
        graph: Graph,
        shapes: Mapping[int, tuple[int, ...]],
        elements: Sequence[int],
        accumulated: Container[int],
    ):
        self._graph = graph
        self._elements = elements
        self._accumulated = accumulated
        self._outputs = frozenset(graph.outputs)
        self._shapes = {at: shapes[op.outputs[0]] for at, op in enumerate(graph.ops) if self._is_loop(op, shapes)}
        self._before = Dependencies(((op.inputs, op.outputs) for op in graph.ops), range(len(graph.ops)))
        self._groups: dict[int, list[int]] = {}

    def joined(self) -> Graph:
        free = dict(self._shapes)
        for at in self._shapes:
            maker = self._summed_in(at)
            if maker >= 0:
                self._join(maker, at)
                if self._graph.ops[maker].name in PRODUCTS:
                    del free[at]
        alike: dict[tuple[int, ...], list[int]] = {}
        for at, shape in free.items():
            alike.setdefault(shape, []).append(at)
        for loops in alike.values():
            self._join_siblings(loops)
        return self._with_kernels()

    def _is_loop(self, op: Op, shapes: Container[int]) -> bool:
        is_elementwise = op.kind is Kind.ELEMENTWISE and op.name != P.pad_p.name
        is_alone = len(op.outputs) == 1 and op.outputs[0] in shapes and op.outputs[0] not in self._outputs
        return is_alone and (is_elementwise or op.name in SUMS)

    def _summed_in(self, at: int) -> int:
        """The kernel that makes an operand of a sum and can sum it up, as all others are there before; -1 for none."""
        op = self._graph.ops[at]
        if op.name not in SUMS:
            return -1
        makers = {self._graph.producer[value] for value in op.inputs} - {-1}
        for maker in sorted(makers, reverse=True):
            if self._sums_up(maker, at):
                waits = any(self._before.needs(other, maker) for other in makers if other != maker)
                return -1 if waits else maker
        return -1

    def _sums_up(self, maker: int, at: int) -> bool:
        kernel, size = self._graph.ops[maker], math.prod(self._shapes[at])
        if kernel.name in PRODUCTS:
            is_whole = any(self._elements[value] == size for value in kernel.outputs)
            return is_whole and self._outputs.isdisjoint(kernel.outputs)
        is_alike = maker in self._shapes and self._shapes[maker] == self._shapes[at]
        is_accumulated = self._graph.ops[at].outputs[0] in self._accumulated
        return is_alike and is_accumulated and kernel.kind is Kind.ELEMENTWISE

    def _join_siblings(self, loops: Sequence[int]) -> None:
        read = {at: {v for v in self._graph.ops[at].inputs if self._elements[v] != 1} for at in loops}
        for place, one in enumerate(loops):
            for other in loops[place + 1 :]:
                is_apart = other not in self._groups.get(one, ()) and self._before.are_apart(one, other)
                if is_apart and self._is_worth(one, other, read[one] & read[other]):
                    self._join(one, other)

    def _is_worth(self, one: int, other: int, shared: Set[int]) -> bool:
        """Whether loops are joined for what they both read: two of elementwise work for an array of theirs alone."""
        if any(self._graph.ops[at].name in SUMS for at in (one, other)):
            return bool(shared)
        return any(self._elements[value] >= math.prod(self._shapes[one]) for value in shared)

    def _join(self, one: int, other: int) -> None:
        group = [*self._groups.get(one, [one]), *self._groups.get(other, [other])]
        self._groups.update(dict.fromkeys(group, group))
        self._before.join(group)

    def _with_kernels(self) -> Graph:
        ops, inside = list(self._graph.ops), set[int]()
        for group in {id(group): sorted(group) for group in self._groups.values()}.values():
            # What a product makes is summed up where it is made; siblings run when the last of them could.
            place = group[0] if ops[group[0]].name in PRODUCTS else group[-1]
            ops[place] = self._kernel(group)
            inside.update(at for at in group if at != place)
        order = behind_operands(ops, inside)
        return dataclasses.replace(self._graph, ops=tuple(ops[at] for at in order))

    def _kernel(self, group: Sequence[int]) -> Op:
        graph, own = self._graph, set(group)
        work = [graph.ops[at] for at in group]
        host = next((op for op in work if op.kind is not Kind.REDUCTION), work[0])
        made = [v for op in work for v in op.outputs if v in self._outputs or not own.issuperset(graph.users[v])]
        return dataclasses.replace(
            host,
            inputs=tuple(dict.fromkeys(v for op in work for v in op.inputs if graph.producer[v] not in own)),
            outputs=tuple(made),
            flops=sum(op.flops for op in work),
            seconds=sum(op.seconds for op in work),
            workspace=sum(op.workspace for op in work),
            tables=sum(op.tables for op in work),
            in_tuple=host.in_tuple or host.name in PRODUCTS,
        )
