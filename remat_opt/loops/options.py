"""Lists the options of each pair of scans with their bytes, FLOPs and seconds, for the search to choose from."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from remat_opt.graph.cost import Rates
from remat_opt.graph.transfers import SMALLEST_COPY
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.costs import Option, PairCosts
from remat_opt.loops.division import Division, divide, unit_of
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import recomputation
from remat_opt.loops.steps import StepSearch
from remat_opt.loops.update import Update
from remat_opt.trace.avals import bytes_of
from remat_opt.trace.inline import Program

MOST_SAVED_SETS = 8
MOST_RESIDUAL_SETS = 6  # that chunks may save
STEPS_OF_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)  # as multiples of the unit of `division.py`
LEVELS_OF_STEPS = (0.0, 0.01, 0.03, 0.1)  # extra FLOPs as a part of the pair's, for the peaks of a step that are tried
GATHER_THRESHOLD = 0.85  # of the least bytes without chunks, where these gather divided weights once more
FEWEST_STEPS = 3  # of loops that are worth chunks
MOST_KINDS = 3  # of chunks in one loop, each of which is compiled for itself
CHUNK_KIND_THRESHOLD = 0.001  # FLOPs as a part of the pair's
COARSELY = 0.9  # times a number of bytes is the next one, until nothing fits
LEAST_PART = 0.01  # of the bytes of one level
FINELY = 120  # numbers of bytes between the most and the least
DIFFERENT = 0.97  # of two options, the smaller one has at most so much of the larger one's bytes
NEARLY_EQUAL = 0.99  # the same for those that no other one beats


@dataclasses.dataclass(frozen=True, eq=False)
class PairOptions:
    """What can be done to a pair, and to all that are equal to it.

    Attributes:
        options: the first one leaves it as it is.
        flops, seconds: FLOPs and estimated seconds of both loops as they are.
        is_recurrent: whether the steps have their weights in common.
    """

    options: tuple[Option, ...]
    flops: float
    seconds: float
    is_recurrent: bool = False

    def is_allowed(self, option: Option, most: float) -> bool:
        """Whether an option recomputes, and waits for copies, at most a part `most` of the pair's work."""
        return option.extra_flops <= most * self.flops and option.stall_seconds <= most * self.seconds


def pair_options(
    program: Program,
    pair: Pair,
    rates: Rates,
    update: Update | None = None,
    steps: StepSearch | None = None,
) -> PairOptions:
    """List what can be done to a pair; arguments as of `PairCosts`."""
    costs = PairCosts(pair, program, rates, update, steps)
    return PairOptions(tuple(_Options(costs).all()), costs.original_flops, costs.original_seconds, costs.is_recurrent)


