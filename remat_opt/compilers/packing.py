"""How much a compiler allocates for its buffers: more than is live at once, where they do not fit together.

XLA gives each buffer one place in one allocation for the whole step, one buffer after the other: the smallest gap that
is free for all of its life, or the end (`heap_simulator.cc`, `GlobalDecreasingSizeBestFitHeap`). The compilers for CPUs
and GPUs try the largest first and the longest lived first, and take the better; time is counted in buffers that come
and go. The one for TPUs takes them as they come, of those that come at once first what goes first: so the offsets in
its dumps come out.

Before that (`buffer_assignment.cc`), the largest buffers first, each is put into the place of a result that is at least
as large, while nobody needs that: before the result is made, and where it takes a donated argument's place after that
was read for the last time.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import Lives, most_live, simulate
from remat_opt.graph.schedule import save_everything

PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
OF_BODIES = frozenset({"scan", "while", "cond"})  # ops whose workspace is that of programs of their own


@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """What places are to be found for: the bytes of each chunk, and from when to when it lives, both included."""

    size: np.ndarray
    birth: np.ndarray
    death: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes of a step's allocation, and how many of them lie in no buffer when most are live."""

    size: int
    gaps: int


# At whose multiples buffers begin in a TPU's memory, tables of a few addresses, too. What takes no more finds its place
# among the tables, however late it comes, and is not in the way of what is large (ResNet-50, optimised: of 2636 such
# values 1799 lie in the first 60 of 1186 MB, and 809 at the end).
PAGE = 16 * 2**10


def pack(graph: Graph, shared: Mapping[int, int], *, as_they_come: bool) -> Allocation:
    """The allocation of a step that runs its ops in the graph's order.

    Args:
        graph: kernels in their order; their workspaces are counted without results that take an operand's place.
        shared: for such a result the operand.
        as_they_come: as for TPUs.
    """
    if not graph.ops:
        return Allocation(0, 0)
    chunks, every = _chunks(graph, shared), _chunks(graph, shared, with_bodies=True)
    live = most_live(every.size, every.birth, every.death)
    if as_they_come:
        chunks = dataclasses.replace(chunks, birth=_with_their_products(graph)[chunks.birth])
        size = _height(chunks, np.lexsort((chunks.death, chunks.birth, chunks.size > PAGE)))
    else:
        chunks = _in_events(chunks)
        lived = chunks.death - chunks.birth
        by_life = _height(chunks, np.lexsort((chunks.birth, -chunks.size, -lived)))
        size = min(by_life, _height(chunks, np.lexsort((chunks.birth, -lived, -chunks.size))))
    size = max(size, live)
    return Allocation(size, size - live)


def _with_their_products(graph: Graph) -> np.ndarray:
    """For each moment the one that what comes then comes at: elementwise work right behind the product or convolution
    that it reads is one kernel with it on a TPU, of which both results come at once."""
    start = _moments(graph)
    comes = np.arange(start[-1] + 1)
    for position in range(1, len(graph.ops)):
        before, op = graph.ops[position - 1 : position + 1]
        if before.name in PRODUCTS and op.kind is Kind.ELEMENTWISE and set(before.outputs) & set(op.inputs):
            comes[start[position]] = start[position - 1]
    return comes


def _moments(graph: Graph) -> list[int]:
    """When each op begins, and the end; a loop has many moments."""
    start = [0]
    for op in graph.ops:
        start.append(start[-1] + 1 + max((last for *_, last in op.inside), default=0))
    return [*start, start[-1] + 1]


def _chunks(graph: Graph, shared: Mapping[int, int], *, with_bodies: bool = False) -> Chunks:
    """One chunk for each buffer, those that share a place as one, and one for each kernel's workspace.

    What lives in the body of a loop is many buffers, each a chunk while that runs. Where they are not known, they lie
    in what gaps there are: no chunk, but where asked for, to be counted.
    """
    start = _moments(graph)
    size, birth, death, _ = _buffers(graph, simulate(graph, save_everything(graph)).lives, shared)
    birth, death = [start[one] for one in birth], [start[one + 1] - 1 for one in death]
    for position, op in enumerate(graph.ops):
        space = op.workspace + sum(graph.sizes[value] for value in op.outputs if value in shared)
        inside = [(of_one, start[position] + first, start[position] + last) for of_one, first, last in op.inside]
        if not inside and space > 0 and (with_bodies or op.name not in OF_BODIES):
            inside = [(space, start[position], start[position + 1] - 1)]
        for of_one, first, last in inside:
            size.append(of_one)
            birth.append(first)
            death.append(last)
    return Chunks(*(np.array(column, dtype=np.int64) for column in (size, birth, death)))


def _buffers(
    graph: Graph, lives: Lives, shared: Mapping[int, int]
) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Bytes, first and last position, and the values of each buffer, those that share a place as one."""
    place: dict[int, int] = {}  # of a value, the index of its buffer
    size, birth, death, values = [], [], [], []
    columns = (lives.value.tolist(), lives.size.tolist(), lives.birth.tolist(), lives.death.tolist())
    for value, of_value, first, last in zip(*columns, strict=True):
        if not of_value:
            continue
        if shared.get(value) in place:
            index = place[value] = place[shared[value]]
            death[index] = max(death[index], last)
            values[index].append(value)
            continue
        place[value] = len(size)
        size.append(of_value)
        birth.append(first)
        death.append(last)
        values.append([value])
    return size, birth, death, values


def buffers_of(graph: Graph, shared: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Bytes, first and last moment of all buffers of a body, as `Op.inside`; arguments as of `pack`."""
    chunks = _chunks(graph, shared, with_bodies=True)
    return tuple(zip(chunks.size.tolist(), chunks.birth.tolist(), chunks.death.tolist(), strict=True))


