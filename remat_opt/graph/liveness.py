"""Liveness: how many bytes are live at each position of a schedule. This is the only definition of a peak.

It counts the temporary memory that a compiler reports. Arguments do not count, nor do the results of the step (except
those of a loop's body, `Graph.held`). A result that takes over the buffer of a donated argument counts only while that
argument is still to be read.

Every value of the graph has to be a buffer, as in the graphs of `fusion.fuse`. The positions of a schedule are its ops,
in order, and one more before each recomputed run for its barrier. A barrier lengthens no lifetime, since all that it
covers is read after it anyway. The workspace of an op is live while the op runs. A buffer whose value is in the host's
memory counts nothing (`Transfer`).

An elementwise kernel writes its result over an operand of as many bytes that it reads last
(XLA's `HloDataflowAnalysis::CanShareOperandBufferWithUser`): while it runs, the two count once. Ops say by `same_place`
which operands these may be. Not written over are:

- what a recomputed run reads through its barrier: it is no operand of the kernel's own there (a kernel of any other run
  reads such an operand as it was before the barriers, see `emit/train_step.py`);
- what a reduction of the same run, behind the first barrier, reads as well: both read it behind a barrier of their own
  (`barriers.py`, case 2);
- operands of a kernel whose result a reduction reads, since XLA makes one kernel of the two (`MultiOutputFusion`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from remat_opt.graph.fusion import materialised
from remat_opt.graph.graph import Graph, Op
from remat_opt.graph.schedule import Schedule, save_everything


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer's life: from `birth` to its last read, both included, in positions of the schedule."""

    value: int
    size: int
    birth: int
    reads: tuple[int, ...]

    @property
    def death(self) -> int:
        """The position of the last read; `birth` for what nobody reads."""
        return self.reads[-1] if self.reads else self.birth


@dataclasses.dataclass(frozen=True, eq=False)
class Lives:
    """All buffers' lives as arrays, in the order in which they are made, arguments first.

    Attributes:
        value, size, birth, death: as of `Buffer`.
        reader: the buffer of each read, as reads come, those of one buffer in the order of time.
        read_at: the positions of the same reads.
        overwritable: whether the op that reads a buffer last may write its result over it.
    """

    value: np.ndarray
    size: np.ndarray
    birth: np.ndarray
    death: np.ndarray
    reader: np.ndarray
    read_at: np.ndarray
    overwritable: np.ndarray

    def __len__(self) -> int:
        return len(self.value)

    @functools.cached_property
    def read_counts(self) -> np.ndarray:
        """How often each buffer is read."""
        return np.bincount(self.reader, minlength=len(self))

    @functools.cached_property
    def reads(self) -> np.ndarray:
        """The positions of all reads, those of buffer i from `reads_start[i]` to `reads_start[i + 1]`."""
        return self.read_at[stable_order(self.reader, len(self))]

    @functools.cached_property
    def reads_start(self) -> np.ndarray:
        """Where in `reads` those of each buffer begin."""
        return np.concatenate([[0], np.cumsum(self.read_counts)])

    @property
    def has_unread_repeats(self) -> bool:
        """Whether some value is recomputed without being read afterwards."""
        unread = np.flatnonzero(self.read_counts == 0)
        first = np.empty(self.value.max(initial=-1) + 1, dtype=np.int64)
        first[self.value[::-1]] = np.arange(len(self) - 1, -1, -1)  # the first buffer of each value
        return bool((first[self.value[unread]] != unread).any())


