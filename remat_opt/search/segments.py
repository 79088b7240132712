"""Segments over cuts of the topological order, by the prefix-maximum objective (Hong et al. 2025, section 3).

The ops before a forward/backward boundary are cut into contiguous segments. Each has one of three options: *recompute*
all of it when its backward comes, so that only what crosses its end is saved; keep its *expensive* results (products,
convolutions, reductions, opaque ops) and recompute the elementwise rest; or *keep* all that is read behind the
forward/backward boundary. Segments run backward from the last to the first, so that those behind are done when one
runs:

    least(i) = min over j > i and options of  max(needs(i, j, option), stays(i, j, option) + least(j))

`stays` are the bytes that are held until the segment's own backward, `needs` the most bytes live while it runs, its own
buffers and the cotangents, and while it is recomputed. All are taken from the plain step's true live sets (`cuts.py`).
The last segment's backward follows its forward, so that it is not recomputed: the forward/backward boundary is its
start.

`minimum_peak` is this recurrence. `minimum_seconds` is the dual, as Rotor's programme (Herrmann et al. 2019, section 4)
with options as Rockmate's (Zhao et al. 2023): the least seconds of recomputation for every size of memory, in slots.
Both only guide: the simulated schedule decides.

Limitations: one level of recomputation; segments are contiguous in the program's order; the choice inside a segment is
by kind of op, not by value (`drop_recomputation.py` mends that in the schedule).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Kind
from remat_opt.graph.tables import min_along
from remat_opt.search.cuts import SegmentCosts

SLOTS = 400


class Option(enum.IntEnum):
    """What becomes of a segment; among equals the first is taken."""

    KEEP = 0
    EXPENSIVE = 1
    RECOMPUTE = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """Segments in order: the cuts at which they end, and their options. What is behind the last end is kept."""

    ends: tuple[int, ...] = ()
    options: tuple[Option, ...] = ()

    def behind(self, end: int, option: Option) -> Plan:
        """The plan with one more segment in front of all others."""
        return Plan((end, *self.ends), (option, *self.options))


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What the segment from cut i to cut j takes under an option, [option, i, j] with i < j.

    Attributes:
        options: which options are offered, in the order of the first axis.
        stays: bytes that are held until its own backward.
        needs: the most bytes live while it is recomputed and runs backward.
        seconds: of recomputation.
        last: [i], the most bytes live while all behind cut i runs backward.
    """

    options: tuple[Option, ...]
    stays: np.ndarray
    needs: np.ndarray
    seconds: np.ndarray
    last: np.ndarray


def table_of(costs: SegmentCosts, order: Sequence[int], options: Sequence[Option] = tuple(Option)) -> Table:
    """What segments take, from the plain step's live sets; options in the given order."""
    graph, count = costs.cuts.graph, len(costs.cuts)
    ops = [graph.ops[op] for op in order[: costs.cuts.forward_end]]
    times = np.array([op.seconds if op.kind is Kind.ELEMENTWISE else 0.0 for op in ops], dtype=float)
    cheap = np.concatenate([[0.0], np.cumsum(times)])[costs.cuts.stops[:-1]]
    square = np.index_exp[:, :count]
    needs = costs.backward[square]
    tables = {
        Option.KEEP: (costs.kept[square], needs, np.zeros((count, count))),
        Option.EXPENSIVE: (costs.expensive(order)[square], needs, cheap[None, :] - cheap[:, None]),
        Option.RECOMPUTE: (costs.crossing[square], np.maximum(needs, costs.forward[square]), costs.seconds[square]),
    }
    stays, needs, seconds = (np.stack([tables[option][k] for option in options]) for k in range(3))
    return Table(tuple(options), stays, needs, seconds, costs.backward[:, count])