def lying_in_results(graph: Graph, shared: Mapping[int, int]) -> tuple[frozenset[int], tuple[Op, ...]]:
    """Values that lie in the places of results, and the ops without what of loops' buffers does.

    Args:
        graph: kernels in their order.
        shared: for a value that takes an operand's place that operand.
    """
    lives = simulate(graph, save_everything(graph)).lives
    results = _places_of_results(graph, lives)
    sizes = [result.size for result in results]
    found: set[int] = set()
    beside: dict[int, list[tuple[int, int, int]]] = {}  # what of a loop's buffers lies elsewhere
    for size, birth, death, at, values in _from_the_largest(graph, lives, shared):
        for result in results[bisect.bisect_left(sizes, size) :]:
            written_over = values and death[0] == result.made and values[-1] in result.may_be_written_over
            until = (death[0] - 1, _END) if written_over else death
            if all(until < first or last < birth for first, last in result.taken):
                result.taken.append((birth, until))
                found.update(values)
                break
        else:
            if at >= 0:
                beside.setdefault(at, []).append((size, birth[1], death[1]))
    ops = list(graph.ops)
    for at, op in enumerate(ops):
        if op.inside:
            inside = tuple(beside.get(at, ()))
            less = max(_most_inside(op.inside) - _most_inside(inside), 0)
            ops[at] = dataclasses.replace(op, inside=inside, workspace=op.workspace - less)
    return frozenset(found), tuple(ops)


_Moment = tuple[int, int]  # the position of an op, and one inside of it
_END = 1 << 60


def _from_the_largest(
    graph: Graph, lives: Lives, shared: Mapping[int, int]
) -> list[tuple[int, _Moment, _Moment, int, list[int]]]:
    """Bytes, first and last moment of all buffers, with the loop that they are in (−1 for none) or their values."""
    every = [
        (of_one, (first, 0), (last, _END), -1, values)
        for of_one, first, last, values in zip(*_buffers(graph, lives, shared), strict=True)
    ]
    every += [
        (of_one, (at, first), (at, last), at, [])
        for at, op in enumerate(graph.ops)
        for of_one, first, last in op.inside
    ]
    return sorted(every, key=lambda one: (-one[0], one[1]))


def _most_inside(buffers: Sequence[tuple[int, int, int]]) -> int:
    """The most bytes of a loop's buffers that are live at one moment."""
    return most_live(*np.array(buffers, dtype=np.int64).reshape(-1, 3).T)


@dataclasses.dataclass
class _Place:
    """That of a result.

    Attributes:
        size: in bytes.
        made: when the result is made.
        may_be_written_over: operands over which the result may be written.
        taken: when something lies there, first and last moments.
    """

    size: int
    made: int
    may_be_written_over: frozenset[int]
    taken: list[tuple[_Moment, _Moment]]


def _places_of_results(graph: Graph, lives: Lives) -> list[_Place]:
    """Those that are free at times, the smallest first, of equal ones the last."""
    last_read = dict(zip(lives.value[: len(graph.inputs)].tolist(), lives.death.tolist(), strict=False))
    given = {output: argument for argument, output in graph.aliases}
    places = []
    for value in graph.outputs:
        made = graph.producer[value]
        if made < 0 or value in graph.held:
            continue
        op, size = graph.ops[made], graph.sizes[value]
        is_loop = op.kind is Kind.ELEMENTWISE
        fitting = frozenset(operand for operand in op.inputs if is_loop and graph.sizes[operand] == size)
        taken = [((made, 0), (len(graph.ops), _END))]
        if value in given:
            taken.append(((0, 0), (last_read[given[value]], _END)))
            if last_read[given[value]] >= made:
                continue
        places.append(_Place(size, made, fitting, taken))
    places.reverse()
    return sorted(places, key=lambda place: place.size)


def _in_events(chunks: Chunks) -> Chunks:
    """Time counted in buffers that come and go; at one position all come before any goes."""
    count = len(chunks.size)
    order = np.argsort(np.concatenate([2 * chunks.birth, 2 * chunks.death + 1]), kind="stable")
    time = np.empty(2 * count, dtype=np.int64)
    time[order] = np.arange(2 * count)
    return Chunks(chunks.size, time[:count], time[count:])


def places(chunks: Chunks, order: np.ndarray, capacity: int | None = None) -> np.ndarray:
    """The offset of each chunk, taken in some order, each in the smallest gap in which it fits.

    Args:
        chunks: what is to be placed.
        order: indices of chunks.
        capacity: bytes that there are; None for as many as are needed.

    Returns:
        Offsets; −1 for what finds no place within the capacity.
    """
    offset = np.full_like(chunks.size, -1)
    for count, index in enumerate(order):
        placed = order[:count]
        together = (chunks.birth[placed] <= chunks.death[index]) & (chunks.birth[index] <= chunks.death[placed])
        beside = placed[together & (offset[placed] >= 0)]
        beside = beside[np.argsort(offset[beside], kind="stable")]
        ends = np.maximum.accumulate(np.concatenate([[0], offset[beside] + chunks.size[beside]]))
        gaps = offset[beside] - ends[:-1]
        fitting = np.flatnonzero(gaps >= chunks.size[index])
        found = ends[fitting[gaps[fitting].argmin()]] if len(fitting) else ends[-1]
        if capacity is None or found + chunks.size[index] <= capacity:
            offset[index] = found
    return offset


def _height(chunks: Chunks, order: np.ndarray) -> int:
    """Bytes up to the end of the highest chunk."""
    return int((places(chunks, order) + chunks.size).max(initial=0))
