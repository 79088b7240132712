"""Which kernels XLA's GPU compiler makes one of: loops over one shape that read the same buffer
(`multi_output_fusion.cc`).

Neither may depend on the other. The one kernel runs when both could: what the earlier one made alone would have waited
in memory until the later one's operands were there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

from remat_opt.graph.dependencies import Dependencies
from remat_opt.graph.fusion import held_by
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.ordering import behind_operands, post_order
from remat_opt.program.primitives import named

_NUMBER = 8  # bytes
_MOST_BY_COLUMNS = 2
_REDUCTIONS = frozenset(primitive.name for primitive in named("reduce_sum reduce_max reduce_min reduce_prod"))


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


def beside_reductions(graph: Graph, elements: Sequence[int], by_columns: Container[int]) -> Graph:
    """A graph in which loops write over nothing that a reduction reads which is done in their kernel: it reads at other
    places than they write (`buffer_sharing.cc`).

    Such are reductions of what a loop makes, and then those that read what it reads, if neither depends on the other.
    All of a kernel sum along rows or all along columns; of the latter, for which it needs memory that the GPU has
    little of, a kernel does two (`FusionFitsInBudget`).

    Args:
        graph: of kernels, each behind what it reads.
        elements: of each value.
        by_columns: results of reductions along others than the last dimension.
    """
    place = {op: at for at, op in enumerate(post_order(graph))}
    reductions = [op.name in _REDUCTIONS and len(op.outputs) == 1 for op in graph.ops]
    beside: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        size = _loop_of(graph, op)
        read = [value for value in op.inputs if graph.sizes[value] > _NUMBER]
        others = {user for value in read for user in graph.users[value] if reductions[user]}
        if others and any(graph.sizes[value] == size for value in read):
            (made,) = op.outputs
            own = (
                user for user in graph.users[made] if reductions[user] and made not in held_by(graph, graph.ops[user])
            )
            alike = dict.fromkeys((*own, *sorted(others, key=place.__getitem__)))
            loop = elements[made]
            beside[index] = [user for user in alike if max(elements[x] for x in graph.ops[user].inputs) == loop]
    asked = {*beside, *(user for found in beside.values() for user in found)}
    before = Dependencies(((op.inputs, op.outputs) for op in graph.ops), asked)
    ops = list(graph.ops)
    for index, found in beside.items():
        made = graph.ops[index].outputs[0]
        free = [user for user in found if made in graph.ops[user].inputs or before.are_apart(index, user)]
        along = [graph.ops[user].outputs[0] in by_columns for user in free]
        joined = [user for user, columns in zip(free, along, strict=True) if columns == along[0]]
        taken = {
            value for user in joined[: _MOST_BY_COLUMNS if along[:1] == [True] else None] for value in ops[user].inputs
        }
        rows = dict.fromkeys((*ops[index].rows_of, *(value for value in ops[index].inputs if value in taken)))
        ops[index] = dataclasses.replace(ops[index], rows_of=tuple(rows))
    return dataclasses.replace(graph, ops=tuple(ops))


def _loop_of(graph: Graph, op: Op) -> int:
    """Bytes of the one result of a kernel that is a loop; 0 for others."""
    is_loop = op.kind is Kind.ELEMENTWISE and len(op.outputs) == 1 and not op.changed_later and not op.of_views
    return graph.sizes[op.outputs[0]] if is_loop else 0


def _with_joined(graph: Graph, joined: dict[int, int]) -> Graph:
    """A graph in which some kernels are parts of others, in an order in which they can run."""
    ops = list(graph.ops)
    for kernel, whole in sorted(joined.items()):
        one, two = ops[kernel], ops[whole]
        ops[whole] = dataclasses.replace(
            two,
            inputs=tuple(dict.fromkeys((*one.inputs, *two.inputs))),
            outputs=(*one.outputs, *two.outputs),
            flops=one.flops + two.flops,
            workspace=one.workspace + two.workspace,
        )
    return dataclasses.replace(graph, ops=tuple(ops[index] for index in behind_operands(ops, joined)))
