"""Where the largest tensors of a step are over its time: on the device, recomputed, or in the host's memory."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Buffer, Liveness, simulate
from remat_opt.graph.schedule import Run, Schedule
from remat_opt.report.curves import Curve, curve_of

MOST_TENSORS = 20
SMALLEST_SHARE = 1e-3  # of the peak: a smaller tensor makes no difference that could be seen
SHORTEST_SHARE = 0.05  # of the step's time: what lives shorter is not saved for the backward pass


class Place(enum.Enum):
    """Where a tensor is; the value is the legend of pictures."""

    SAVED = "saved"
    FREED = "freed, to be recomputed"
    RECOMPUTED = "recomputed"
    HOST = "on the host"


@dataclasses.dataclass(frozen=True)
class Span:
    """A time in which a tensor is in one place; `begin` and `end` are seconds from the step's begin."""

    begin: float
    end: float
    place: Place


@dataclasses.dataclass(frozen=True)
class Life:
    """All times of one tensor; between two of them it is nowhere."""

    name: str
    size: int
    spans: tuple[Span, ...]

    def share(self, parts: int) -> Life:
        """The same on one of so many devices, which share bytes and time equally."""
        spans = (Span(one.begin / parts, one.end / parts, one.place) for one in self.spans)
        return Life(self.name, self.size // parts, tuple(spans))


def lives_of(
    graph: Graph,
    schedule: Schedule,
    liveness: Liveness,
    curve: Curve,
    names: Mapping[int, str],
    stacks: Mapping[int, int],
) -> list[Life]:
    """The largest tensors of a step, and up to half as many that are in the host's memory, in the order in which they
    are made.

    Args:
        graph: the step.
        schedule: what is done.
        liveness: the simulated schedule.
        curve: the same over time.
        names: of all values.
        stacks: bytes of what loops put into the host's memory for another loop, by value.
    """
    buffers: dict[int, list[Buffer]] = {}
    for buffer in liveness.buffers:
        buffers.setdefault(buffer.value, []).append(buffer)
    away: dict[int, list[tuple[int, int]]] = {}
    for value, gone, back in liveness.on_host:
        away.setdefault(value, []).append((gone, back))
    sizes = {**dict(enumerate(graph.sizes)), **stacks}
    on_host = sorted({*away, *stacks}, key=lambda value: (-sizes[value], value))[: MOST_TENSORS // 2]
    shown = {*on_host, *_largest(graph, schedule)}
    return [
        Life(
            names.get(value, f"value {value}"),
            sizes[value],
            tuple(
                Span(float(curve.begins[begin]), float(curve.begins[end]), place)
                for begin, end, place in _spans(buffers[value], away.get(value, []), value in stacks)
            ),
        )
        for value in sorted(shown, key=lambda value: (buffers[value][0].birth, value))
    ]


def _largest(graph: Graph, schedule: Schedule) -> list[int]:
    """The largest values that are live at the peak if everything is saved, and not for a moment only.

    Of those that are as large as the last one shown, as in equal layers, some from the first to the last are shown.
    """
    first = Run(tuple(op for run in schedule.runs if not run.recomputed for op in run.ops))
    everything = simulate(graph, Schedule((first,)))
    begins = curve_of(graph, Schedule((first,)), everything).begins
    there = [
        one
        for one in everything.at(everything.peak_position)
        if one.size > SMALLEST_SHARE * everything.peak
        and begins[one.death + 1] - begins[one.birth] > SHORTEST_SHARE * begins[-1]
    ]
    if len(there) <= MOST_TENSORS:
        return [one.value for one in there]
    size = there[MOST_TENSORS - 1].size
    larger = [one.value for one in there if one.size > size]
    equal = [one.value for one in sorted(there, key=lambda one: one.birth) if one.size == size]
    places = np.linspace(0, len(equal) - 1, MOST_TENSORS - len(larger)).round().astype(int)
    return [*larger, *(equal[place] for place in places)]


def _spans(buffers: list[Buffer], away: list[tuple[int, int]], is_stack: bool) -> Iterator[tuple[int, int, Place]]:
    """The places of one value, with the first position in each and the first one after it."""
    for index, buffer in enumerate(buffers):
        first, end = buffer.birth, buffer.death + 1
        if is_stack:
            yield first, end, Place.HOST
            continue
        place = Place.SAVED if len(buffers) == 1 else Place.RECOMPUTED if index else Place.FREED
        gone = [(out, back) for out, back in away if first <= out < end]
        edges = [first, *itertools.chain.from_iterable(gone), end]
        for at, (begin, stop) in enumerate(itertools.pairwise(edges)):
            if begin < stop:
                yield begin, stop, Place.HOST if at % 2 else place