@dataclasses.dataclass(frozen=True, eq=False)
class Liveness:
    """The result of simulating a schedule.

    Attributes:
        live: bytes live at each position, and at the return.
        workspace: those of them that the op needs while it runs.
        lives: all buffers.
        overwritten: the buffers that the op that reads them last writes its result over.
        on_host: values with the first position at which they are in the host's memory alone, and the first after that.
    """

    live: np.ndarray
    workspace: np.ndarray
    lives: Lives
    overwritten: np.ndarray
    on_host: tuple[tuple[int, int, int], ...] = ()

    @functools.cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers with their lives, in the order in which they are made, arguments first."""
        lives = self.lives
        columns = (lives.value.tolist(), lives.size.tolist(), lives.birth.tolist(), lives.death.tolist())
        reads, start = lives.reads.tolist(), lives.reads_start.tolist()
        buffers = []
        for index, (value, size, birth, death) in enumerate(zip(*columns, strict=True)):
            own = reads[start[index] : start[index + 1]]
            if own and own[-1] != death:
                # It waits in a buffer of its own until nobody reads the argument whose place it takes.
                own = [*(read for read in own if read < death), death]
            buffers.append(Buffer(value, size, birth, tuple(own)))
        return tuple(buffers)

    @functools.cached_property
    def peak(self) -> int:
        """The most bytes live at one moment."""
        return int(self.live.max(initial=0))

    @functools.cached_property
    def moments_at_peak(self) -> int:
        """How often the peak is reached."""
        return int(np.count_nonzero(self.live == self.peak))

    @property
    def peak_position(self) -> int:
        """The first position at which `peak` is reached."""
        return int(self.live.argmax()) if len(self.live) else 0

    def at(self, position: int) -> list[Buffer]:
        """The buffers that are live at a position, the largest first; of two in one place that which is written."""
        over = {*self.overwritten.tolist()}
        away = {value for value, gone, back in self.on_host if gone <= position < back}
        there = [
            buffer
            for index, buffer in enumerate(self.buffers)
            if buffer.size and buffer.birth <= position <= buffer.death - (index in over) and buffer.value not in away
        ]
        return sorted(there, key=lambda buffer: (-buffer.size, buffer.value))


def simulate(graph: Graph, schedule: Schedule) -> Liveness:
    """Run a schedule on paper and record every buffer's life.

    Raises:
        ValueError: the graph has values that are no buffers; the schedule reads a value before it is made, or does not
            run every op once.
    """
    if not graph.fused and not all(materialised(graph)):
        raise ValueError("expected a graph whose values are all buffers, found elementwise ops: give fuse(graph).graph")
    ops, positions, again, end = _positions(graph, schedule)
    lives = _lives(graph, ops, positions, end)
    _share_places(graph, lives)
    live = bytes_live(lives.size, lives.birth, lives.death, end)
    workspace = np.zeros_like(live)
    workspace[positions] = graph.workspaces[ops]
    live += workspace
    overwritten = _overwritten(graph, lives, ops, positions, again, end)
    live[lives.death[overwritten]] -= lives.size[overwritten]
    on_host = tuple((one.value, *(positions[[one.gone - 1, one.back - 1]] + 1).tolist()) for one in schedule.transfers)
    for value, gone, back in on_host:
        live[gone:back] -= graph.sizes[value]
    return Liveness(live, workspace, lives, overwritten, on_host)


def overwritten_operands(schedule: Schedule, liveness: Liveness) -> dict[tuple[int, int], int]:
    """By the run's index in the schedule and the op, the value that the op writes its result over."""
    lives = liveness.lives
    dying = zip(lives.death[liveness.overwritten].tolist(), lives.value[liveness.overwritten].tolist(), strict=True)
    value_at, found, start = dict(dying), {}, 0
    for index, run in enumerate(schedule.runs):
        start += run.recomputed  # its barrier has a position of its own
        found |= {(index, op): value_at[at] for at, op in enumerate(run.ops, start) if at in value_at}
        start += len(run.ops)
    return found


def bytes_live(size: np.ndarray, birth: np.ndarray, death: np.ndarray, end: int) -> np.ndarray:
    """Bytes of some buffers that are live at each position up to `end`.

    Args:
        size: bytes of each buffer.
        birth, death: the first and the last position at which it is live.
        end: the last position.
    """
    change = np.bincount(birth, size, minlength=end + 2)
    change -= np.bincount(death + 1, size, minlength=end + 2)
    return np.cumsum(change.astype(np.int64))[: end + 1]


def peak_of(graph: Graph) -> int:
    """Bytes that are live at most in a step that runs its ops in the graph's order."""
    return simulate(graph, save_everything(graph)).peak if graph.ops else 0


def minimum_possible(graph: Graph) -> int:
    """Bytes that no schedule's peak is below: what some op needs while it runs, its operands, results and workspace."""
    free = {*graph.inputs, *graph.outputs} - graph.held
    return max((_needed(graph, op, free) for op in graph.ops), default=0)


def _needed(graph: Graph, op: Op, free: set[int]) -> int:
    buffers = {*op.inputs, *op.outputs} - free
    if buffers.intersection(graph.overwritable_by(op)):
        buffers -= {*op.outputs}
    return op.workspace + sum(graph.sizes[value] for value in buffers)


