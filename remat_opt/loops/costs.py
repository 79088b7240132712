"""Bytes, FLOPs and seconds of a pair for any choice."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Sequence

from remat_opt.graph.build import (
    Bridge,
    build,
    bytes_of,
    in_its_own_order,
    peak_as_written,
    workspace_of_loops,
)
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Kind
from remat_opt.loops.body import Atom, slice_back
from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.loops.constants import constant_equations
from remat_opt.loops.division import ChunkKind, LastChunk
from remat_opt.loops.memory import ChunkSizes, chunk_sizes, memory_of
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import Recomputation, Recomputations, joint_step, recomputation
from remat_opt.loops.steps import StepCost, StepCosts, StepSearch
from remat_opt.loops.update import Update
from remat_opt.trace.flops import flops_of
from remat_opt.trace.inline import Constant, Program

EXPENSIVE = (Kind.CONTRACTION, Kind.OPAQUE)


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to write a pair.

    Attributes:
        choice: what is done; None leaves the pair as it is.
        kept_bytes: stacks and carries that live from the forward to the reverse loop.
        transient_bytes: what the reverse loop needs beside them while it runs: the peak of one step, the carries of a
            chunk, the stacks of gradients that it leaves to an update outside.
        extra_flops: FLOPs beyond those of the pair as it is.
        extra_seconds: estimated seconds beyond those of the pair as it is.
    """

    choice: LoopChoice | None
    kept_bytes: int
    transient_bytes: int
    extra_flops: float
    extra_seconds: float

    @property
    def bytes(self) -> int:
        """All that it needs while the reverse loop runs."""
        return self.kept_bytes + self.transient_bytes


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs and estimated seconds."""

    flops: float
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatedStep:
    """What one step of the reverse loop repeats, with its costs.

    Attributes:
        repeats: what it repeats.
        again: of what it repeats for its residuals.
        advance: of what its chunk repeats to come to the next step.
        costs: of the whole step, for each of its schedules.
    """

    repeats: Recomputation
    again: Work
    advance: Work
    costs: StepCosts


class PairCosts:
    """What a pair costs, however it is written.

    Args:
        pair: the loops.
        program: the flat step.
        rates: the target.
        update: the optimizer's update, where the reverse loop could do it.
        steps: searches schedules of a step; None leaves each step in its own order.
    """

    def __init__(
        self, pair: Pair, program: Program, rates: Rates, update: Update | None, steps: StepSearch | None = None
    ):
        self.program = program
        self.pair = pair
        self.rates = rates
        self.update = update
        self.step_search = steps
        self.known_steps: dict[tuple[frozenset[int], frozenset[int] | None], RepeatedStep] = {}
        self.known_first: dict[tuple[Atom, ...], Work] = {}
        loop = pair.forward
        graph = self.forward_bridge.graph
        self.flops = [flops_of(equation, loop.body) for equation in loop.body.equations]
        self.seconds = [0.0] * len(self.flops)
        self.expensive: list[int] = []  # equations whose results are worth keeping
        for op, index in enumerate(self.forward_bridge.equation_of):
            self.seconds[index] = graph.ops[op].seconds
            if graph.ops[op].kind in EXPENSIVE:
                self.expensive.append(index)

    @functools.cached_property
    def forward_bridge(self) -> Bridge:
        return build(self.pair.forward.body, self.rates)

    @functools.cached_property
    def original(self) -> Work:
        """Of both loops as they are."""
        loops = (self.pair.forward.equation, self.pair.backward.equation)
        backward = build(self.pair.backward.body, self.rates).graph
        seconds = self.pair.length * (self.forward_bridge.graph.seconds + backward.seconds)
        return Work(sum(flops_of(equation, self.program) for equation in loops), seconds)

    @functools.cached_property
    def is_recurrent(self) -> bool:
        """Whether the steps have their weights in common, as over time, and not one slice of stacks each, as layers."""
        loop, known = self.pair.forward, constant_equations(self.program)
        in_common = [
            value
            for value, atom in zip(loop.body_constants, loop.constants, strict=True)
            if not isinstance(atom, Constant) and atom not in known
        ]
        return self.body_bytes(in_common) > self.body_bytes(loop.body_xs)

    def original_option(self) -> Option:
        """The pair as it is."""
        kept = sum(self.stack_bytes(self.pair.forward.ys[y]) for y in self.pair.residual_ys)
        backward = self.pair.backward.equation
        peak = workspace_of_loops(backward.primitive, backward.params, in_its_own_order(self.rates))
        return Option(None, kept, peak + self.gradient_bytes(False), 0.0, 0.0)

    def option(self, choice: LoopChoice) -> Option:
        """The pair as a choice says."""
        groups = choice.groups(self.pair.length) if choice.chunk is not None else ()
        alone = self.steps(choice.saved, None if choice.chunk is None else frozenset())
        of_group = [self.steps(choice.saved, chunks.in_chunk) for chunks in groups]
        repeats = Recomputations(alone.repeats, tuple(group.repeats for group in of_group))
        peaks = {
            one.repeats: one.costs.chosen(choice.step_bytes, is_alone=one is alone).peak for one in (alone, *of_group)
        }
        kept, transient = memory_of(self.pair, choice, repeats, peaks.__getitem__)
        runs = self._forward_recomputed(choice, repeats)
        if choice.chunk is None:
            runs += _steps_recomputed(self.pair.length, alone, choice.step_bytes, is_alone=True)
        else:
            last = Chunks(1, choice.last_chunk(self.pair.length), choice.in_chunk)
            runs.append((self.pair.length, self._selected(choice, groups, repeats)))
            for chunks, group in zip(groups, of_group, strict=True):
                runs += _chunks_recomputed(chunks, alone, group, choice.step_bytes, is_last=False)
            runs += _chunks_recomputed(last, alone, of_group[-1], choice.step_bytes, is_last=True)
        return Option(
            choice,
            kept,
            transient + self.gradient_bytes(choice.update),
            _flops_of(runs),
            sum(times * work.seconds for times, work in runs),
        )

    def chunk_kind(self, steps: int, in_chunk: frozenset[int], step_bytes: int | None) -> ChunkKind:
        """Chunks of several steps, for a division of the loop."""
        alone, group, sizes = self._chunk(in_chunk, step_bytes, is_last=False)
        runs = _chunks_recomputed(Chunks(1, steps, in_chunk), alone, group, step_bytes, is_last=False)
        return ChunkKind(steps, in_chunk, sizes.turned_round(steps), _flops_of(runs))

    def last_chunk(self, in_chunk: frozenset[int], step_bytes: int | None) -> LastChunk:
        """The last chunk of such a division."""
        alone, group, sizes = self._chunk(in_chunk, step_bytes, is_last=True)
        single, pair = (
            _flops_of(_chunks_recomputed(Chunks(1, steps, in_chunk), alone, group, step_bytes, is_last=True))
            for steps in (1, 2)
        )
        return LastChunk(in_chunk, sizes.turned_round(1), sizes.each, single, pair - single)

    def first_bytes(self, in_chunk: frozenset[int]) -> int:
        """Of the carries that a chunk starts from."""
        return self._chunk(in_chunk, None, is_last=False)[2].first

    def _chunk(
        self, in_chunk: frozenset[int], step_bytes: int | None, *, is_last: bool
    ) -> tuple[RepeatedStep, RepeatedStep, ChunkSizes]:
        alone, group = self.steps(frozenset(), frozenset()), self.steps(frozenset(), in_chunk)
        peaks = {one.repeats: one.costs.chosen(step_bytes, is_alone=one is alone).peak for one in (alone, group)}
        return alone, group, chunk_sizes(self.pair, alone.repeats, group.repeats, peaks.__getitem__, is_last=is_last)

    def _forward_recomputed(self, choice: LoopChoice, repeats: Recomputations) -> list[tuple[int, Work]]:
        """The forward loop beyond the one as it is: it leaves out what only the residuals needed."""
        loop, length = self.pair.forward, self.pair.length
        in_last = repeats.last_chunk.in_chunk if choice.chunk is not None else ()
        wanted = (*loop.next_carry, *(loop.body_ys[y] for y in self.pair.kept_ys), *repeats.saved, *in_last)
        if wanted not in self.known_first:
            self.known_first[wanted] = self.work(slice_back(loop, wanted).equations)
        return [(length, self.known_first[wanted]), (-length, self.work(range(len(self.flops))))]

    def _selected(self, choice: LoopChoice, groups: Sequence[Chunks], repeats: Recomputations) -> Work:
        """What a step of the forward loop selects for the stacks that may not be written by every step."""
        loop = self.pair.forward
        values = [
            loop.body_carry[at]
            for chunks, again in zip(groups, repeats.of_group, strict=True)
            for at in again.advanced
            if chunks.number
        ]
        if choice.last_chunk(self.pair.length) > 1:
            values += repeats.last_chunk.in_chunk
        return Work(sum(math.prod(loop.body.avals[value].shape) for value in values), 0.0)

    def steps(self, saved: frozenset[int], in_chunk: frozenset[int] | None) -> RepeatedStep:
        """What a step repeats; `in_chunk` is None for one level."""
        if (saved, in_chunk) not in self.known_steps:
            choice = LoopChoice(saved) if in_chunk is None else LoopChoice(saved, 1, in_chunk=in_chunk)
            again = recomputation(self.pair, choice)
            step = joint_step(self.pair, again, self.program)
            if self.step_search:
                costs = self.step_search.costs(step)
            else:
                costs = StepCosts((StepCost(peak_as_written(step.program, self.rates), 0.0, 0.0),))
            self.known_steps[saved, in_chunk] = RepeatedStep(
                again, self.work(again.again.equations), self.work(again.advance.equations), costs
            )
        return self.known_steps[saved, in_chunk]

    def work(self, equations: Iterable[int]) -> Work:
        """Of some equations of the forward body."""
        equations = tuple(equations)
        return Work(sum(self.flops[i] for i in equations), sum(self.seconds[i] for i in equations))

    def gradient_bytes(self, update: bool) -> int:
        """Stacks of gradients that the reverse loop writes for an update that could be done inside."""
        if self.update is None or update:
            return 0
        return sum(self.stack_bytes(self.pair.backward.ys[y]) for y in self.update.gradients)

    def stack_bytes(self, value: int) -> int:
        return bytes_of(self.program.avals[value])

    def body_bytes(self, values: Collection[int] | Iterable[int]) -> int:
        return sum(bytes_of(self.pair.forward.body.avals[value]) for value in values)


def _chunks_recomputed(
    chunks: Chunks, alone: RepeatedStep, group: RepeatedStep, step_bytes: int | None, *, is_last: bool
) -> list[tuple[int, Work]]:
    """What the reverse loop repeats for some chunks; it has all carries of the last one."""
    others = chunks.number * (chunks.steps - 1)
    runs = _steps_recomputed(chunks.number, alone, step_bytes, is_alone=True)
    runs += _steps_recomputed(others, group, step_bytes, is_alone=group is alone)
    return runs if is_last else [*runs, (others, group.advance)]


def _steps_recomputed(
    times: int, step: RepeatedStep, step_bytes: int | None, *, is_alone: bool
) -> list[tuple[int, Work]]:
    schedule = step.costs.chosen(step_bytes, is_alone=is_alone)
    return [(times, step.again), (times, Work(schedule.extra_flops, schedule.extra_seconds))]


def _flops_of(runs: Iterable[tuple[int, Work]]) -> float:
    return sum(times * work.flops for times, work in runs)
