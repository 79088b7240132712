"""What is particular about a TPU: tiled layouts, narrow operands of products, and memory on the chip.

1. Arrays are stored in tiles (`graph/tiles.py`).
2. The matrix units multiply bfloat16. A float32 value that only products read is stored as bfloat16.
3. A TensorCore has a vector memory of its own, in which the compiler places whole buffers, those first that take the
   least room for the shortest time. What is there is no temporary memory of the device.
4. Each instruction with several results has a table of their addresses in the device's memory, and so has each copy to
   or from the chip. What takes a donated argument's place is made on the chip, as the argument was copied there, and
   copied to its place.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import save_everything

# 128 MiB on TPU v5e and v6e, of which 16 MiB are kept for the kernels' own scratch (XLA's `scoped_vmem_limit`).
ON_CHIP = 112 * 2**20
TABLE = 16 * 2**10


def on_chip(graph: Graph, accumulated: frozenset[int] = frozenset(), capacity: int = ON_CHIP) -> Graph:
    """The graph without the buffers that fit on the chip, and with the tables.

    Args:
        graph: kernels in the order in which they run.
        accumulated: results of reductions that are summed up from tile to tile.
        capacity: bytes on the chip.
    """
    lives = simulate(graph, save_everything(graph)).lives
    room = np.full(len(graph.ops) + 1, capacity, dtype=np.int64)
    sizes = list(graph.sizes)
    cost = lives.size * (lives.death - lives.birth + 1)
    given = len(graph.inputs)
    for index in np.argsort(cost[given:], kind="stable") + given:
        size, birth, death = int(lives.size[index]), int(lives.birth[index]), int(lives.death[index])
        if size and size <= room[birth : death + 1].min():
            room[birth : death + 1] -= size
            sizes[lives.value[index]] = 0
    tables = len(sizes)
    sizes.append(TABLE * _tables(graph, accumulated))
    first, last = Op((), (tables,), name="tables"), Op((tables,), (), name="tables")
    return dataclasses.replace(graph, sizes=tuple(sizes), ops=(first, *graph.ops, last))


def _tables(graph: Graph, accumulated: frozenset[int]) -> int:
    """Copies of arguments to the chip, copies of what takes their place from it, updates of several arrays by one
    gradient, and reductions that the kernel does beside another result (what is reduced once more is done with the
    first)."""
    copied = sum(bool(graph.users[value]) for value in graph.inputs)
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
