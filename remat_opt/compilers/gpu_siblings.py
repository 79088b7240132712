"""Which kernels XLA's GPU compiler makes one of: loops over one shape that read the same buffer
(`multi_output_fusion.cc`).

Neither may depend on the other. The one kernel runs when both could: what the earlier one made alone would have waited
in memory until the later one's operands were there.
"""

from __future__ import annotations

import dataclasses

from remat_opt.graph.dependencies import Dependencies
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.ordering import behind_operands

_NUMBER = 8  # bytes


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
