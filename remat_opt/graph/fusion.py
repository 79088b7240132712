"""Which values a compiler gives a buffer.

XLA fuses elementwise work into its users, so that most values of a jaxpr are never stored. The rules:

1. Results of reductions, contractions and opaque ops are buffers, and so are operands of contractions and opaque ops
   and what the step returns.
2. The elementwise values between are *virtual*: they are computed again wherever they are read, and keep alive the
   buffers they are computed from, their *sources*.
3. A virtual value is a buffer after all where fusing it would move more bytes than storing it. With c readers and
   sources of R bytes, fusing reads c·R; storing a value of S bytes reads R, writes S, and reads c·S. A compiler's fusion
   weighs the same two (XLA's `PriorityFusion` by a cost model), and limits how many operands a kernel has.

A value that a barrier covers is a buffer from there on (see `liveness.py`).
"""

from __future__ import annotations

from remat_opt.graph.graph import Graph, Kind

MOST_SOURCES = 16
_STORED_OPERANDS = (Kind.CONTRACTION, Kind.OPAQUE)


def materialised(graph: Graph) -> list[bool]:
    """For each value, whether it is a buffer in the program as it was written."""
    stored = [False] * len(graph.sizes)
    for value in (*graph.inputs, *graph.outputs):
        stored[value] = True
    for op in graph.ops:
        if op.kind is not Kind.ELEMENTWISE:
            for value in op.outputs:
                stored[value] = True
        if op.kind in _STORED_OPERANDS:
            for value in op.inputs:
                stored[value] = True
    _store_what_is_dear_to_fuse(graph, stored)
    return stored


def _store_what_is_dear_to_fuse(graph: Graph, stored: list[bool]) -> None:
    sources: dict[int, frozenset[int]] = {}
    for op in graph.ops:
        if op.kind is not Kind.ELEMENTWISE:
            continue
        read = frozenset().union(*(sources.get(value, (value,)) for value in op.inputs))
        for value in op.outputs:
            if stored[value]:
                continue
            readers, size = len(graph.users[value]), graph.sizes[value]
            moved = sum(graph.sizes[source] for source in read)
            if readers * moved > moved + (1 + readers) * size or len(read) > MOST_SOURCES:
                stored[value] = True
            else:
                sources[value] = read
