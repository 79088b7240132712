"""Copies between the device and its host's memory: where they stand in a schedule, and what of them does not hide.

There are two queues, one for copies out and one for copies back, each with the same bandwidth. Copies of a queue follow
one another. They run beside the work of the schedule; what has to wait for one is time (a *stall*).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from remat_opt.graph.graph import Graph
from remat_opt.graph.schedule import Schedule, Transfer

SMALLEST_COPY = 1 << 20  # bytes: a smaller one takes about as long as it takes to start one

_BEGINS_OUT, _IS_OUT, _BEGINS_BACK, _IS_BACK = range(4)  # what happens at a place, in this order


def first_reads(graph: Graph, schedule: Schedule) -> dict[Transfer, int]:
    """For each transfer the place of the op that reads its value first after the copy back has begun."""
    if not schedule.transfers:
        return {}
    reads: dict[int, list[int]] = {one.value: [] for one in schedule.transfers}
    for place, op in enumerate(schedule.order):
        for value in reads.keys() & graph.ops[op].inputs:
            reads[value].append(place)
    end = len(schedule.order)
    return {
        one: min((read for read in reads[one.value] if read >= one.back), default=end) for one in schedule.transfers
    }


def stalls(graph: Graph, schedule: Schedule, bandwidth: float) -> float:
    """Seconds that the work of a schedule waits for its copies.

    Args:
        graph: the step.
        schedule: with transfers.
        bandwidth: bytes per second of each of the two queues.
    """
    needed, made = first_reads(graph, schedule), _places_made(graph, schedule)
    seconds = np.concatenate([[0.0], np.cumsum(graph.op_seconds[np.array(schedule.order, dtype=np.int64)])])
    late = out_free = back_free = 0.0
    done: dict[int, float] = {}
    events = [(place + 1, _BEGINS_OUT, value) for value, place in made.items()]
    events += [(one.gone, _IS_OUT, one.value) for one in needed]
    events += [(one.back, _BEGINS_BACK, one.value) for one in needed]
    events += [(read, _IS_BACK, one.value) for one, read in needed.items()]
    for place, what, value in sorted(events):
        now = float(seconds[place]) + late
        if what == _BEGINS_OUT:
            out_free = done[value] = max(out_free, now) + graph.sizes[value] / bandwidth
        elif what == _BEGINS_BACK:
            back_free = done[value] = max(back_free, now) + graph.sizes[value] / bandwidth
        else:
            late += max(done[value] - now, 0.0)
    return late


def host_live(graph: Graph, schedule: Schedule) -> np.ndarray:
    """Bytes of the host's memory that copies take while each op runs, in order, and at the end: a copy is there from
    where its value is made to where its last copy back is done."""
    change = np.zeros(len(schedule.order) + 1, dtype=np.int64)
    last = {one.value: read for one, read in sorted(first_reads(graph, schedule).items())}
    for value, place in _places_made(graph, schedule).items():
        change[place] += graph.sizes[value]
        change[last[value]] -= graph.sizes[value]
    return np.cumsum(change)


def host_peak(graph: Graph, schedule: Schedule) -> int:
    """The most bytes of the host's memory that copies take at one moment."""
    return int(host_live(graph, schedule).max(initial=0))


def _places_made(graph: Graph, schedule: Schedule) -> dict[int, int]:
    """For each value that goes to the host the place of the op that makes it first."""
    makers = {graph.producer[one.value]: one.value for one in schedule.transfers}
    places = reversed([(makers[op], place) for place, op in enumerate(schedule.order) if op in makers])
    return dict(places)


def check_transfers(graph: Graph, schedule: Schedule) -> None:
    """Compare transfers with the schedule that they are part of.

    Raises:
        ValueError: a value is none that an op makes, or a result of the step; it goes while it is away, or is read or
            made then; a place lies inside a recomputed run.
    """
    order = schedule.order
    allowed = {*places(schedule)}
    back: dict[int, int] = {}
    for one in sorted(schedule.transfers):
        if one.gone <= back.get(one.value, -1):
            raise ValueError(f"transfers, expected a value that has come back, found {one}")
        back[one.value] = one.back
        if not {one.gone, one.back} <= allowed or not 0 < one.gone < one.back:
            raise ValueError(f"transfers, expected places in first runs, the way back later, found {one}")
        if not 0 <= one.value < len(graph.sizes) or graph.producer[one.value] not in order[: one.gone]:
            raise ValueError(f"transfers, expected a value that is made before it goes, found {one}")
        if one.value in graph.outputs:
            raise ValueError(f"transfers, expected no results of the step, found {one}")
        between = order[one.gone : one.back]
        if any(one.value in (*graph.ops[op].inputs, *graph.ops[op].outputs) for op in between):
            raise ValueError(f"transfers, expected a value that nothing reads while it is away, found {one}")


def places(schedule: Schedule) -> Iterable[int]:
    """Where transfers may go and come back: at ops of first runs, and at the first op of a recomputed one."""
    start = 0
    for run in schedule.runs:
        yield from (start,) if run.recomputed else range(start, start + len(run.ops))
        start += len(run.ops)
