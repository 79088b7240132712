"""How long a TPU's kernels take by XLA's estimates, by which it decides what waits on the chip (`tpu_chip.py`).

They are those of the pass that does it (`memory_space_assignment/cost_analysis.cc`): a kernel takes as long as its
arithmetic or, where that is longer, as all that it reads and writes takes to come from the device's memory, as if
nothing was on the chip. A slice, a pad and a copy are kernels like others, and a loop's body counts as if it ran five
times, however often it does (`xla_tpu_memory_space_assignment_while_execution_count`).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from remat_opt.compilers.packing import OF_BODIES
from remat_opt.graph.cost import Rates
from remat_opt.graph.fusion import OF_PIECES
from remat_opt.graph.graph import Graph, Kind, Op

# XLA takes nine tenths of the device's bandwidth to be used, and a body to run so often.
USED_BANDWIDTH = 0.9
CHIP_TIMES = 22.5  # as much is used from the chip: of 6,348 benefits in libtpu's logs for a v5e
RUNS_OF_A_BODY = 5
# What waits for longer than all that is on the chip could be copied so many times is sent away (XLA's
# `max_overlap_to_mem_size_async_copy_ratio`).
COPIES_UNREAD = 8
GIB = 2**30
BY_INDEX = frozenset({"gather", "dynamic_slice"})
CHANGED_IN_PLACE = "dynamic_update_slice"


def with_seconds(graph: Graph, rates: Rates) -> Graph:
    """A graph of kernels with the time that XLA takes each to need.

    Args:
        graph: kernels with sizes as they are stored; what they take beside their traffic is there as `seconds`.
        rates: FLOP/s and bytes/s of the target.
    """
    ops = [dataclasses.replace(op, seconds=_seconds(graph, at, rates)) for at, op in enumerate(graph.ops)]
    return dataclasses.replace(graph, ops=tuple(ops))


def _seconds(graph: Graph, at: int, rates: Rates) -> float:
    op = graph.ops[at]
    if op.kind is Kind.BARRIER:
        return 0.0
    if op.name in OF_BODIES:
        return op.seconds
    moved = sum(read_by(graph, op).values()) + _written_by(graph, op)
    traffic = moved / bandwidth_of(rates)
    if op.kind is Kind.PRODUCT:
        return max(traffic, op.flops / rates.matrix_rate("float32"))
    is_counted = op.kind is Kind.OPAQUE and op.name != CHANGED_IN_PLACE
    return max(traffic, op.seconds) if is_counted else traffic


def read_by(graph: Graph, op: Op) -> dict[int, int]:
    """Bytes that a kernel reads of each operand: of what it takes a part of as many as it writes. A product takes a
    part of a stack that a loop is given; of what is changed where it lies nothing is read."""
    written = _written_by(graph, op)
    if op.name == CHANGED_IN_PLACE:
        return {v: min(graph.sizes[v], written) if v not in _places(graph, op) else 0 for v in op.inputs}
    takes_parts = op.kind is Kind.ELEMENTWISE and op.name not in OF_PIECES
    parts = op.inputs if op.name in BY_INDEX else op.moved_of if takes_parts else ()
    if op.kind is Kind.PRODUCT:
        parts = tuple(v for v in op.moved_of if graph.producer[v] < 0)
    return {v: min(graph.sizes[v], written) if v in parts else graph.sizes[v] for v in op.inputs}


def _written_by(graph: Graph, op: Op) -> int:
    """Bytes that a kernel writes: of an array that it changes where it lies the part that it puts there."""
    if op.name == CHANGED_IN_PLACE:
        places = _places(graph, op)
        return max((graph.sizes[v] for v in op.inputs if v not in places), default=0)
    return sum(graph.sizes[value] for value in op.outputs)


def _places(graph: Graph, op: Op) -> set[int]:
    """Operands of a kernel as large as its result."""
    size = max((graph.sizes[value] for value in op.outputs), default=0)
    return {v for v in op.inputs if graph.sizes[v] == size}


def bandwidth_of(rates: Rates) -> float:
    """Bytes/s between the device's memory and the chip: of a device whole GiB/s, 687 of a v5e in libtpu's log."""
    used = USED_BANDWIDTH * rates.bandwidth
    return math.ceil(used / GIB) * GIB if used > GIB else used


class Clock:
    """When kernels run."""

    def __init__(self, graph: Graph, capacity: int, rates: Rates):
        """
        Args:
            graph: kernels in the order in which they run.
            capacity: bytes on the chip.
            rates: of the target.
        """
        self.bandwidth = bandwidth_of(rates)
        self.patience = COPIES_UNREAD * capacity / self.bandwidth  # seconds
        self.begins = np.cumsum([0.0, *(op.seconds for op in graph.ops), 0.0])

    def between(self, one: int, other: int) -> float:
        """Seconds from the end of one kernel to the beginning of another."""
        return float(self.begins[other] - self.begins[min(one + 1, other)])

    def last_before(self, kernel: int, seconds: float) -> int:
        """The last kernel that begins at least some seconds before another one; -1 where none does."""
        return int(np.searchsorted(self.begins, self.begins[kernel] - seconds, side="right")) - 1
