"""Which values a compiler gives a buffer.

XLA fuses elementwise work into its users, so that most values of a jaxpr are never stored. One rule: results of
reductions, contractions and opaque ops are buffers, and so are operands of contractions and opaque ops and what the
step returns; the elementwise values between are *virtual*: they are computed again wherever they are read, and keep
alive the buffers they are computed from. A value that a barrier covers is a buffer from there on (see `liveness.py`).
"""

from __future__ import annotations

from remat_opt.graph.graph import Graph, Kind

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
    return stored
