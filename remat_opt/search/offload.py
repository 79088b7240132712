"""Saved values in the host's memory: a third choice beside saving and recomputing them.

1. `Stays.hidden` and `Stays.until` (`stays.py`) choose, in a schedule that recomputes, saved values that go to the
   host: those that nothing reads for the longest time, as many as can be copied beside the work; and then, while more
   is live than the budget allows, the one that is read last (Belády 1966).
2. A value with a copy on the host is recomputed by fetching the copy. So the schedule is continued on a graph in which
   each of these values has an op that fetches it (`Fetches`): `drop_recomputation.fill` drops repeats, as in any
   schedule, and fetches last, as they take least time.
3. Fetches become transfers of the original graph (`Placing`). Copies out begin as soon as a value is made and copies
   back early enough to hide, where there is room. What does not hide is a stall; it counts like recomputation
   (`Solution.extra_seconds`).

`OffloadSearch` does so from schedules for the budget and above it, and takes the least time.

Limitations: the first step knows nothing of recomputation, the second does not add transfers; values that the schedule
recomputes, and those of ops with several results, do not go.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.schedule import Run, Schedule, Transfer, join_runs
from remat_opt.search.caching import cached_method
from remat_opt.search.drop_recomputation import fill
from remat_opt.search.problem import Problem, Solution, memory_first, pareto_front, time_first
from remat_opt.search.stays import Stay, Stays, Timeline

_EXPOSED = 0.02  # share of a copy's time that a fetch takes, so that what takes longer is dropped before it
_SHARES = (0.0, 0.4, 0.7, 1.0)  # of what hides
_FOR_COPIES = 0.95  # of a budget is filled: copies on their way back need room, too
_LEVELS = (0.5, 1.0)  # times what hides, above a budget: schedules to start from
_HALVINGS = 6  # of the peak, for the least memory


class Fetches:
    """A graph in which some values are fetched from the host where they are made again.

    The op that makes such a value makes its copy on the host, which takes no memory of the device, and an op right
    after it makes the value of that copy.

    Args:
        graph: the step.
        values: made by ops with one result, and no results of the step.
        bandwidth: bytes per second of the copies.
    """

    def __init__(self, graph: Graph, values: Sequence[int], bandwidth: float):
        host = {value: len(graph.sizes) + number for number, value in enumerate(values)}
        self.op_of: list[int] = []  # of each op the original one; of a fetch the value, inverted
        ops: list[Op] = []
        for index, op in enumerate(graph.ops):
            self.op_of.append(index)
            value = op.outputs[0] if op.outputs else -1
            if value not in host:
                ops.append(op)
                continue
            room = 0 if graph.overwritable_by(op) else graph.sizes[value]
            ops.append(dataclasses.replace(op, outputs=(host[value],), workspace=op.workspace + room, repeatable=False))
            seconds = _EXPOSED * graph.sizes[value] / bandwidth
            ops.append(Op((host[value],), (value,), Kind.ELEMENTWISE, seconds=seconds, name="fetch"))
            self.op_of.append(~value)
        sizes = (*graph.sizes, *(0 for _ in values))
        self.problem = Problem(dataclasses.replace(graph, sizes=sizes, ops=tuple(ops)))
        self.new = {old: new for new, old in enumerate(self.op_of)}

    def schedule(self, runs: Sequence[Run], stays: Sequence[Stay]) -> Schedule:
        """The runs of the original graph with a fetch where each stay ends."""
        ending: dict[int, list[int]] = {}
        for stay in stays:
            ending.setdefault(stay.stop, []).append(self.new[~stay.value])
        found: list[Run] = []
        place = 0
        for run in runs:
            ops: list[int] = []
            for op in run.ops:
                fetches = ending.get(place, [])
                if fetches and not run.recomputed:
                    found += [Run(tuple(ops)), Run(tuple(fetches), recomputed=True)]
                    ops = []
                elif fetches:
                    ops = [*fetches, *ops]  # at its beginning, where alone copies may end
                ops += range(self.new[op], self.new.get(op + 1, len(self.op_of)))  # with the fetch of its result
                place += 1
            found.append(Run(tuple(ops), run.recomputed))
        return join_runs(found)

    def original(self, schedule: Schedule) -> tuple[tuple[Run, ...], list[tuple[int, int]]]:
        """The runs of the original graph, and the fetches: each value with the place before which it is made again."""
        runs, fetched, place = [], [], 0
        for run in schedule.runs:
            ops = tuple(self.op_of[op] for op in run.ops)
            if run.recomputed:
                fetched += [(~op, place) for op in ops if op < 0]
            runs.append(Run(tuple(op for op in ops if op >= 0), run.recomputed))
            place += len(runs[-1].ops)
        return join_runs(runs).runs, fetched


class Placing:
    """Where the copies of one schedule stand.

    Args:
        problem: the step, with the bandwidth of the host's memory.
        runs: of the schedule.
        fetched: values with the places before which they are made again.
    """

    def __init__(self, problem: Problem, runs: tuple[Run, ...], fetched: Sequence[tuple[int, int]]):
        self.problem = problem
        self.timeline = Timeline(problem.graph, runs)
        touches = self.timeline.touches(value for value, _ in fetched)
        self.stays: list[Stay] = []
        for value, place in fetched:
            before = max(at for at in touches[value] if at < place)
            after = min(at for at in touches[value] if at >= place)
            stay = self.timeline.stay(value, touches[value][0], before, after)
            if stay.start < stay.stop:
                self.stays.append(stay)

    def transfers(self, budget: int) -> tuple[Transfer, ...]:
        """Copies out are done as early as they hide, or where the room is needed; copies back begin as late as they
        hide, or where there is room."""
        away = tuple(sorted(Transfer(one.start, one.stop, one.value) for one in self.stays))
        schedule = Schedule(self.timeline.schedule.runs, away)
        live = self.timeline.live(self.problem.scheduled(schedule, Choice()))
        gone = self._gone(live, budget)
        return tuple(sorted(self._back(live, budget, gone)))

    def _gone(self, live: np.ndarray, budget: int) -> dict[Stay, int]:
        timeline, bandwidth = self.timeline, self.problem.host_bandwidth or np.inf
        found: dict[Stay, int] = {}
        free, copied = 0.0, set()
        for stay in sorted(self.stays, key=lambda stay: (stay.made, stay.start)):
            if stay.value not in copied:
                free = max(free, float(timeline.seconds[stay.made + 1])) + stay.size / bandwidth
                copied.add(stay.value)
            done = timeline.first_from(int(np.searchsorted(timeline.seconds, free)))
            full = np.flatnonzero(live[stay.start : stay.stop] + stay.size > budget)
            needed = timeline.last_until(stay.start + int(full[0])) if len(full) else stay.stop
            found[stay] = min(max(stay.start, min(done, needed)), timeline.last_until(stay.stop - 1))
            live[stay.start : found[stay]] += stay.size
        return found

    def _back(self, live: np.ndarray, budget: int, gone: dict[Stay, int]) -> Iterable[Transfer]:
        timeline, bandwidth = self.timeline, self.problem.host_bandwidth or np.inf
        free = np.inf
        for stay in sorted(self.stays, key=lambda stay: (-stay.stop, stay.value)):
            free = min(free, float(timeline.seconds[stay.stop])) - stay.size / bandwidth
            begin = timeline.last_until(max(int(np.searchsorted(timeline.seconds, free, side="right")) - 1, 0))
            full = np.flatnonzero(live[gone[stay] : stay.stop] + stay.size > budget)
            room = timeline.first_from(gone[stay] + 1 + (int(full[-1]) if len(full) else 0))
            back = min(max(begin, room), stay.stop)
            live[back : stay.stop] += stay.size
            yield Transfer(gone[stay], back, stay.value)


class RecomputeSearch(Protocol):
    """What is asked of `auto.Search`."""

    def within(self, budget: int) -> Solution: ...
    def at(self, budget: int, below: Solution) -> Solution: ...
    def is_one_pass(self, solution: Solution) -> bool: ...
    @functools.cached_property
    def low_end(self) -> list[Solution]: ...
    @functools.cached_property
    def minimum_memory(self) -> Solution: ...
    @functools.cached_property
    def least_allocated(self) -> Solution: ...
    @functools.cached_property
    def minimum_at_any_cost(self) -> Solution: ...
    @functools.cached_property
    def most_barriers(self) -> Solution: ...
    @functools.cached_property
    def frontier(self) -> tuple[Solution, ...]: ...
    @functools.cached_property
    def short_frontier(self) -> tuple[Solution, ...]: ...


class OffloadSearch:
    """The search of one problem whose values may go to the host; asked as `auto.Search`.

    Args:
        problem: with the bandwidth of the host's memory.
        recomputing: its search for schedules that only recompute.
    """

    def __init__(self, problem: Problem, recomputing: RecomputeSearch):
        self.problem = problem
        self.recomputing = recomputing

    @property
    def bytes_that_hide(self) -> float:
        """What can be copied to the host in half of the step's time, and back in the other half."""
        return 0.5 * self.problem.graph.seconds * (self.problem.host_bandwidth or 0.0)

    @property
    def most_barriers(self) -> Solution:
        """See `auto.Search.most_barriers`."""
        return self.recomputing.most_barriers

    def is_one_pass(self, solution: Solution) -> bool:
        """See `auto.Search.is_one_pass`; stalls count, too."""
        return self.recomputing.is_one_pass(solution)

    def within(self, budget: int) -> Solution:
        """The least extra time within a budget, or the least peak where nothing fits."""
        fitting = [one for one in self.near(budget) if one.peak <= budget]
        return min(fitting, key=time_first) if fitting else self.minimum_at_any_cost

    @cached_method
    def near(self, budget: int) -> tuple[Solution, ...]:
        """Schedules for a budget with and without transfers."""
        alone = self.recomputing.within(budget)
        if alone is self.problem.plain:
            return (alone,)
        starts = [alone]
        for level in _LEVELS:
            limit = budget + int(level * self.bytes_that_hide)
            if limit >= self.problem.plain.peak:
                starts.append(self.problem.plain)
                break
            if starts[-1].peak <= limit:
                starts.append(self.recomputing.at(limit, starts[-1]))
        if alone.peak > budget or not self.is_one_pass(alone):  # recomputation alone has come to its end
            starts += [self.recomputing.minimum_memory, self.problem.plain]
        return (alone, *(one for start in starts for one in self.moved(start, budget)))

    def moved(self, start: Solution, budget: int) -> Iterable[Solution]:
        """Schedules with transfers that are made of another one, for a budget."""
        if not start.schedule.runs:
            return
        stays = self.stays_of(start)
        for share in _SHARES:
            chosen = stays.until(budget, stays.hidden(share * self.bytes_that_hide))
            if chosen:
                yield self.with_transfers(start, chosen, budget)

    @cached_method
    def stays_of(self, start: Solution) -> Stays:
        """The values of a schedule that may go."""
        return Stays(start)

    def with_transfers(self, start: Solution, stays: Sequence[Stay], budget: int) -> Solution:
        """A schedule in which some values go to the host, with what of its repeats there is room to drop."""
        values = sorted(stay.value for stay in stays)
        fetches = Fetches(self.problem.graph, values, self.problem.host_bandwidth or np.inf)
        moved = fetches.problem.scheduled(fetches.schedule(start.schedule.runs, stays), start.origin)
        filled = fill(fetches.problem, moved, max(moved.peak, int(_FOR_COPIES * budget)))
        runs, fetched = fetches.original(filled.schedule)
        transfers = Placing(self.problem, runs, fetched).transfers(budget) if fetched else ()
        saved = start.choice.saved | {one.value for one in transfers}
        return self.problem.scheduled(Schedule(runs, transfers), dataclasses.replace(start.choice, saved=saved))

    @functools.cached_property
    def minimum_memory(self) -> Solution:
        """The least peak with at most the time and the FLOPs of one extra forward pass."""
        return self._minimum(self.recomputing.minimum_memory, self.is_one_pass)

    @functools.cached_property
    def least_allocated(self) -> Solution:
        """See `auto.Search.least_allocated`."""
        return min(self.minimum_memory, self.recomputing.least_allocated, key=lambda one: one.allocated)

    @functools.cached_property
    def minimum_at_any_cost(self) -> Solution:
        """The least peak."""
        return self._minimum(self.recomputing.minimum_at_any_cost, lambda _: True)

    def _minimum(self, best: Solution, is_allowed: Callable[[Solution], bool]) -> Solution:
        """The least peak that is allowed: values go from schedules that have little of it already."""
        starts, low = [best, *self.recomputing.low_end], 0
        for _ in range(_HALVINGS):
            budget = (low + best.peak) // 2
            every = (one for start in starts for one in self.moved(start, budget))
            found = [one for one in every if one.peak < best.peak and is_allowed(one)]
            low, best = (low, min(found, key=memory_first)) if found else (budget, best)
        return best

    @functools.cached_property
    def frontier(self) -> tuple[Solution, ...]:
        """From the least memory to the plain step."""
        return self._with_transfers(self.recomputing.frontier)

    @functools.cached_property
    def short_frontier(self) -> tuple[Solution, ...]:
        """The same from its two ends."""
        return self._with_transfers(self.recomputing.short_frontier)

    def _with_transfers(self, front: Sequence[Solution]) -> tuple[Solution, ...]:
        moved = (one for start in front for one in self.moved(start, start.peak))
        return pareto_front([*front, self.minimum_memory, *moved])
