"""Which values XLA's CPU compiler gives a buffer: it fuses loops by other rules than those of `fusion.py`.

1. Results of reductions, contractions and opaque ops are buffers, and so is what these read: the CPU calls a library.
   (The product in a sum of products is the library's, so that it is the product's operands that are stored.)
2. Other elementwise values are computed in every loop that reads them, however many there are, unless they are dear:
   then they are a buffer wherever more than one kernel reads them.
3. A buffer with at most one operand of its size costs no more to compute from that operand than to read. Where a
   library reads it, too, it is stored for the library, and loops still compute it again. One with more is read, and so
   is what is read behind a barrier.
4. What has more than one operand of its size is a buffer, too, where one of its readers reads it a second time by way
   of something that is stored (`InstructionFusion::ComputeGloballyUnfusible`).
5. A loop computes a value once for all readers that read it at the same place, and again for each that does not, as
   slices do, up to 15 times. What is put together of pieces has code of its own for each piece, and is computed for one
   reader only (`FusionNodeIndexingEvaluation`).
"""

from __future__ import annotations

from collections.abc import Sequence

from remat_opt.graph.fusion import (
    MOVING,
    OF_PIECES,
    SPREADING,
    Fusion,
    held_by,
    merge,
    reads_buffers,
    stored_by_kind,
)
from remat_opt.graph.graph import Graph, Kind, Op

MOST_TIMES = 15  # that a value is computed in one loop
_SAME_SHAPE = frozenset({"rev", "transpose"})  # which that count takes for work at the same place


def fuse_loops(graph: Graph, elements: Sequence[int] | None = None) -> Fusion:
    """Merge virtual values into the kernels that read them, by the rules above.

    Args:
        graph: ops in an order in which they can run.
        elements: of each value, by which operands are compared with results: a mask is no smaller than what it chooses
            from. None for its bytes.
    """
    stored = stored_by_kind(graph)
    is_unary = [_is_unary(graph, elements or graph.sizes, op) for op in graph.ops]
    _store_what_is_read_twice(graph, stored, is_unary)
    copied: set[int] = set()
    loops = _Loops(graph)
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        if op.kind is not Kind.ELEMENTWISE or not op.outputs:
            loops.begin(index)
            continue
        is_stored = any(stored[value] for value in op.outputs)
        may_be_copied = op.repeatable and not op.dear and is_unary[index] and not op.changed_later
        if is_stored and not may_be_copied:
            loops.begin(index)
            continue
        users = [user for value in op.outputs for user in graph.users[value]]
        if is_stored:
            users = [user for user in users if not _reads_whole(graph, user, op.outputs)]
        if not loops.can_have(index, users):
            for value in op.outputs:
                stored[value] = True
            loops.begin(index)
            continue
        loops.add(index, users)
        if is_stored:
            copied.update(op.outputs)
            loops.begin(index)
    copied -= set(graph.outputs)
    return merge(graph, stored, frozenset(copied))


class _Loops:
    """Kernels by the last op of each, and how often they compute their ops."""

    def __init__(self, graph: Graph):
        self.graph = graph
        # For each op and each kernel that it is in the ops whose places it is computed at, and how often that is.
        self.places: list[dict[int, tuple[frozenset[int], int]]] = [{} for _ in graph.ops]
        self.members = [0] * len(graph.ops)

    def begin(self, index: int) -> None:
        """Let a kernel end with an op."""
        self.places[index][index] = frozenset([index]), 1
        self.members[index] += 1

    def can_have(self, index: int, users: Sequence[int]) -> bool:
        """Whether an op can be computed in all kernels of its users."""
        op, kernels = self.graph.ops[index], self._kernels_of(users)
        if op.dear and len(kernels) > 1:
            return False
        if op.name in SPREADING:
            return True
        uses = sum(len(self.places[user]) for value in op.outputs for user in self.graph.users[value])
        for kernel in kernels:
            _, times = self._places_in(kernel, users)
            again = op.name in OF_PIECES and self.members[kernel] > 1 and max(times, uses) > 1
            if times > MOST_TIMES or again:
                return False
        return True

    def add(self, index: int, users: Sequence[int]) -> None:
        """Compute an op in all kernels of its users."""
        for kernel in self._kernels_of(users):
            self.places[index][kernel] = self._places_in(kernel, users)
            self.members[kernel] += 1

    def _kernels_of(self, users: Sequence[int]) -> frozenset[int]:
        return frozenset().union(*(self.places[user] for user in users))

    def _places_in(self, kernel: int, users: Sequence[int]) -> tuple[frozenset[int], int]:
        """At the places of which ops, and how often, a kernel computes what some of its ops read."""
        found: set[int] = set()
        for user in users:
            if kernel in self.places[user]:
                is_moved = self.graph.ops[user].name in MOVING - _SAME_SHAPE
                found |= {user} if is_moved else self.places[user][kernel][0]
        return frozenset(found), sum(self.places[one][kernel][1] for one in found)


def _store_what_is_read_twice(graph: Graph, stored: list[bool], is_unary: Sequence[bool]) -> None:
    """Rule 4."""
    users = [{user for value in op.outputs for user in graph.users[value]} for op in graph.ops]
    is_fused = [
        op.kind is Kind.ELEMENTWISE and op.repeatable and not (op.dear and len(readers) > 1)
        for op, readers in zip(graph.ops, users, strict=True)
    ]
    wide = [fused and not unary and len(x) > 1 for fused, unary, x in zip(is_fused, is_unary, users, strict=True)]
    readers = dict.fromkeys(user for index, is_wide in enumerate(wide) if is_wide for user in users[index])
    bit = {reader: 1 << at for at, reader in enumerate(readers)}
    behind = [0] * len(graph.ops)  # the readers behind each op, as bits
    by_buffers = [0] * len(graph.ops)  # those of them that are behind it by way of a buffer
    for index in range(len(graph.ops) - 1, -1, -1):
        outputs = graph.ops[index].outputs
        for user in users[index]:
            reached = behind[user] | bit.get(user, 0)
            behind[index] |= reached
            is_read_whole = not is_fused[index] or _reads_whole(graph, user, outputs)
            by_buffers[index] |= reached if is_read_whole else by_buffers[user]
        if wide[index] and any(by_buffers[index] & bit[user] for user in users[index]):
            by_buffers[index] = behind[index]
            for value in outputs:
                stored[value] = True


def _reads_whole(graph: Graph, user: int, values: Sequence[int]) -> bool:
    """Whether an op reads values as buffers, from a library or behind a barrier."""
    return reads_buffers(graph.ops[user]) or not held_by(graph, graph.ops[user]).isdisjoint(values)


def _is_unary(graph: Graph, elements: Sequence[int], op: Op) -> bool:
    """Whether an op has at most one operand that is not smaller than its result, but for what is spread over that."""
    most = max((elements[value] for value in op.outputs), default=0)
    wide = [graph.producer[value] for value in op.inputs if elements[value] >= most]
    return sum(maker < 0 or graph.ops[maker].name not in SPREADING for maker in wide) <= 1
