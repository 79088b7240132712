"""What each run of a schedule reads, makes and waits for.

The liveness model and the writer both read a schedule through this module, so that the simulated and the emitted
program agree.
"""

from __future__ import annotations

import dataclasses

from remat_opt.graph.graph import Graph
from remat_opt.graph.schedule import Run, Schedule
from remat_opt.graph.transfers import first_reads


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """The boundary of a recomputed run: all of `covered` goes through its barrier.

    Attributes:
        reads: values that the run's ops read and do not make themselves.
        makes: values that the run makes and that are read later.
        waits: values made since the recomputed run before this one and still to be read: the cotangents. Values that
            are in the host's memory, or on their way back and not read yet, are not among them.
        window: older values that the ops between this and the next recomputed run read; they are read behind the
            barrier, so that no work on them can be done before it.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    waits: tuple[int, ...]
    window: tuple[int, ...]

    @property
    def passed_on(self) -> tuple[int, ...]:
        """Values that leave the barrier as they entered it, to be read behind it."""
        return tuple(dict.fromkeys((*self.waits, *self.window)))

    @property
    def covered(self) -> tuple[int, ...]:
        """Everything that goes through the barrier."""
        return tuple(dict.fromkeys((*self.reads, *self.waits, *self.window)))


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One run with its boundary; `crossing` is None for a run that is not recomputed."""

    run: Run
    crossing: Crossing | None


def timeline(graph: Graph, schedule: Schedule) -> tuple[Stage, ...]:
    """Give every recomputed run its boundary.

    Raises:
        ValueError: the schedule reads a value before it is made, or does not run every op once.
    """
    _check(graph, schedule)
    live_after = _live_after(graph, schedule)
    stages = []
    fresh: dict[int, None] = {}  # made since the last recomputed run, in order
    needed, start = first_reads(graph, schedule), 0
    for index, run in enumerate(schedule.runs):
        made = dict.fromkeys(value for op in run.ops for value in graph.ops[op].outputs)
        away = {one.value for one, read in needed.items() if one.gone <= start and start + len(run.ops) <= read}
        start += len(run.ops)
        if not run.recomputed:
            fresh.update(made)
            stages.append(Stage(run, None))
            continue
        reads = tuple(_outside_reads(graph, run))
        makes = tuple(value for value in made if value in live_after[index])
        waits = tuple(value for value in fresh if value in live_after[index] - away and value not in made)
        window = _window(graph, schedule, index, {*made, *fresh, *away})
        stages.append(Stage(run, Crossing(reads, makes, waits, window)))
        fresh = {}
    return tuple(stages)


def _outside_reads(graph: Graph, run: Run) -> dict[int, None]:
    """Values that a run reads and does not make, in order."""
    made: set[int] = set()
    reads: dict[int, None] = {}
    for op in run.ops:
        reads.update((value, None) for value in graph.ops[op].inputs if value not in made)
        made.update(graph.ops[op].outputs)
    return reads


def _live_after(graph: Graph, schedule: Schedule) -> list[set[int]]:
    """For each recomputed run the values that are read after it before they are recomputed; empty for other runs."""
    live = set(graph.outputs)
    after: list[set[int]] = []
    for run in reversed(schedule.runs):
        after.append(set(live) if run.recomputed else set())
        live.difference_update(value for op in run.ops for value in graph.ops[op].outputs)
        live.update(_outside_reads(graph, run))
    return after[::-1]


def _window(graph: Graph, schedule: Schedule, index: int, newer: set[int]) -> tuple[int, ...]:
    window: dict[int, None] = {}
    later = set(newer)
    for run in schedule.runs[index + 1 :]:
        if run.recomputed:
            break
        for op in run.ops:
            window.update(dict.fromkeys(value for value in graph.ops[op].inputs if value not in later))
            later.update(graph.ops[op].outputs)
    return tuple(window)


def _check(graph: Graph, schedule: Schedule) -> None:
    first = [op for run in schedule.runs if not run.recomputed for op in run.ops]
    if sorted(first) != list(range(len(graph.ops))):
        raise ValueError("expected every op in exactly one run that is not recomputed")
    known = set(graph.inputs)
    for op in schedule.order:
        if not known.issuperset(graph.ops[op].inputs):
            missing = next(value for value in graph.ops[op].inputs if value not in known)
            raise ValueError(
                f"expected values to be made before they are read: op {op} reads value {missing} too early"
            )
        known.update(graph.ops[op].outputs)


def guards(graph: Graph, schedule: Schedule) -> dict[int, tuple[int, int]]:
    """Which updates have to be told that their donated argument is free.

    A compiler decides by dependencies alone whether a result may take a donated argument's place, before it has an
    order. An update depends on its gradient, not on the other readers of the old weight; where the last of those is no
    ancestor of the update, its result and the old weight are read behind one barrier.

    Returns:
        For each such update op the donated argument and the value it has to wait for.
    """
    producer = graph.producer
    position = {op: at for at, op in enumerate(schedule.order)}  # of the last time that an op runs
    first = {op: at for at, op in enumerate(op for run in schedule.runs if not run.recomputed for op in run.ops)}
    found: dict[int, tuple[int, int]] = {}
    for given, output in graph.aliases:
        update = producer[output]
        if update < 0:
            continue
        readers = [user for user in graph.users[given] if first[user] < first[update]]
        readers = [user for user in readers if not _leads_to_outputs_only(graph, user, first[update], first)]
        if not readers:
            continue
        last = max(readers, key=position.__getitem__)
        waits = [v for v in graph.ops[last].outputs if any(first[user] > first[update] for user in graph.users[v])]
        if waits and position[last] < position[update] and not _is_ancestor(graph, last, update, first):
            found[update] = (given, waits[0])
    return found


def _leads_to_outputs_only(graph: Graph, op: int, limit: int, first: dict[int, int]) -> bool:
    """Whether nothing after position `limit` reads what an op makes: an update's own inner steps."""
    return all(first[user] <= limit for value in graph.ops[op].outputs for user in graph.users[value])


def _is_ancestor(graph: Graph, ancestor: int, op: int, first: dict[int, int]) -> bool:
    seen: set[int] = set()
    stack = [op]
    while stack:
        current = stack.pop()
        if current == ancestor:
            return True
        for value in graph.ops[current].inputs:
            maker = graph.producer[value]
            if maker >= 0 and maker not in seen and first[maker] >= first[ancestor]:
                seen.add(maker)
                stack.append(maker)
    return False
