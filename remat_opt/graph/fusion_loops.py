"""Which values XLA's CPU compiler gives a buffer: it fuses loops by other rules than those of `fusion.py`.

1. Results of reductions, contractions and opaque ops are buffers, and so is what these read: the CPU calls a library.
   (The product in a sum of products is the library's, so that it is the product's operands that are stored.)
2. Other elementwise values are computed in every loop that reads them, however many there are, unless they are dear:
   then they are a buffer wherever more than one kernel reads them.
3. A buffer with at most one operand of its size costs no more to compute from that operand than to read. Where a
   library reads it, too, it is stored for the library, and loops still compute it again. One with more is read, and so
   is what is read behind a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat_opt.graph.fusion import Fusion, held_by, merge, reads_buffers, stored_by_kind
from remat_opt.graph.graph import Graph, Kind


def fuse_loops(graph: Graph) -> Fusion:
    """Merge virtual values into the kernels that read them, by the rules above."""
    stored = stored_by_kind(graph)
    copied: set[int] = set()
    kernels: list[frozenset[int]] = [frozenset()] * len(graph.ops)  # those in which each op is computed
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        users = [user for value in op.outputs for user in graph.users[value]]
        loops = frozenset().union(*(kernels[user] for user in users)) if users else frozenset()
        if op.kind is not Kind.ELEMENTWISE or not op.outputs:
            kernels[index] = frozenset([index])
            continue
        is_stored = any(stored[value] for value in op.outputs)
        if not is_stored and op.dear and len(loops) > 1:
            for value in op.outputs:
                stored[value] = True
            is_stored = True
        elif is_stored and op.repeatable and not op.dear and _is_unary(graph, index):
            copied.update(op.outputs)
            loops = [user for user in users if not _reads_whole(graph, user, op.outputs)]
            kernels[index] = frozenset([index]).union(*(kernels[user] for user in loops))
            continue
        kernels[index] = frozenset([index]) if is_stored else loops
    copied -= set(graph.outputs)
    return merge(graph, stored, frozenset(copied))


def _reads_whole(graph: Graph, user: int, values: Sequence[int]) -> bool:
    """Whether an op reads values as buffers, from a library or behind a barrier."""
    return reads_buffers(graph.ops[user]) or not held_by(graph, graph.ops[user]).isdisjoint(values)


def _is_unary(graph: Graph, index: int) -> bool:
    """Whether an op has at most one operand that is not smaller than its result."""
    op = graph.ops[index]
    size = max((graph.sizes[value] for value in op.outputs), default=0)
    return sum(graph.sizes[value] >= size for value in op.inputs) <= 1
