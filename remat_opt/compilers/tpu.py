"""What is particular about a TPU: tiled layouts, narrow operands of products, and memory on the chip.

1. Arrays are stored in tiles (`graph/tiles.py`).
2. The matrix units multiply bfloat16. A float32 value that only products read is stored as bfloat16.
3. A TensorCore has a vector memory of its own, in which the compiler places whole buffers, those first that take the
   least room for the shortest time, each in one gap for all of its life. What is there is no temporary memory of the
   device.
4. Each instruction with several results has a table of their addresses in the device's memory, and so has each copy to
   or from the chip; a large buffer is fetched in slices with tables of their own. What takes a donated argument's place
   is made on the chip, as the argument was copied there, and copied to its place.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from remat_opt.compilers.packing import Chunks, places
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import Lives, simulate
from remat_opt.graph.schedule import save_everything

# 128 MiB on TPU v5e and v6e, of which 16 MiB are kept for the kernels' own scratch (XLA's `scoped_vmem_limit`).
ON_CHIP = 112 * 2**20
TABLE = 16 * 2**10
# A copy of a mebibyte and more is made in four slices, and each of them has two tables.
SLICED_FROM = 2**20
TABLES_OF_SLICES = 8


def on_chip(graph: Graph, accumulated: frozenset[int] = frozenset(), capacity: int = ON_CHIP) -> Graph:
    """The graph without the buffers that fit on the chip, and with the tables.

    Args:
        graph: kernels in the order in which they run.
        accumulated: results of reductions that are summed up from tile to tile.
        capacity: bytes on the chip.
    """
    lives = simulate(graph, save_everything(graph)).lives
    cost = lives.size * (lives.death - lives.birth + 1)
    cost[: len(graph.inputs)] = 0  # arguments lie in the device's memory
    order = np.argsort(cost, kind="stable")
    order = order[cost[order] > 0]
    offsets = places(Chunks(lives.size, lives.birth, lives.death), order, capacity)
    kept = order[offsets[order] >= 0]
    tables = _tables(graph, accumulated) + _tables_of_fetches(graph, lives, kept, capacity)
    sizes = list(graph.sizes)
    for value in lives.value[kept].tolist():
        sizes[value] = 0
    sizes.append(TABLE * tables)
    listed = len(sizes) - 1
    first, last = Op((), (listed,), name="tables"), Op((listed,), (), name="tables")
    return dataclasses.replace(graph, sizes=tuple(sizes), ops=(first, *graph.ops, last))


def _tables_of_fetches(graph: Graph, lives: Lives, kept: np.ndarray, capacity: int) -> int:
    """Tables of the copies of large buffers that wait in the device's memory: each is fetched in slices for the kernel
    that reads it, and stays for the next one, where there is room. What is made on the chip is copied out once.

    Args:
        graph: kernels in the order in which they run.
        lives: of all buffers.
        kept: indices of those that are on the chip for all of their lives.
        capacity: bytes on the chip.
    """
    sizes, arguments = lives.size.copy(), len(graph.inputs)
    sizes[:arguments] = graph.size_array[lives.value[:arguments]]  # which are no temporary memory, but are fetched
    change = np.zeros(int(lives.death.max(initial=0)) + 2, dtype=np.int64)
    np.add.at(change, lives.birth[kept], lives.size[kept])
    np.add.at(change, lives.death[kept] + 1, -lives.size[kept])
    room = capacity - np.cumsum(change)
    waiting = np.setdiff1d(np.flatnonzero((sizes >= SLICED_FROM) & (sizes <= capacity)), kept)
    tables = 0
    for index in waiting[np.argsort(sizes[waiting], kind="stable")].tolist():
        size, free_from = sizes[index], 0
        reads = np.unique(lives.reads[lives.reads_start[index] : lives.reads_start[index + 1]]).tolist()
        if index >= arguments and room[lives.birth[index]] >= size:
            tables += 1
            free_from = int(lives.birth[index]) + 1
            room[free_from - 1] -= size
        is_there = free_from > 0
        for read in reads:
            if not is_there or room[free_from : read + 1].min(initial=capacity) < size:
                free_from = max(read - 1, free_from)  # it comes while the kernel before runs
                is_there = room[free_from : read + 1].min(initial=capacity) >= size
                tables += is_there * TABLES_OF_SLICES
            if is_there:
                room[free_from : read + 1] -= size
                free_from = read + 1
    return tables


def _tables(graph: Graph, accumulated: frozenset[int]) -> int:
    """Copies of arguments to the chip, copies of what takes their place from it, updates of several arrays by one
    gradient, and reductions that the kernel does beside another result (what is reduced once more is done with the
    first)."""
    copied = sum(bool(graph.users[value]) and graph.sizes[value] < SLICED_FROM for value in graph.inputs)
    copied += sum(graph.producer[value] >= 0 for _, value in graph.aliases)
    outputs = set(graph.outputs)
    gradient_of: dict[int, int] = {}  # for a result what it is an update by, itself or through another result
    reduced = 0
    for op in graph.ops:
        if op.kind is Kind.ELEMENTWISE and outputs.issuperset(op.outputs):
            made = [gradient_of.get(value, value) for value in op.inputs if graph.producer[value] >= 0]
            if made:
                gradient_of.update(dict.fromkeys(op.outputs, max(made, key=lambda value: (graph.sizes[value], value))))
        elif op.kind is Kind.REDUCTION and op.inputs and not accumulated.isdisjoint(op.outputs):
            maker = graph.producer[max(op.inputs, key=lambda value: (graph.sizes[value], value))]
            reduced += maker < 0 or graph.ops[maker].kind is not Kind.REDUCTION
    updates = collections.Counter(gradient_of.values())
    return copied + sum(count > 1 for count in updates.values()) + reduced
