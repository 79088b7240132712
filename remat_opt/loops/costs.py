"""Bytes, FLOPs and seconds of a pair for any choice."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

from remat_opt.graph.build import (
    Bodies,
    Bridge,
    build,
    bytes_of,
    workspace_of_loops,
)
from remat_opt.graph.cost import Rates, kernel_seconds
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.liveness import peak_of
from remat_opt.loops.body import Atom
from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.loops.division import ChunkKind, LastChunk
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import Recomputation, forward_step, joint_step, recomputation
from remat_opt.loops.steps import StepCost, StepCosts, StepSearch
from remat_opt.loops.update import Update
from remat_opt.trace.flops import flops_of
from remat_opt.trace.inline import BackwardSlice, Constant, Program

EXPENSIVE = (Kind.CONTRACTION, Kind.OPAQUE)


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to write a pair.

    Attributes:
        choice: what is done; None leaves the pair as it is.
        kept_bytes: stacks and carries that live from the forward to the reverse loop.
        transient_bytes: what the reverse loop needs in addition while it runs: the peak of one step, the carries of a
            chunk, the stacks of gradients that it leaves to an update outside.
        extra_flops: FLOPs beyond those of the pair as it is.
        extra_seconds: estimated seconds beyond those of the pair as it is, `stall_seconds` among them.
        stall_seconds: how long the loops wait for copies to the host's memory and back.
    """

    choice: LoopChoice | None
    kept_bytes: int
    transient_bytes: int
    extra_flops: float
    extra_seconds: float
    stall_seconds: float = 0.0

    @property
    def bytes(self) -> int:
        """All that it needs while the reverse loop runs."""
        return self.kept_bytes + self.transient_bytes


@dataclasses.dataclass(frozen=True)
class ChunkSizes:
    """Bytes of one chunk of a loop.

    Attributes:
        first: the carries that it starts from, which the forward loop saves.
        each: carries and residuals of one of its steps, but the last one.
        last: carries of its last step, whose residuals are not saved.
        step: peak of one of its steps, without the stacks that it reads.
    """

    first: int
    each: int
    last: int
    step: int

    def saved(self, steps: int) -> int:
        """What there is of a chunk of so many steps when it starts to run in reverse; of the last chunk the forward
        loop saves it."""
        return (steps - 1) * self.each + self.last

    def peak(self, steps: int) -> int:
        """What the chunk needs in addition to the first carries of the chunks."""
        return self.saved(steps) + self.step


