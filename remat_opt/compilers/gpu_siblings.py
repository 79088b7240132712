"""Which kernels XLA's GPU compiler makes one of: loops over one shape that read the same buffer
(`multi_output_fusion.cc`).

Neither may depend on the other. The one kernel runs when both could: what the earlier one made alone would have waited
in memory until the later one's operands were there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from remat_opt.graph.dependencies import Dependencies
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.ordering import behind_operands

_NUMBER = 8  # bytes
_MOST_BY_COLUMNS = 2


def join_siblings(graph: Graph) -> Graph:
    """A graph of kernels in which siblings are one.

    Args:
        graph: of kernels, each behind what it reads.
    """
    shapes = [_loop_of(graph, op) for op in graph.ops]
    families: list[list[int]] = []
    for value in reversed([value for op in graph.ops for value in op.outputs] + list(graph.inputs)):
        readers = [user for user in graph.users[value] if _NUMBER < graph.sizes[value] <= shapes[user]]
        if len(readers) > 1:
            families.append(readers)
    candidates = {kernel for family in families for kernel in family}
    before = Dependencies(((op.inputs, op.outputs) for op in graph.ops), candidates)
    joined: dict[int, int] = {}  # by kernel the one that it is a part of

    def whole(kernel: int) -> int:
        while kernel in joined:
            kernel = joined[kernel]
        return kernel

    for family in families:
        for at, first in enumerate(family):
            for other in family[at + 1 :]:
                one, two = sorted((whole(first), whole(other)))
                if one != two and shapes[one] == shapes[two] and before.are_apart(one, two):
                    joined[one] = two
                    before.join((one, two))
    return _with_joined(graph, {kernel: whole(kernel) for kernel in joined}) if joined else graph


class Reduced(NamedTuple):
    """What is reduced.

    Attributes:
        operand: the value; None for what is read behind a barrier.
        elements: of that.
        by_columns: along others than its last dimension.
    """

    operand: int | None
    elements: int
    by_columns: bool


def beside_reductions(graph: Graph, elements: Sequence[int], reduced: Mapping[int, Reduced]) -> Graph:
    """A graph in which loops write over nothing that a reduction reads which is done in their kernel: it reads at other
    places than they write (`buffer_sharing.cc`).

    Such are reductions of what a loop makes, and then those that read what it reads, the first in the program first, if
    neither depends on the other. All of a kernel sum along rows or all along columns; of the latter, for which it needs
    memory that the GPU has little of, a kernel does two (`FusionFitsInBudget`).

    Args:
        graph: of kernels in the program's order.
        elements: of each value.
        reduced: by their results what reductions reduce.
    """
    beside = {index: found for index, op in enumerate(graph.ops) if (found := _beside(graph, op, elements, reduced))}
    asked = {*beside, *(user for found in beside.values() for user in found)}
    before = Dependencies(((op.inputs, op.outputs) for op in graph.ops), asked)
    ops = list(graph.ops)
    for index, found in beside.items():
        own = {user for user in found if _is_of(graph, user, index, reduced)}
        free = [user for user in found if user in own or before.are_apart(index, user)]
        by_columns = [reduced[graph.ops[user].outputs[0]].by_columns for user in free]
        alike = [user for user, columns in zip(free, by_columns, strict=True) if columns == by_columns[0]]
        joined = alike[:_MOST_BY_COLUMNS] if by_columns and by_columns[0] else alike
        read = {value for user in joined if user not in own for value in ops[user].inputs}
        rows = dict.fromkeys((*ops[index].rows_of, *(value for value in ops[index].inputs if value in read)))
        ops[index] = ops[index].but(rows_of=tuple(rows))
    return dataclasses.replace(graph, ops=tuple(ops))


def _beside(graph: Graph, op: Op, elements: Sequence[int], reduced: Mapping[int, Reduced]) -> list[int]:
    """Reductions that may be done in the kernel of a loop that could write over something."""
    size = _loop_of(graph, op)
    read = [value for value in op.inputs if graph.sizes[value] > _NUMBER]
    if not any(graph.sizes[value] == size for value in read):
        return []
    (made,) = op.outputs
    users = sorted({user for value in (made, *read) for user in graph.users[value]})
    found = []
    for user in users:
        outputs = graph.ops[user].outputs
        if len(outputs) == 1 and outputs[0] in reduced and reduced[outputs[0]].elements == elements[made]:
            found.append(user)
    return sorted(found, key=lambda user: reduced[graph.ops[user].outputs[0]].operand != made)


def _is_of(graph: Graph, user: int, index: int, reduced: Mapping[int, Reduced]) -> bool:
    """Whether an op reduces what another one makes."""
    return reduced[graph.ops[user].outputs[0]].operand in graph.ops[index].outputs


def _loop_of(graph: Graph, op: Op) -> int:
    """Bytes of the one result of a kernel that is a loop; 0 for others."""
    is_loop = op.kind is Kind.ELEMENTWISE and len(op.outputs) == 1 and not op.changed_later and not op.of_views
    return graph.sizes[op.outputs[0]] if is_loop else 0


def _with_joined(graph: Graph, joined: dict[int, int]) -> Graph:
    """A graph in which some kernels are parts of others, in an order in which they can run."""
    ops = list(graph.ops)
    for kernel, whole in sorted(joined.items()):
        one, two = ops[kernel], ops[whole]
        ops[whole] = two.but(
            inputs=tuple(dict.fromkeys((*one.inputs, *two.inputs))),
            outputs=(*one.outputs, *two.outputs),
            flops=one.flops + two.flops,
            workspace=one.workspace + two.workspace,
        )
    return dataclasses.replace(graph, ops=tuple(ops[index] for index in behind_operands(ops, joined)))