def _positions(graph: Graph, schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The ops in order, their positions, whether each is run again, and the position of the return."""
    lengths = np.array([len(run.ops) for run in schedule.runs], dtype=np.int64)
    recomputed = np.array([run.recomputed for run in schedule.runs], dtype=bool)
    every = itertools.chain.from_iterable(run.ops for run in schedule.runs)
    ops = np.fromiter(every, dtype=np.int64, count=int(lengths.sum()))
    again = np.repeat(recomputed, lengths)
    first = ops[~again]
    if len(first) != len(graph.ops) or (np.bincount(first, minlength=len(graph.ops)) != 1).any():
        raise ValueError("expected every op in exactly one run that is not recomputed")
    positions = np.arange(len(ops)) + np.repeat(np.cumsum(recomputed), lengths)
    return ops, positions, again, len(ops) + int(recomputed.sum())


def _lives(graph: Graph, ops: np.ndarray, positions: np.ndarray, end: int) -> Lives:
    """When every buffer is made and read: events in the order of time, sorted by value, cut where a value is made."""
    events = graph.events
    given, returned = np.array(graph.inputs, dtype=np.int64), np.array(graph.outputs, dtype=np.int64)
    counts = events.touched.counts[ops]
    which = events.touched.places(ops, counts)
    value = np.concatenate([given, events.touched.values[which], returned])
    is_make = np.concatenate([np.ones(len(given), bool), events.makes.values[which], np.zeros(len(returned), bool)])
    at = np.zeros(len(value), dtype=np.int64)
    at[len(given) : len(value) - len(returned)] = np.repeat(positions, counts)
    at[len(value) - len(returned) :] = end
    overwritable = np.zeros(len(value), dtype=bool)
    overwritable[len(given) : len(value) - len(returned)] = graph.overwritable[which]
    order = stable_order(value, len(graph.sizes))
    made, by_value = is_make[order], value[order]
    first = np.flatnonzero(np.diff(by_value, prepend=-1))  # events of each value
    if not made[first].all():
        event = order[first[~made[first]]].min()
        raise ValueError(
            f"expected values to be made before they are read: value {value[event]} is read at position {at[event]}, "
            "too early"
        )
    starts = np.flatnonzero(made)
    # Buffers are numbered in the order in which they are made.
    number = (np.cumsum(is_make) - 1)[order[starts]]
    last = np.append(starts[1:], len(order))[: len(starts)] - 1  # the last event of each instance
    birth = at[is_make]
    death, may_be_overwritten = np.empty_like(birth), np.empty_like(is_make, shape=len(birth))
    death[number], may_be_overwritten[number] = at[order[last]], overwritable[order[last]]
    reader = np.repeat(number, last - starts)  # events of an instance stand behind the one that makes it
    values = value[is_make]
    size = graph.size_array[values]
    size[: len(given)] = 0
    return Lives(
        value=values,
        size=size,
        birth=birth,
        death=death,
        reader=reader,
        read_at=at[order[~made]],
        overwritable=may_be_overwritten,
    )


def _overwritten(
    graph: Graph, lives: Lives, ops: np.ndarray, positions: np.ndarray, again: np.ndarray, end: int
) -> np.ndarray:
    """The first operand of each op that its result is written over."""
    barriers = np.flatnonzero(np.bincount(positions, minlength=end) == 0)
    is_again, reduces = np.zeros(end + 1, dtype=bool), np.zeros(end + 1, dtype=bool)
    is_again[positions], reduces[positions] = again, graph.reduces[ops]
    reduced = np.full(len(lives), -1)  # the last reduction that reads each buffer, in front of the last op that does
    is_before = reduces[lives.read_at] & (lives.read_at < lives.death[lives.reader])
    np.maximum.at(reduced, lives.reader, np.where(is_before, lives.read_at, -1))
    run = np.searchsorted(barriers, lives.death)  # barriers before it
    is_behind_own_barrier = (reduced >= 0) & (run > 0) & (run == np.searchsorted(barriers, reduced))
    is_through_barrier = is_again[lives.death] & (run > np.searchsorted(barriers, lives.birth))
    has_no_barrier = ~is_behind_own_barrier & ~is_through_barrier
    operands = np.flatnonzero(lives.overwritable & has_no_barrier & (lives.size > 0))
    at, first = np.unique(lives.death[operands], return_index=True)
    is_buffer = lives.size[np.searchsorted(lives.birth, at)] > 0  # the result, the first that is made at the position
    return operands[first[is_buffer]]


def _share_places(graph: Graph, lives: Lives) -> None:
    """Results cost nothing, but for those that are held, or that wait for the place of a donated argument."""
    last = np.full(len(graph.sizes), -1, dtype=np.int64)
    last[lives.value] = np.arange(len(lives))  # the last instance of each value
    results = last[graph.results]
    results = results[results >= len(graph.inputs)]
    place = graph.places[lives.value[results]]
    until = np.where((place >= 0) & (lives.read_counts[place] > 0), lives.death[place], -1)
    waits = until > lives.birth[results]
    lives.size[results[~waits]] = 0
    lives.death[results[waits]] = until[waits]


def stable_order(keys: np.ndarray, bound: int) -> np.ndarray:
    """Indices that sort small integers, equal ones as they stand.

    Args:
        keys: from 0.
        bound: that all keys are below. NumPy sorts integers of 16 bits by their digits, in a fraction of the time.
    """
    return np.argsort(keys.astype(np.uint16) if bound <= 1 << 16 else keys, kind="stable")
