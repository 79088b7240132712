"""Which kernels XLA's GPU compiler makes one of: loops over one shape that read the same buffer
(`multi_output_fusion.cc`).

Neither may depend on the other. The one kernel runs when both could: what the earlier one made alone would have waited
in memory until the later one's operands were there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat_opt.graph.graph import Graph, Kind, Op

_NUMBER = 8  # bytes


def join_siblings(graph: Graph) -> Graph:
    """A graph of kernels in which siblings are one.

    Args:
        graph: of kernels, each behind what it reads.
    """
    before = _before(graph)
    joined: dict[int, int] = {}  # by kernel the one that it is a part of

    def whole(kernel: int) -> int:
        while kernel in joined:
            kernel = joined[kernel]
        return kernel

    shapes = [_loop_of(graph, op) for op in graph.ops]
    for value in reversed([value for op in graph.ops for value in op.outputs] + list(graph.inputs)):
        readers = [user for user in graph.users[value] if 0 < graph.sizes[value] <= shapes[user]]
        if graph.sizes[value] <= _NUMBER:
            continue
        for at, first in enumerate(readers):
            for other in readers[at + 1 :]:
                one, two = sorted((whole(first), whole(other)))
                if one == two or shapes[one] != shapes[two] or _reaches(before, one, two) or _reaches(before, two, one):
                    continue
                joined[one] = two
                _join(before, one, two)
    return _with_joined(graph, {kernel: whole(kernel) for kernel in joined}) if joined else graph


def _loop_of(graph: Graph, op: Op) -> int:
    """Bytes of the one result of a kernel that is a loop; 0 for others."""
    is_loop = op.kind is Kind.ELEMENTWISE and len(op.outputs) == 1 and not op.changed_later and not op.of_views
    return graph.sizes[op.outputs[0]] if is_loop else 0


def _before(graph: Graph) -> list[int]:
    """For each kernel those that it depends on, as bits."""
    before: list[int] = []
    for op in graph.ops:
        bits = 0
        for maker in {graph.producer[value] for value in op.inputs} - {-1}:
            bits |= before[maker] | 1 << maker
        before.append(bits)
    return before


def _reaches(before: Sequence[int], one: int, two: int) -> bool:
    return bool(before[two] >> one & 1)


def _join(before: list[int], one: int, two: int) -> None:
    """Who depends on one of two depends on both, and on all that they depend on."""
    own = 1 << one | 1 << two
    above = before[one] | before[two]
    for index, bits in enumerate(before):
        if bits & own:
            before[index] = bits | above | own
    before[one] = before[two] = above


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
    maker = {value: index for index, op in enumerate(ops) if index not in joined for value in op.outputs}
    done = set(joined)
    order: list[int] = []
    for root in range(len(ops)):
        stack = [root]
        while stack:
            index = stack[-1]
            missing = [maker[x] for x in ops[index].inputs if x in maker and maker[x] not in done]
            if missing and index not in done:
                stack += missing
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                order.append(index)
    return dataclasses.replace(graph, ops=tuple(ops[index] for index in order))