def minimum_peak(table: Table) -> Plan:
    """The plan of least memory; among equals that of the least seconds."""
    count = len(table.last)
    peak, seconds = table.last.copy(), np.zeros(count)
    plans = [Plan()] * count
    for i in range(count - 2, -1, -1):
        following = slice(i + 1, count)
        peaks = np.maximum(table.needs[:, i, following], table.stays[:, i, following] + peak[following])
        times = table.seconds[:, i, following] + seconds[following]
        best = int(np.lexsort((times.ravel(), peaks.ravel()))[0])
        which, offset = divmod(best, count - 1 - i)
        if (peaks[which, offset], times[which, offset]) < (peak[i], 0.0):
            peak[i], seconds[i] = peaks[which, offset], times[which, offset]
            plans[i] = plans[i + 1 + offset].behind(i + 1 + offset, table.options[which])
    return plans[0]


def minimum_seconds(table: Table, capacity: int) -> list[tuple[int, Plan]]:
    """The plans of least seconds for every size of memory up to `capacity` bytes, those of least memory first, each
    with the bytes that it needs by the table's word."""
    count = len(table.last)
    slot = max(1, -(-capacity // SLOTS))
    rooms = np.arange(-(-capacity // slot) + 1)
    width = len(rooms)
    padded = np.full((count, 2 * width), np.inf)  # rooms below zero first
    seconds = padded[:, width:]
    behind = sliding_window_view(padded.ravel(), width)  # by the place of its first room
    decision = np.full((count, width), -1, dtype=np.int64)
    stays, needs, last = in_slots(table.stays, slot), -(-table.needs // slot), -(-table.last // slot)
    for i in range(count - 1, -1, -1):
        following = np.arange(i + 1, count)
        start = following * 2 * width + width - np.minimum(stays[:, i, i + 1 :], width)
        together = np.empty((1 + start.size, width))
        together[0] = np.where(rooms >= last[i], 0.0, np.inf)
        times = np.add(behind[start.ravel()], table.seconds[:, i, i + 1 :].reshape(-1, 1), out=together[1:])
        np.copyto(times, np.inf, where=rooms < needs[:, i, i + 1 :].reshape(-1, 1))
        seconds[i], decision[i] = min_along(together)
    better = np.flatnonzero(seconds[0] < np.concatenate([[np.inf], seconds[0, :-1]]))
    return [(int(room) * slot, _read(table, stays, decision, int(room))) for room in better]


def _read(table: Table, stays: np.ndarray, decision: np.ndarray, room: int) -> Plan:
    count = len(decision)
    ends: list[int] = []
    options: list[Option] = []
    i = 0
    while (chosen := int(decision[i, room]) - 1) >= 0:
        which, offset = divmod(chosen, count - 1 - i)
        j = i + 1 + offset
        room -= int(stays[which, i, j])
        ends.append(j)
        options.append(table.options[which])
        i = j
    return Plan(tuple(ends), tuple(options))


def in_slots(sizes: np.ndarray, slot: int) -> np.ndarray:
    """Bytes in slots, rounded so that sums of many are right.

    Equal small sizes rounded to the nearest all err to one side. So the share of a slot that is rounded up is another
    one in each column (multiples of the golden ratio lie evenly). Exact for slots of one byte.
    """
    share = np.arange(sizes.shape[-1]) * 618034 % 1000000
    return (sizes + share * slot // 1000000) // slot


def choice_of(costs: SegmentCosts, order: Sequence[int], plan: Plan) -> Choice:
    """What a plan saves. Without segments all is saved."""
    cuts = costs.cuts
    saved: set[int] = set()
    start = 0
    for end, option in zip(plan.ends, plan.options, strict=True):
        saved |= cuts.crossing(end)
        for position in range(cuts.positions[start], cuts.positions[end]):
            op = cuts.graph.ops[order[position]]
            # Kept is all of it: what is not evicted is not recomputed.
            if option is Option.KEEP or (option is Option.EXPENSIVE and op.kind is not Kind.ELEMENTWISE):
                saved.update(op.outputs)
        start = end
    positions = tuple(cuts.positions[end] for end in plan.ends)
    return Choice(frozenset(saved), positions[-1:], positions)
