"""Where the largest tensors of a step are over its time: on the device, recomputed, or in the host's memory."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping

from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import Buffer, Liveness, simulate
from remat_opt.graph.schedule import Run, Schedule
from remat_opt.report.curves import Curve, curve_of

MOST_TENSORS = 20
SMALLEST_SHARE = 1e-3  # of the peak: a smaller tensor makes no difference that could be seen


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


def lives_of(
    graph: Graph,
    schedule: Schedule,
    liveness: Liveness,
    curve: Curve,
    names: Mapping[int, str],
    stacks: Mapping[int, int],
) -> list[Life]:
    """The tensors that take most memory for the longest time if everything is saved, in the order in which they are
    made; before them come those that are in the host's memory, up to half of what is shown.

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
    largest = _largest(graph, schedule)
    on_host = sorted({*away, *stacks}, key=lambda value: (-sizes[value], value))[: MOST_TENSORS // 2]
    shown = list(dict.fromkeys([*on_host, *largest]))[:MOST_TENSORS]
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
    """The values that are live at the peak if everything is saved, those with the most bytes times seconds first."""
    first = Run(tuple(op for run in schedule.runs if not run.recomputed for op in run.ops))
    everything = simulate(graph, Schedule((first,)))
    begins = curve_of(graph, Schedule((first,)), everything).begins
    cost = {
        one.value: one.size * (begins[one.death + 1] - begins[one.birth])
        for one in everything.at(everything.peak_position)
        if one.size > SMALLEST_SHARE * everything.peak
    }
    return sorted(cost, key=lambda value: (-cost[value], value))


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