class _Options:
    def __init__(self, costs: PairCosts):
        self.costs = costs
        self.pair = costs.pair
        self.length = costs.pair.length
        self.updates = (False, True) if costs.update else (False,)
        self.saved_sets = saved_sets(costs)

    def all(self) -> list[Option]:
        found = [self.costs.original_option()]
        starts_from_carry = bool(recomputation(self.pair).carries)
        for saved in self.saved_sets:
            levels = self.step_levels(saved)
            chunks = self.chunks() if not saved and starts_from_carry else ()
            choices = [
                LoopChoice(saved, chunk, update, step_bytes=level)
                for chunk in (None, *chunks)
                for update in self.updates
                for level in levels
            ]
            choices += [dataclasses.replace(one, host=host) for one in choices for host in self.host_sets(one)]
            found += map(self.costs.option, choices)
        if starts_from_carry:
            found += self.in_chunks_of_several_kinds()
        return found if self.costs.program.marks is None else self.gather_threshold(found)

    def host_sets(self, choice: LoopChoice) -> list[frozenset[int]]:
        """What of the stacks of a choice may be in the host's memory: the largest, as long as the copies of a step hide
        beside its work, and all of them."""
        bandwidth = self.costs.rates.host_bandwidth
        if bandwidth is None or choice.chunk is not None:
            return []
        avals = self.pair.forward.body.avals
        large = [v for v in dict.fromkeys(self.costs.handed_over(choice)) if bytes_of(avals[v]) >= SMALLEST_COPY]
        hidden, left = set[int](), min(self.costs.seconds_beside(choice)) * bandwidth
        for value in sorted(large, key=lambda value: (-bytes_of(avals[value]), value)):
            if bytes_of(avals[value]) <= left:
                hidden.add(value)
                left -= bytes_of(avals[value])
        return [*filter(None, dict.fromkeys((frozenset(hidden), frozenset(large))))]

    def gather_threshold(self, options: list[Option]) -> list[Option]:
        """Where arrays are divided among devices, chunks only if they take much less than the carry of each step: what
        a chunk recomputes to come to its steps gathers their weights once more."""
        in_chunks = [option for option in options if option.choice is not None and option.choice.chunk is not None]
        least = min(option.bytes for option in options if option not in in_chunks)
        return [one for one in options if one not in in_chunks or one.bytes <= GATHER_THRESHOLD * least]

    def step_levels(self, saved: frozenset[int]) -> list[int | None]:
        """Peaks of a step that are worth a try, from its own order on: the least bytes for some shares of FLOPs."""
        schedules = self.costs.steps(saved, None).costs.schedules
        levels: list[int | None] = [None]
        above = self.costs.steps(saved, None).costs.in_order.peak
        for share in LEVELS_OF_STEPS:
            most = share * self.costs.original_flops / self.length
            peak = min(one.peak for one in schedules if one.extra_flops <= most)
            if peak <= DIFFERENT * above:
                levels.append(peak)
                above = peak
        return levels

    def in_chunks_of_several_kinds(self) -> list[Option]:
        """Chunks that save few residuals, and before them others: the Pareto front in bytes and FLOPs, thinned."""
        if self.length < FEWEST_STEPS:
            return []
        found: dict[LoopChoice, Option] = {}
        for level in self.step_levels(frozenset()):
            for division in self.divisions(level):
                choice = self.choice_of(division, level)
                found[choice] = self.costs.option(choice)
        return thinned(found.values())

    def divisions(self, level: int | None) -> list[Division]:
        """The fewest FLOPs for some numbers of bytes, from those of one level of steps down to the least."""
        kinds = [
            self.costs.chunk_kind(steps, one, level) for one in self.residual_sets for steps in self.steps_of_chunks
        ]
        last = [self.costs.last_chunk(one, level) for one in self.residual_sets]
        first = max(map(self.costs.first_bytes, self.residual_sets))
        most = self.costs.option(LoopChoice(step_bytes=level)).bytes

        def divided(limits: Sequence[int]) -> list[Division | None]:
            return divide(
                self.length, kinds, last, first, limits, MOST_KINDS, CHUNK_KIND_THRESHOLD * self.costs.original_flops
            )

        coarse = [int(most * COARSELY**count) for count in range(round(math.log(LEAST_PART, COARSELY)))]
        least = min((limit for limit, one in zip(coarse, divided(coarse), strict=True) if one), default=most)
        fine = [int(most * (least / most) ** (count / FINELY)) for count in range(FINELY + 1)]
        return [one for one in divided(fine) if one and one.earlier]  # else it is no division

    def choice_of(self, division: Division, level: int | None) -> LoopChoice:
        """The same as a choice; a last chunk that is like those before it is one of them."""
        earlier, steps, in_chunk = division.earlier, division.last_steps, division.in_last
        if earlier and steps <= earlier[-1].steps and (steps == 1 or in_chunk == earlier[-1].in_chunk):
            steps, in_chunk = earlier[-1].steps, earlier[-1].in_chunk
            earlier = earlier[:-1]
        return LoopChoice(chunk=steps, update=self.updates[-1], in_chunk=in_chunk, earlier=earlier, step_bytes=level)

    @functools.cached_property
    def steps_of_chunks(self) -> list[int]:
        """Numbers of steps that chunks may have."""
        unit = unit_of(self.length)
        return [unit * count for count in STEPS_OF_CHUNKS if 1 < unit * count < self.length]

    @functools.cached_property
    def residual_sets(self) -> list[frozenset[int]]:
        """Sets of residuals that chunks may save: none, some that are expensive, all."""
        expensive = self.saved_sets
        step = max(1, math.ceil((len(expensive) - 1) / (MOST_RESIDUAL_SETS - 1)))
        every = frozenset(self.pair.residuals) - {*self.pair.forward.body.inputs}
        sets = (expensive[0], *reversed(expensive[:0:-step]), every)
        saved = {one: recomputation(self.pair, in_chunk=one).in_chunk for one in sets}
        return [expensive[0], *(one for one, values in saved.items() if one and values)]

    def chunks(self) -> tuple[int, ...]:
        """Chunk sizes worth a try: about √length, which saves least, and few steps, which recompute less."""
        root = best_chunk(self.length)
        return tuple(sorted({c for c in (2, 4, root) if 1 < c < self.length}))


def saved_sets(costs: PairCosts) -> list[frozenset[int]]:
    """Nothing but the carry; then the expensive results of a step, those first that give most time for each byte."""
    loop = costs.pair.forward
    recomputed = recomputation(costs.pair).residuals.equations
    wanted = {*costs.pair.residuals, *(x for i in recomputed for x in loop.body.equations[i].inputs)}
    rated = []
    for index, op in costs.expensive:
        values = frozenset(loop.body.equations[index].outputs) & wanted
        size = costs.body_bytes(values)
        if index in recomputed and size:
            rated.append((-op.seconds / size, index, values))
    found = [frozenset[int]()]
    for _, _, values in sorted(rated, key=lambda one: one[:2]):
        found.append(found[-1] | values)
    step = max(1, math.ceil((len(found) - 1) / MOST_SAVED_SETS))
    return [found[0], *found[1::step]]


def thinned(options: Iterable[Option]) -> list[Option]:
    """The Pareto front in bytes and FLOPs, without options that differ little."""
    best: list[Option] = []
    for option in sorted(options, key=lambda option: (option.bytes, option.extra_flops)):
        if best and option.extra_flops >= best[-1].extra_flops:
            continue
        if len(best) > 1 and best[-2].bytes > NEARLY_EQUAL * option.bytes:
            best.pop()
        best.append(option)
    return best


def best_chunk(length: int) -> int:
    """The chunk size that saves fewest carries: about √length."""

    def saved(chunk: int) -> int:
        return (length - 1) // chunk + 1 + chunk

    root = math.isqrt(length)
    return min(range(max(1, root - 2), root + 4), key=saved)
