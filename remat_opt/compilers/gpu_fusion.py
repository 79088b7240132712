"""Which values XLA's GPU compiler gives a buffer: each elementwise value is computed in all kernels that read it, or in
none.

XLA's `PriorityFusion` (`priority_fusion.cc`) fuses, one after the other, the value that saves the most time. The rules
of its cost model (`gpu_performance_model.cc`):

1. A kernel takes the time of its arithmetic and of its traffic, of which 95 % of the shorter is hidden in the longer,
   and the time of its start.
2. A fused value saves a start and its own kernel's time. Each reader does its arithmetic once more, and reads what that
   is made of, where it does not read it anyway, instead of the value.
3. A kernel of few blocks, as a reduction to few results, has a part of the multiprocessors and of the bandwidth only.
4. A kernel has a limited number of operands and results.

So small arrays are computed again where large ones are stored, and dear arithmetic (`tanh`) is done twice only for very
small ones.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from jax.extend.core import primitives as P

from remat_opt.graph.fusion import Fusion, merge, stored_by_kind
from remat_opt.graph.graph import Graph, Kind

MOST_BUFFERS = 96  # operands and results of a kernel
# Of an H100 and an H200: multiprocessors, the cycles that all their float32 units do in a second (twice the clock: a
# product and a sum in one), bytes a second that one block can move, bytes of both caches and how much faster they are.
CORES, _CYCLES, _BLOCK_BANDWIDTH = 132, 132 * 128 * 2 * 1.98e9, 32 * 1.98e9
_CACHES = ((132 * 256 * 2**10, 20.0), (50 * 2**20, 2.5))
_START, _HIDDEN = 1e-6, 0.95
_KERNELS = (Kind.ELEMENTWISE, Kind.REDUCTION)


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What a kernel does for one value.

    Attributes:
        cycles: of arithmetic.
        blocks: in which the kernel is divided where this is its result.
        uses: how often each element of an operand is read, or which part of it; once where nothing is said.
        used: which part of what memory gives is used, where neighbours in the result are none in the operand.
        within: the same where a concatenation makes the value, which transposes nothing by way of a tile of its own.
        is_view: whether all read the value as an array of another shape: as that of a product's matrix. Of those who
            read such a buffer in one kernel each reads it anew (`GetCommonUtilization`).
    """

    cycles: float
    blocks: float
    uses: Mapping[int, float] = dataclasses.field(default_factory=dict)
    used: float = 1.0
    within: float = 1.0
    is_view: bool = False


def fuse_by_cost(graph: Graph, work: Mapping[int, Work], bandwidth: float) -> Fusion:
    """Merge values into the kernels that read them, by the rules above.

    Args:
        graph: ops as they are written.
        work: by the value that is made; of others it is that of a copy.
        bandwidth: bytes per second.
    """
    kernels = _Kernels(graph, work, bandwidth)
    return merge(graph, kernels.stored(), frozenset(kernels.copied))