@dataclasses.dataclass(frozen=True, eq=False)
class StepKind:
    """Steps of the reverse loop that recompute the same.

    Attributes:
        recomputation: what they recompute.
        costs: of the whole step, for each of its schedules.
        is_alone: nothing but carries is saved for them.
    """

    recomputation: Recomputation
    costs: StepCosts
    is_alone: bool

    def schedule(self, step_bytes: int | None) -> StepCost:
        """See `LoopChoice.step_bytes`."""
        return self.costs.chosen(step_bytes, is_alone=self.is_alone)

    def seconds(self, step_bytes: int | None) -> float:
        """Of one step."""
        return self.costs.seconds + self.schedule(step_bytes).extra_seconds


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
        self.known_steps: dict[tuple[frozenset[int], frozenset[int] | None], StepKind] = {}
        self.known_forward: dict[tuple[Atom, ...], BackwardSlice] = {}
        self.known_seconds: dict[tuple[tuple[int, ...], tuple[Atom, ...]], float] = {}

    @functools.cached_property
    def forward_bridge(self) -> Bridge:
        return build(self.pair.forward.body, self.rates)

    @functools.cached_property
    def expensive(self) -> list[tuple[int, Op]]:
        """Equations of the forward body whose results are worth saving."""
        ops = zip(self.forward_bridge.equation_of, self.forward_bridge.graph.ops, strict=True)
        return [(index, op) for index, op in ops if op.kind in EXPENSIVE]

    @functools.cached_property
    def flops_of_equations(self) -> list[float]:
        """Of each equation of the forward body."""
        body = self.pair.forward.body
        return [flops_of(equation, body) for equation in body.equations]

    def flops(self, equations: Iterable[int]) -> float:
        """Of some equations of the forward body."""
        return sum(self.flops_of_equations[index] for index in equations)

    def seconds(self, equations: tuple[int, ...], stored: tuple[Atom, ...]) -> float:
        """Of some equations of the forward body by themselves, of whose values only some are stored: what is fused into
        the kernel that reads it takes hardly any time."""
        if (equations, stored) not in self.known_seconds:
            alone = forward_step(self.pair, equations, stored, self.program)
            self.known_seconds[equations, stored] = build(alone, self.rates).graph.seconds
        return self.known_seconds[equations, stored]

    @functools.cached_property
    def original_flops(self) -> float:
        """Of both loops as they are."""
        return sum(flops_of(loop.equation, self.program) for loop in (self.pair.forward, self.pair.backward))

    @functools.cached_property
    def original_seconds(self) -> float:
        """Of both loops as they are."""
        backward = build(self.pair.backward.body, self.rates).graph.seconds
        return self.pair.length * (self.forward_bridge.graph.seconds + backward)

    @functools.cached_property
    def is_recurrent(self) -> bool:
        """Whether the steps have their weights in common, as over time, and not one slice of stacks each, as layers."""
        loop = self.pair.forward
        in_common = [
            value
            for value, atom in zip(loop.body_constants, loop.constants, strict=True)
            if not isinstance(atom, Constant) and atom not in self.program.constant
        ]
        return self.body_bytes(in_common) > self.body_bytes(loop.body_xs)

    def original_option(self) -> Option:
        """The pair as it is."""
        kept = self.stack_bytes(self.pair.forward.ys[y] for y in self.pair.residual_ys)
        backward = self.pair.backward.equation
        peak = workspace_of_loops(backward.primitive, backward.params, Bodies(self.rates))
        return Option(None, kept, peak + self.gradient_bytes(False), 0.0, 0.0)

    def option(self, choice: LoopChoice) -> Option:
        """The pair as a choice says."""
        kept, transient = self.memory(choice)
        stalls = sum(self.stalls(choice))
        seconds = self.pair.length * self.forward_seconds(choice) + self.reverse_seconds(choice) + stalls
        transient += self.gradient_bytes(choice.update)
        return Option(choice, kept, transient, self.extra_flops(choice), seconds - self.original_seconds, stalls)

    def reverse_seconds(self, choice: LoopChoice) -> float:
        """Of the reverse loop as a choice says."""
        alone, of_group = self.kinds(choice)
        groups = choice.groups(self.pair.length)
        if not groups:
            return self.pair.length * alone.seconds(choice.step_bytes)
        last = Chunks(1, choice.last_chunk(self.pair.length), choice.in_chunk)
        seconds = 0.0
        for chunks, kind in (*zip(groups, of_group, strict=True), (last, of_group[-1])):
            count = chunks.number * (chunks.steps - 1)
            seconds += chunks.number * alone.seconds(choice.step_bytes) + count * kind.seconds(choice.step_bytes)
            if chunks is not last:  # its carries were saved
                seconds += count * self.seconds_in_chunk(kind.recomputation)
        return seconds

    def seconds_in_chunk(self, recomputed: Recomputation) -> float:
        """Of one step of the forward loop of a chunk, which is recomputed."""
        carries = (self.pair.forward.next_carry[at] for at in recomputed.forward_carries)
        return self.seconds(recomputed.forward.equations, (*carries, *recomputed.in_chunk))

    def memory(self, choice: LoopChoice) -> tuple[int, int]:
        """What is saved from the forward to the reverse loop, and what the reverse loop needs in addition, in bytes."""
        alone, of_group = self.kinds(choice)
        length, groups = self.pair.length, choice.groups(self.pair.length)
        if choice.chunk is None:
            stacked = {*self.handed_over(choice)}
            fetched = 2 * self.body_bytes(stacked & choice.host)  # for this step and the next one
            kept = length * self.body_bytes(stacked - choice.host)
            return kept, alone.schedule(choice.step_bytes).peak + fetched
        saved = length * self.body_bytes({v for kind in (alone, *of_group) for v in kind.recomputation.saved})
        # From the chunks that run in reverse last to those that are first.
        peak = firsts = saved
        for chunks, kind in zip(groups, of_group, strict=True):
            if chunks.number:
                sizes = self.chunk_sizes(alone, kind, choice.step_bytes, is_single=chunks.steps == 1)
                firsts += chunks.number * sizes.first
                peak = max(peak, firsts + sizes.peak(chunks.steps))
        last = choice.last_chunk(length)
        sizes = self.chunk_sizes(alone, of_group[-1], choice.step_bytes, is_single=last == 1, is_last=True)
        kept = firsts + sizes.saved(last)
        return kept, max(peak, kept + sizes.step) - kept

    def handed_over(self, choice: LoopChoice) -> tuple[int, ...]:
        """One level: values of the forward body that the forward loop stacks for the reverse loop."""
        recomputed = self.kinds(choice)[0].recomputation
        return (*recomputed.saved, *(self.pair.forward.body_carry[at] for at in recomputed.carries))

    def stalls(self, choice: LoopChoice) -> tuple[float, float]:
        """Seconds that the forward and the reverse loop wait for copies out and back: what one step's copies take
        beyond the step's work."""
        if not choice.host or self.rates.host_bandwidth is None:
            return 0.0, 0.0
        copies = self.body_bytes(choice.host) / self.rates.host_bandwidth
        work = self.seconds_beside(choice)
        out, back = (self.pair.length * max(copies - seconds, 0.0) for seconds in work)
        return out, back

    def seconds_beside(self, choice: LoopChoice) -> tuple[float, float]:
        """One level: the work of one step of the forward and of the reverse loop, beside which copies can run."""
        return self.forward_seconds(choice), self.kinds(choice)[0].seconds(choice.step_bytes)

    def chunk_sizes(
        self,
        alone: StepKind,
        others: StepKind,
        step_bytes: int | None,
        *,
        is_single: bool = False,
        is_last: bool = False,
    ) -> ChunkSizes:
        """Bytes of chunks of one kind.

        Args:
            alone: the chunk's last step.
            others: its other steps.
            step_bytes: see `LoopChoice`.
            is_single: it has one step.
            is_last: of the last chunk, all of whose carries the forward loop saves.
        """
        first, carries = (
            self.carry_bytes(at) for at in (others.recomputation.forward_carries, alone.recomputation.carries)
        )
        peak, in_chunk = alone.schedule(step_bytes).peak, others.recomputation.in_chunk
        if is_single or not in_chunk:
            return ChunkSizes(first, carries, carries, peak)
        each = self.body_bytes(in_chunk) + (carries if is_last else self.carry_bytes(others.recomputation.carries))
        return ChunkSizes(first, each, carries if is_last else first, max(peak, others.schedule(step_bytes).peak))

    def extra_flops(self, choice: LoopChoice) -> float:
        """What the loops do beyond those as they are."""
        alone, of_group = self.kinds(choice)
        loop, length = self.pair.forward, self.pair.length
        groups = choice.groups(length)
        flops = length * (self.flops(self.forward_slice(choice).equations) - sum(self.flops_of_equations))
        if not groups:
            return flops + length * self.flops_recomputed(alone, choice.step_bytes)
        last, avals = Chunks(1, choice.last_chunk(length), choice.in_chunk), loop.body.avals
        flops += length * sum(math.prod(avals[value].shape) for value in self.selected(choice))
        for chunks, kind in zip(groups, of_group, strict=True):
            flops += self.flops_of_chunks(chunks, alone, kind, choice.step_bytes, is_last=False)
        return flops + self.flops_of_chunks(last, alone, of_group[-1], choice.step_bytes, is_last=True)

    def selected(self, choice: LoopChoice) -> list[int]:
        """What a step of the forward loop writes to stacks of chunks, which it may have to leave as they are."""
        _, of_group = self.kinds(choice)
        groups = choice.groups(self.pair.length)
        chunks = [kind.recomputation for chunks, kind in zip(groups, of_group, strict=True) if chunks.number]
        carries = [self.pair.forward.body_carry[at] for one in chunks for at in one.forward_carries]
        has_residuals = groups and choice.last_chunk(self.pair.length) > 1
        return [*carries, *(of_group[-1].recomputation.in_chunk if has_residuals else ())]

    def forward_stored(self, choice: LoopChoice) -> tuple[Atom, ...]:
        """What a step of the forward loop stores."""
        alone, of_group = self.kinds(choice)
        loop, kinds = self.pair.forward, (alone, *of_group)
        saved = sorted({value for kind in kinds for value in kind.recomputation.saved})
        in_last = kinds[-1].recomputation.in_chunk
        return (*loop.next_carry, *(loop.body_ys[y] for y in self.pair.kept_ys), *saved, *in_last)

    def forward_slice(self, choice: LoopChoice) -> BackwardSlice:
        """One step of the forward loop, which leaves out what only the residuals needed."""
        stored = self.forward_stored(choice)
        if stored not in self.known_forward:
            self.known_forward[stored] = self.pair.forward.body.slice_back(stored)
        return self.known_forward[stored]

    def forward_seconds(self, choice: LoopChoice) -> float:
        """Of one step of the forward loop."""
        seconds = self.seconds(self.forward_slice(choice).equations, self.forward_stored(choice))
        if choice.chunk is None:
            return seconds
        # To write to stacks of chunks takes their place, then for each of them what is written, and the writing.
        written = [self.body_bytes([value]) for value in self.selected(choice)]
        written += [self.carry_bytes([at]) for at in self.kinds(choice)[0].recomputation.carries]
        moved = [0] * (1 + len(choice.groups(self.pair.length))) + [x * size for size in written for x in (3, 2)]
        return seconds + sum(kernel_seconds(0.0, one, self.rates) for one in moved)

    def flops_of_chunks(
        self, chunks: Chunks, alone: StepKind, others: StepKind, step_bytes: int | None, *, is_last: bool
    ) -> float:
        """What the reverse loop recomputes for some chunks; it has all carries of the last one."""
        count = chunks.number * (chunks.steps - 1)
        flops = chunks.number * self.flops_recomputed(alone, step_bytes)
        flops += count * self.flops_recomputed(others, step_bytes)
        return flops if is_last else flops + count * self.flops(others.recomputation.forward.equations)

    def flops_recomputed(self, kind: StepKind, step_bytes: int | None) -> float:
        """In one step."""
        return self.flops(kind.recomputation.residuals.equations) + kind.schedule(step_bytes).extra_flops

    def chunk_kind(self, steps: int, in_chunk: frozenset[int], step_bytes: int | None) -> ChunkKind:
        """Chunks of several steps, for a division of the loop."""
        alone, others = self.steps(frozenset(), frozenset()), self.steps(frozenset(), in_chunk)
        flops = self.flops_of_chunks(Chunks(1, steps, in_chunk), alone, others, step_bytes, is_last=False)
        peak = self.chunk_sizes(alone, others, step_bytes).peak(steps)
        return ChunkKind(steps, in_chunk, peak, flops)

    def last_chunk(self, in_chunk: frozenset[int], step_bytes: int | None) -> LastChunk:
        """The last chunk of such a division."""
        alone, others = self.steps(frozenset(), frozenset()), self.steps(frozenset(), in_chunk)
        one, two = (
            self.flops_of_chunks(Chunks(1, steps, in_chunk), alone, others, step_bytes, is_last=True)
            for steps in (1, 2)
        )
        sizes = self.chunk_sizes(alone, others, step_bytes, is_last=True)
        return LastChunk(in_chunk, sizes.peak(1), sizes.each, one, two - one)

    def first_bytes(self, in_chunk: frozenset[int]) -> int:
        """Of the carries that a chunk starts from."""
        return self.carry_bytes(self.steps(frozenset(), in_chunk).recomputation.forward_carries)

    def kinds(self, choice: LoopChoice) -> tuple[StepKind, list[StepKind]]:
        """Steps for which nothing but carries is saved, and the other steps of each group of chunks."""
        alone = self.steps(choice.saved, None if choice.chunk is None else frozenset())
        return alone, [self.steps(choice.saved, chunks.in_chunk) for chunks in choice.groups(self.pair.length)]

    def steps(self, saved: frozenset[int], in_chunk: frozenset[int] | None) -> StepKind:
        """Steps that recompute the same; `in_chunk` is None for one level."""
        if (saved, in_chunk) not in self.known_steps:
            recomputed = recomputation(self.pair, saved, in_chunk)
            step = joint_step(self.pair, recomputed, self.program)
            if self.step_search:
                costs = self.step_search.costs(step)
            else:
                graph = build(step.program, self.rates).graph
                costs = StepCosts((StepCost(peak_of(graph), 0.0, 0.0),), graph.flops, graph.seconds)
            self.known_steps[saved, in_chunk] = StepKind(recomputed, costs, is_alone=not in_chunk)
        return self.known_steps[saved, in_chunk]

    def gradient_bytes(self, update: bool) -> int:
        """Stacks of gradients that the reverse loop writes for an update that could be done inside."""
        if self.update is None or update:
            return 0
        return self.stack_bytes(self.pair.backward.ys[y] for y in self.update.gradients)

    def stack_bytes(self, values: Iterable[int]) -> int:
        return sum(bytes_of(self.program.avals[value]) for value in values)

    def body_bytes(self, values: Iterable[int]) -> int:
        return sum(bytes_of(self.pair.forward.body.avals[value]) for value in values)

    def carry_bytes(self, positions: Iterable[int]) -> int:
        return self.body_bytes(self.pair.forward.body_carry[at] for at in positions)
