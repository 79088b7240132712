"""What is particular about a TPU: tiled layouts, narrow operands of products, and memory on the chip.

1. Arrays are stored in tiles (`graph/tiles.py`).
2. The matrix units multiply bfloat16. A float32 value that only products read is stored as bfloat16
   (`tpu_precision.py`), and elementwise work on a product's result is done before that is stored (`tpu_fusion.py`).
3. A TensorCore has a vector memory of its own, in which the compiler places whole buffers, those first from which
   kernels gain most (XLA's `memory_space_assignment`), each in one gap for all of its life, but for those that nobody
   reads for long. What is there is no temporary memory of the device. What is not, arguments too, takes room there
   while kernels read it.
4. Each instruction with several results has a table of their addresses in the device's memory, and so has each copy to
   or from the chip; a large buffer is fetched in slices with tables of their own. What takes a donated argument's place
   is made on the chip, as the argument was copied there, and copied to its place.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Collection, Sequence

import numpy as np

from remat_opt.compilers.packing import OF_BODIES
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import Lives, simulate
from remat_opt.graph.schedule import save_everything

# 128 MiB on TPU v5e and v6e, of which 16 MiB are kept for the kernels' own scratch (XLA's `scoped_vmem_limit`).
ON_CHIP = 112 * 2**20
TABLE = 16 * 2**10
# A copy of a mebibyte and more is made in four slices, and each of them has two tables.
SLICED_FROM = 2**20
TABLES_OF_SLICES = 8
# A buffer that nobody reads for longer than all that is on the chip could be copied so many times is sent away (XLA's
# `max_overlap_to_mem_size_async_copy_ratio`, which is 8 of its own estimates of kernels' times; these are longer than
# the roofline's: in dumps of WideResNet-28-2 and DenseNet-121 what waits for 0.85 ms of ours stays, for 1.07 does not).
COPIES_UNREAD = 7


class Chip(enum.Enum):
    """What may be on the chip for all of its life.

    What loops that were written again make waits for the whole time between them, too long to stay; and arguments, the
    weights of all steps, are fetched before anything else finds its gap (in a dump of the scanned GPT 70 of 112 MiB are
    weights, momentum and updates while the logits live).
    """

    WHATEVER_FITS = enum.auto()
    NOT_WHAT_LOOPS_MAKE = enum.auto()


def on_chip(
    graph: Graph,
    accumulated: frozenset[int] = frozenset(),
    *,
    rates: Rates,
    capacity: int = ON_CHIP,
    chip: Chip = Chip.WHATEVER_FITS,
) -> Graph:
    """The graph without the buffers that are on the chip for all of their lives, and with the tables.

    Args:
        graph: kernels in the order in which they run.
        accumulated: results of reductions that are summed up from tile to tile.
        rates: FLOP/s and bytes/s of the target.
        capacity: bytes on the chip.
        chip: what may be there.
    """
    if not graph.ops:
        return graph
    lives = simulate(graph, save_everything(graph)).lives
    clock = _Clock(graph, capacity, rates.bandwidth)
    kept = _kept(graph, lives, rates, capacity, clock, chip)
    tables = _tables(graph, accumulated) + _tables_of_copies(graph, lives, kept, capacity, clock)
    sizes = list(graph.sizes)
    for value in lives.value[kept].tolist():
        sizes[value] = 0
    sizes.append(TABLE * int(tables))
    listed = len(sizes) - 1
    first, last = Op((), (listed,), name="tables"), Op((listed,), (), name="tables")
    return dataclasses.replace(graph, sizes=tuple(sizes), ops=(first, *graph.ops, last))


def _kept(graph: Graph, lives: Lives, rates: Rates, capacity: int, clock: _Clock, allowed: Chip) -> np.ndarray:
    """Indices of the buffers that are on the chip for all of their lives.

    Buffers come in the order of what they gain there. What finds no gap for all of its life, or is an argument, lies in
    the device's memory, and takes room on the chip while kernels read it: from one to the next that comes soon.
    """
    chip = _Chip(capacity)
    arguments = len(graph.inputs)
    sizes = lives.size.copy()
    sizes[:arguments] = graph.size_array[lives.value[:arguments]]  # no temporary memory, but fetched
    gains = gains_on_chip(graph, rates)[lives.value] / np.sqrt(np.maximum(sizes, 1))
    outside: Collection[int] = ()
    if allowed is Chip.NOT_WHAT_LOOPS_MAKE:
        outside = {value for op in graph.ops if op.name in OF_BODIES for value in op.outputs}
        gains[:arguments] = np.inf
    unread = clock.longest_unread(lives)
    kept: list[int] = []
    for index in np.lexsort((lives.birth - lives.death, -sizes, -gains)).tolist():
        size, birth = int(sizes[index]), int(lives.birth[index])
        if not 0 < size <= capacity or lives.value[index] in outside:
            continue
        if index >= arguments:
            if unread[index] <= clock.patience and chip.takes(size, birth, int(lives.death[index])):
                kept.append(index)
                continue
            chip.takes(size, birth, birth)
        reads = np.unique(lives.reads[lives.reads_start[index] : lives.reads_start[index + 1]]).tolist()
        _fetch(chip, clock, size, reads, birth + 1 if index >= arguments else 0)
    return np.array(kept, dtype=np.int64)


def _fetch(chip: _Chip, clock: _Clock, size: int, reads: Sequence[int], there_from: int) -> None:
    """Take room for a buffer that kernels read: for all that come soon after each other at once, else for each."""
    together: list[list[int]] = []
    for read in reads:
        if together and clock.between(together[-1][-1], read) <= clock.patience:
            together[-1].append(read)
        else:
            together.append([read])

    def is_fetched(first: int, last: int) -> bool:
        begin = max(clock.begin_of_copy(size, first), there_from)
        return begin <= first and chip.takes(size, begin, last)

    for group in together:
        if not is_fetched(group[0], group[-1]):
            for read in group:
                is_fetched(read, read)


def gains_on_chip(graph: Graph, rates: Rates) -> np.ndarray:
    """For each value the seconds that kernels gain by having it on the chip, or how far the nearest to gaining of them
    is from being bound by memory, negative (XLA's `cost_analysis.cc`, `GetMemoryBoundedness`)."""
    gains: dict[int, float] = {}
    for op in graph.ops:
        if op.kind is Kind.BARRIER:
            continue
        moved = sum(graph.sizes[value] for value in (*op.inputs, *op.outputs)) / rates.bandwidth
        computed = op.flops / rates.matrix_rate("float32") if op.kind is Kind.PRODUCT else 0.0
        # What a loop's body or a branch reads, XLA counts there.
        for value in op.outputs if op.name in OF_BODIES else (*op.inputs, *op.outputs):
            gain = graph.sizes[value] / rates.bandwidth if moved > computed else moved - computed
            before = gains.get(value, -math.inf)
            gains[value] = before + gain if before > 0 and gain > 0 else max(before, gain)
    return np.array([gains.get(value, 0.0) for value in range(len(graph.sizes))])


class _Chip:
    """What lies where on the chip, and when."""

    def __init__(self, capacity: int):
        """
        Args:
            capacity: in bytes.
        """
        self.capacity = capacity
        self.count = 0
        self.rows = np.zeros((64, 4), dtype=np.int64)  # first and last kernel, offset and bytes

    def takes(self, size: int, first: int, last: int) -> bool:
        """Whether there is a gap from one kernel to another, which is taken then: the smallest."""
        rows = self.rows[: self.count]
        beside = rows[(rows[:, 0] <= last) & (first <= rows[:, 1])]
        beside = beside[np.argsort(beside[:, 2], kind="stable")]
        ends = np.maximum.accumulate(np.concatenate([[0], beside[:, 2] + beside[:, 3]]))
        gaps = np.concatenate([beside[:, 2], [self.capacity]]) - ends
        fitting = np.flatnonzero(gaps >= size)
        if not len(fitting):
            return False
        if self.count == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows[self.count] = first, last, ends[fitting[gaps[fitting].argmin()]], size
        self.count += 1
        return True


class _Clock:
    """When kernels run, by the roofline."""

    def __init__(self, graph: Graph, capacity: int, bandwidth: float):
        """
        Args:
            graph: kernels in the order in which they run.
            capacity: bytes on the chip.
            bandwidth: bytes/s of the device's memory.
        """
        self.bandwidth = bandwidth
        self.patience = COPIES_UNREAD * capacity / bandwidth  # seconds
        self.begins = np.cumsum([0.0, *(op.seconds for op in graph.ops), 0.0])

    def begin_of_copy(self, size: int, read: int) -> int:
        """The last kernel with which a copy may begin that another one reads; -1 where there is no time for it."""
        latest = self.begins[read] - size / self.bandwidth
        return min(int(np.searchsorted(self.begins, latest, side="right")), read) - 1

    def between(self, one: int | np.ndarray, other: int | np.ndarray) -> np.ndarray:
        """Seconds from the end of one kernel to the beginning of another."""
        return self.begins[other] - self.begins[np.minimum(one + 1, other)]

    def longest_unread(self, lives: Lives) -> np.ndarray:
        """For each buffer the seconds for which it waits longest for a reader."""
        longest = np.zeros(len(lives))
        reader = np.repeat(np.arange(len(lives)), np.diff(lives.reads_start))
        before = np.concatenate([[0], lives.reads[:-1]])
        first = np.zeros(len(reader), dtype=bool)
        first[lives.reads_start[:-1][np.diff(lives.reads_start) > 0]] = True
        before = np.where(first, lives.birth[reader], before)
        np.maximum.at(longest, reader, self.between(before, lives.reads))
        return longest


def _tables_of_copies(graph: Graph, lives: Lives, kept: np.ndarray, capacity: int, clock: _Clock) -> int:
    """Tables of the copies of what waits in the device's memory, arguments too: each is fetched for the kernel that
    reads it, a large one in slices, and stays for the next one, where there is room and that comes soon. What is made
    on the chip is copied out once.

    Args:
        graph: kernels in the order in which they run.
        lives: of all buffers.
        kept: indices of those that are on the chip for all of their lives.
        capacity: bytes on the chip.
        clock: when the kernels run.
    """
    sizes, arguments = lives.size.copy(), len(graph.inputs)
    sizes[:arguments] = graph.size_array[lives.value[:arguments]]  # which are no temporary memory, but are fetched
    change = np.zeros(int(lives.death.max(initial=0)) + 2, dtype=np.int64)
    np.add.at(change, lives.birth[kept], lives.size[kept])
    np.add.at(change, lives.death[kept] + 1, -lives.size[kept])
    room = capacity - np.cumsum(change)
    waiting = np.setdiff1d(np.flatnonzero((sizes > 0) & (sizes <= capacity)), kept)
    tables = 0
    for index in waiting[np.argsort(sizes[waiting], kind="stable")].tolist():
        size, free_from = int(sizes[index]), 0
        reads = np.unique(lives.reads[lives.reads_start[index] : lives.reads_start[index + 1]]).tolist()
        if index >= arguments and room[lives.birth[index]] >= size:
            tables += 1
            free_from = int(lives.birth[index]) + 1
            room[free_from - 1] -= size
        is_there = free_from > 0
        for read in reads:
            stays = is_there and clock.between(free_from - 1, read) <= clock.patience
            if not stays or room[free_from : read + 1].min(initial=capacity) < size:
                begin = clock.begin_of_copy(size, read)
                free_from = max(begin, free_from)
                is_there = begin >= 0 and room[free_from : read + 1].min(initial=capacity) >= size
                tables += is_there * (TABLES_OF_SLICES if size >= SLICED_FROM else 1)
            if is_there:
                room[free_from : read + 1] -= size
                free_from = read + 1
    return tables


def _tables(graph: Graph, accumulated: frozenset[int]) -> int:
    """Copies of what takes an argument's place from the chip, updates of several arrays by one
    gradient, and reductions that the kernel does beside another result (what is reduced once more is done with the
    first)."""
    copied = sum(graph.producer[value] >= 0 for _, value in graph.aliases)
    outputs = set(graph.outputs)
    gradient_of: dict[int, int] = {}  # for a result what it is an update by, itself or through another result
    reduced = 0
    for op in graph.ops:
        if op.kind is Kind.ELEMENTWISE and outputs.issuperset(op.outputs):
            made = [gradient_of.get(value, value) for value in op.inputs if graph.producer[value] >= 0]
            if made:
                gradient_of.update(dict.fromkeys(op.outputs, max(made, key=lambda value: (graph.sizes[value], value))))
        elif op.kind is Kind.PRODUCT and outputs.issuperset(op.outputs):
            gradient_of.update(dict.fromkeys(op.outputs, op.outputs[0]))
        elif op.kind is Kind.REDUCTION and op.inputs and not accumulated.isdisjoint(op.outputs):
            maker = graph.producer[max(op.inputs, key=lambda value: (graph.sizes[value], value))]
            reduced += maker < 0 or graph.ops[maker].kind is not Kind.REDUCTION
    updates = collections.Counter(gradient_of.values())
    return copied + sum(count > 1 for count in updates.values()) + reduced