class _Kernels:
    """The kernels, one for each op at first, and the queue of the values that are to be fused."""

    def __init__(self, graph: Graph, work: Mapping[int, Work], bandwidth: float):
        self.graph = graph
        self.bandwidth = bandwidth
        self.sizes: Sequence[int] = graph.sizes
        self.is_stored = stored_by_kind(graph)
        self.returned = {*graph.inputs, *graph.outputs}
        self.viewed: set[int] = set()
        self.reads: list[dict[int, float]] = []
        self.cycles: list[float] = []
        self.blocks: list[float] = []
        self.written: list[int] = []
        self.used: list[float] = []
        self.within: list[float] = []
        for op in graph.ops:
            made = sum(graph.sizes[value] for value in op.outputs)
            own = work.get(op.outputs[0]) if op.outputs else None
            own = own or Work(made / 4, made / 2048)
            self.reads.append({value: own.uses.get(value, 1.0) for value in op.inputs})
            self.cycles.append(own.cycles)
            self.blocks.append(max(own.blocks, 1.0))
            self.written.append(made)
            self.used.append(own.used)
            self.within.append(own.within)
        self.by_rows = [bool(op.rows_of) for op in graph.ops]  # kernels that reduce rows, too (`gpu_rows.py`)
        self.takes = [op.name == P.gather_p.name for op in graph.ops]  # kernels that take elements from anywhere
        self.users: list[set[int]] = [set(users) for users in graph.users]
        self.viewed_by_all = {value for value, own in work.items() if own.is_view}
        self.copied: set[int] = set()  # buffers that only products read: kernels compute them again
        self.gains: dict[int, dict[int, float]] = {}  # by op and reader: seconds saved in that reader
        self.total: dict[int, float] = {}
        self.as_it_is: dict[int, float] = {}  # of a kernel, until something is fused into it
        self.queue: list[tuple[float, int]] = []

    def stored(self) -> list[bool]:
        """For each value whether it is a buffer."""
        self.viewed = {op for op in range(len(self.graph.ops)) if self.is_viewed(op)}
        for op in range(len(self.graph.ops)):
            if self.may_fuse(op):
                self.gains[op] = {user: self.gain(op, user) for user in self.readers(op)}
                self.weigh(op)
        while self.queue:
            lost, negative = heapq.heappop(self.queue)
            if self.total.get(-negative) == -lost:
                self.fuse(-negative)
        for op in self.gains.keys() - self.viewed:
            self.is_stored[self.made(op)] = True
        return self.is_stored

    def is_viewed(self, index: int) -> bool:
        """Whether products read a value, all in other shapes, and kernels, too: these may still compute it again."""
        op = self.graph.ops[index]
        if op.kind is not Kind.ELEMENTWISE or len(op.outputs) != 1 or not op.repeatable:
            return False
        readers = [self.graph.ops[user] for user in self.users[op.outputs[0]]]
        others = [reader for reader in readers if reader.kind not in _KERNELS]
        return (
            0 < len(others) < len(readers)
            and op.outputs[0] not in self.returned
            and all(reader.of_views for reader in others)
        )

    def readers(self, op: int) -> set[int]:
        """The kernels that read an op's value."""
        users = self.users[self.made(op)]
        return {user for user in users if self.graph.ops[user].kind in _KERNELS} if op in self.viewed else users

    def made(self, op: int) -> int:
        return self.graph.ops[op].outputs[0]

    def may_fuse(self, index: int) -> bool:
        op = self.graph.ops[index]
        if op.kind is not Kind.ELEMENTWISE or len(op.outputs) != 1 or not op.repeatable or op.changed_later:
            for value in op.outputs:
                self.is_stored[value] = True
            return False
        return index in self.viewed or (not self.is_stored[op.outputs[0]] and bool(self.users[op.outputs[0]]))

    def seconds(self, cycles: float, reads: Mapping[int, float], blocks: float, written: int, used: float) -> float:
        """Of a kernel, without its start."""
        fast = min(self.bandwidth * used, blocks * _BLOCK_BANDWIDTH)
        moved = 0.0
        for value, uses in reads.items():
            size = self.sizes[value]
            if uses <= 1:
                moved += uses * size / fast
            else:
                cached = self.bandwidth * next((speed for limit, speed in _CACHES if size < limit), 1.0)
                moved += size / fast + (uses - 1) * size / min(cached, blocks * _BLOCK_BANDWIDTH)
        moved += written / self.bandwidth
        computed = cycles / (_CYCLES * min(1.0, blocks / CORES))
        return computed + moved - _HIDDEN * min(computed, moved)

    def alone(self, op: int) -> float:
        """Seconds of a kernel as it is, which all that might be fused into it is compared with."""
        if op not in self.as_it_is:
            own = self.seconds(self.cycles[op], self.reads[op], self.blocks[op], self.written[op], self.used[op])
            self.as_it_is[op] = own
        return self.as_it_is[op]

    def together(self, op: int, user: int) -> dict[int, float]:
        """What a reader reads when it computes an op's value itself."""
        reads = dict(self.reads[user])
        uses = reads.pop(self.made(op))
        for value, own in self.reads[op].items():
            known = reads.get(value, 0.0)
            reads[value] = known + uses * own if value in self.viewed_by_all else max(known, uses * own)
        return reads

    def used_together(self, op: int, user: int) -> float:
        is_joined = self.graph.ops[user].name == P.concatenate_p.name
        return min(self.used[op], self.used[user], self.within[op] if is_joined else 1.0)

    def gain(self, op: int, user: int) -> float:
        """Seconds that a reader saves; minus infinity where it would have too many operands, or read rows and take
        elements from anywhere."""
        if (self.by_rows[op] and self.takes[user]) or (self.takes[op] and self.by_rows[user]):
            return float("-inf")
        reads = self.together(op, user)
        if len(reads) + len(self.graph.ops[user].outputs) > max(MOST_BUFFERS, len(self.reads[user]) + 1):
            return float("-inf")
        cycles = self.cycles[user] + self.reads[user][self.made(op)] * self.cycles[op]
        used = self.used_together(op, user)
        return self.alone(user) - self.seconds(cycles, reads, self.blocks[user], self.written[user], used)

    def weigh(self, op: int) -> None:
        """Queue an op by what is saved."""
        total = _START + self.alone(op) + sum(self.gains[op].values())
        if op in self.viewed:
            again = self.seconds(self.cycles[op], self.reads[op], self.blocks[op], 0, self.used[op])
            total -= again * (len(self.users[self.made(op)]) - len(self.gains[op]))
        self.total[op] = total
        if total >= 0:
            heapq.heappush(self.queue, (-total, -op))

    def fuse(self, op: int) -> None:
        """Compute an op's value in all kernels that read it."""
        value = self.made(op)
        changed = set()
        readers = self.readers(op)
        for user in readers:
            self.as_it_is.pop(user, None)
            self.cycles[user] += self.reads[user][value] * self.cycles[op]
            self.reads[user] = self.together(op, user)
            self.used[user] = self.used_together(op, user)
            self.within[user] = min(self.within[op], self.within[user])
            self.by_rows[user] |= self.by_rows[op]
            self.takes[user] |= self.takes[op]
        for operand in self.reads[op]:
            if op not in self.viewed:
                self.users[operand].discard(op)
            self.users[operand] |= readers
            maker = self.graph.producer[operand]
            if maker in self.gains and op not in self.viewed:
                self.gains[maker].pop(op, None)
                changed.add(maker)
        if op in self.viewed:
            self.copied.add(value)
            self.users[value] = self.users[value] - readers
        for user in readers:
            for operand in self.reads[user]:
                maker = self.graph.producer[operand]
                if maker in self.gains and maker != op:
                    self.gains[maker][user] = self.gain(maker, user)
                    changed.add(maker)
            if user in self.gains:
                self.gains[user] = {reader: self.gain(user, reader) for reader in self.readers(user)}
                changed.add(user)
        del self.gains[op], self.total[op]
        for one in sorted(changed):
            self.weigh(one)
