"""Slices that a TPU's compiler makes as copies to the chip, when they are needed.

A slice that is a kernel of its own, of elements that are not rounded, is put off where what it is cut from can be sent
to the device's memory and the slice fetched from there before the first kernel that reads it (XLA's
`enable_sync_slice_replacement`, in `memory_space_assignment/algorithm.cc`). What it is cut from then waits in the
device's memory until that.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Set

from jax.extend.core import primitives as P

from remat_opt.compilers.tpu_chip import PREFERRED_TIMES, SMALL
from remat_opt.compilers.tpu_clock import Clock
from remat_opt.graph.graph import Graph, Kind, Op


def with_cuts_put_off(graph: Graph, rounded: Set[int], clock: Clock) -> tuple[Graph, Mapping[int, int]]:
    """A graph of kernels with such slices where they are fetched, and for what they are cut from the last of them.

    Args:
        graph: kernels in the order in which they run.
        rounded: values that are stored in two bytes instead of four.
        clock: when they run.
    """
    put_off: dict[int, list[int]] = collections.defaultdict(list)  # before which kernel
    moved = set[int]()
    beside = {v for op in graph.ops if op.kind is Kind.ELEMENTWISE and len(op.outputs) > 1 for v in op.outputs}
    for at, op in enumerate(graph.ops):
        whole = _cut_from(graph, op)
        if whole < 0 or whole in beside or (whole in rounded) != (op.outputs[0] in rounded):
            continue
        if graph.producer[whole] in moved:
            continue  # a slice of a slice stands behind that
        read = min(_readers(graph, op.outputs[0]), default=-1)
        is_needed_later = any(reader > read for reader in _readers(graph, whole))
        begin = _fetched_at(graph, clock, graph.producer[whole], op, read) if read > at and not is_needed_later else -1
        if begin >= 0:
            put_off[begin].append(at)
            moved.add(at)
    order: list[int] = []
    for at in range(len(graph.ops)):
        order += put_off.get(at, ())
        order += () if at in moved else (at,)
    last = {_cut_from(graph, graph.ops[at]): place for place, at in enumerate(order) if at in moved}
    pieces = {value for at in moved for value in graph.ops[at].outputs}
    ops = [_without(graph.ops[at], pieces) if graph.ops[at].kind is Kind.BARRIER else graph.ops[at] for at in order]
    return dataclasses.replace(graph, ops=tuple(ops)), last


def _without(barrier: Op, values: Set[int]) -> Op:
    """A barrier that is not there any more for some values, which are made behind it."""
    return dataclasses.replace(barrier, inputs=tuple(value for value in barrier.inputs if value not in values))


def _cut_from(graph: Graph, op: Op) -> int:
    """What a kernel that is a slice without strides and nothing else is cut from, made by another kernel; -1 for any
    other kernel."""
    arrays = [value for value in op.inputs if graph.sizes[value]]
    if (
        op.name != P.slice_p.name
        or op.of_buffers
        or len(arrays) != 1
        or len(op.outputs) != 1
        or op.outputs[0] in graph.outputs
    ):
        return -1
    return arrays[0] if graph.producer[arrays[0]] >= 0 else -1


def _readers(graph: Graph, value: int) -> list[int]:
    """The kernels that read a value. (Barriers are gone when places are found.)"""
    return [user for user in graph.users[value] if graph.ops[user].kind is not Kind.BARRIER]


def _fetched_at(graph: Graph, clock: Clock, made: int, cut: Op, read: int) -> int:
    """Before which kernel the copy of a slice begins; -1 where there is no time for it."""
    (piece,) = cut.outputs
    whole = max(cut.inputs, key=lambda value: graph.sizes[value])
    seconds = graph.sizes[piece] / clock.bandwidth
    if clock.between(made, read) < graph.sizes[whole] / clock.bandwidth + seconds:
        return -1
    preferred = PREFERRED_TIMES * max(graph.sizes[piece], SMALL) / clock.bandwidth
    there = max(graph.producer[value] for value in cut.inputs)  # a barrier, too, that it is cut behind
    begin = min(max(clock.last_before(read, preferred), there + 1), clock.last_before(read, seconds))
    return begin if begin > there else -1
