"""What each pair of scans can be, with bytes, FLOPs and seconds, so that a search can choose."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from remat_opt.graph.build import Bridge, build, bytes_of, flops_of, peak_as_written, workspace_of_loops
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Kind
from remat_opt.loops.body import slice_back
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.pairs import Pair
from remat_opt.loops.recomputation import joint_step, recomputation
from remat_opt.loops.update import Update, find_update
from remat_opt.program.inline import Program

MOST_SAVED_SETS = 8
DEAR = (Kind.CONTRACTION, Kind.OPAQUE)


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


@dataclasses.dataclass(frozen=True, eq=False)
class PairOptions:
    """A pair with its options, the first of which leaves it as it is.

    Attributes:
        pair: the loops.
        options: what can be done.
        flops: FLOPs of both loops as they are.
        seconds: estimated seconds of both loops as they are.
    """

    pair: Pair
    options: tuple[Option, ...]
    flops: float
    seconds: float


def pair_options(
    program: Program,
    pair: Pair,
    rates: Rates,
    aliases: Sequence[tuple[int, int]] = (),
    pairs: Sequence[Pair] = (),
) -> PairOptions:
    """List what can be done to a pair.

    Args:
        program: the flat step.
        pair: two of its scans.
        rates: the target.
        aliases: (input, output) pairs of the program that share one buffer.
        pairs: all pairs of the program.
    """
    return _Costs(pair, program, rates, find_update(program, pair, aliases, pairs)).options()


class _Costs:
    def __init__(self, pair: Pair, program: Program, rates: Rates, update: Update | None):
        self.program = program
        self.pair = pair
        self.rates = rates
        self.update = update
        loop = pair.forward
        graph = self.forward_bridge.graph
        self.flops = [flops_of(equation, loop.body) for equation in loop.body.equations]
        self.seconds = [0.0] * len(self.flops)
        self.dear: list[int] = []  # equations whose results are worth keeping
        for op, index in enumerate(self.forward_bridge.equation_of):
            self.seconds[index] = graph.ops[op].seconds
            if graph.ops[op].kind in DEAR:
                self.dear.append(index)

    @functools.cached_property
    def forward_bridge(self) -> Bridge:
        return build(self.pair.forward.body, self.rates)

    def options(self) -> PairOptions:
        plain = self.as_given()
        found = [plain]
        updates = (False, True) if self.update else (False,)
        for saved in self.saved_sets():
            one_level = LoopChoice(saved)
            chunks = self.chunks() if not saved and recomputation(self.pair, one_level).carries else ()
            found += [self.option(LoopChoice(saved, c, u)) for c in (None, *chunks) for u in updates]
        for in_chunk, chunk in self.chunks_with_residuals():
            found += [self.option(LoopChoice(frozenset(), chunk, u, in_chunk)) for u in updates]
        loops = (self.pair.forward.equation, self.pair.backward.equation)
        backward = build(self.pair.backward.body, self.rates).graph
        seconds = self.pair.length * (self.forward_bridge.graph.seconds + backward.seconds)
        return PairOptions(self.pair, tuple(found), sum(flops_of(e, self.program) for e in loops), seconds)

    def as_given(self) -> Option:
        kept = sum(self.stack_bytes(self.pair.forward.ys[y]) for y in self.pair.residual_ys)
        return Option(None, kept, self.as_given_peak + self.gradient_bytes(False), 0.0, 0.0)

    @functools.cached_property
    def as_given_peak(self) -> int:
        backward = self.pair.backward.equation
        return workspace_of_loops(backward.primitive, backward.params, self.rates)

    def option(self, choice: LoopChoice) -> Option:
        loop, again = self.pair.forward, recomputation(self.pair, choice)
        length = self.pair.length
        kept = length * self.body_bytes(again.saved)
        transient = peak_as_written(joint_step(self.pair, again), self.rates) + self.gradient_bytes(choice.update)
        # The first run leaves out what only the residuals needed.
        kept_ys = [loop.body_ys[y] for y in self.pair.kept_ys]
        first = slice_back(loop, [*loop.next_carry, *kept_ys, *again.saved]).equations
        repeats = [(length, again.again.equations), (length, first), (-length, tuple(range(len(self.flops))))]
        if choice.chunk is None:
            kept += length * self.body_bytes(loop.body_carry[at] for at in again.carries)
        else:
            whole = (length - 1) // choice.chunk
            last = length - whole * choice.chunk
            carry = self.body_bytes((*(loop.body_carry[at] for at in again.carries), *again.in_chunk))
            kept += (whole + 1) * self.body_bytes(loop.body_carry[at] for at in again.advanced) + last * carry
            transient += (choice.chunk - last) * carry if whole else 0
            steps = choice.chunk if again.in_chunk else choice.chunk - 1
            repeats.append((whole * steps, again.advance.equations))
        return Option(
            choice,
            kept,
            transient,
            sum(times * self.flops[index] for times, equations in repeats for index in equations),
            sum(times * self.seconds[index] for times, equations in repeats for index in equations),
        )

    def gradient_bytes(self, update: bool) -> int:
        """Stacks of gradients that the reverse loop writes for an update that could be done inside."""
        if self.update is None or update:
            return 0
        return sum(self.stack_bytes(self.pair.backward.ys[y]) for y in self.update.gradients)

    def stack_bytes(self, value: int) -> int:
        return bytes_of(self.program.avals[value])

    def body_bytes(self, values: Iterable[int]) -> int:
        return sum(bytes_of(self.pair.forward.body.avals[value]) for value in values)

    def chunks(self) -> tuple[int, ...]:
        """Chunk sizes worth a try: about √length, which keeps least, and few steps, which repeat less."""
        length = self.pair.length
        root = best_chunk(length)
        return tuple(sorted({c for c in (2, 4, root) if 1 < c < length}))

    def chunks_with_residuals(self) -> list[tuple[frozenset[int], int]]:
        """Sets of residuals that chunks may keep, with the numbers of steps that then need least, and fewer."""
        length, loop = self.pair.length, self.pair.forward
        if length < 3 or not recomputation(self.pair, LoopChoice()).carries:
            return []
        found = []
        for wanted in (frozenset(self.pair.residuals) - {*loop.body.inputs}, *self.saved_sets()[-1:]):
            again = recomputation(self.pair, LoopChoice(chunk=1, in_chunk=wanted))
            held = self.body_bytes((*(loop.body_carry[at] for at in again.carries), *again.in_chunk))
            if not again.in_chunk or not held:
                continue
            first = self.body_bytes(loop.body_carry[at] for at in again.advanced)
            least = min(range(1, length), key=lambda chunk: first * ((length - 1) // chunk + 1) + held * chunk)
            found += [(wanted, chunk) for chunk in sorted({least, max(least // 2, 1)}) if 1 < chunk < length]
        return found

    def saved_sets(self) -> list[frozenset[int]]:
        """Nothing but the carry; then the dear results of a step, those first that give most time for each byte."""
        loop = self.pair.forward
        again = recomputation(self.pair, LoopChoice())
        wanted = {*self.pair.residuals, *(x for i in again.again.equations for x in loop.body.equations[i].inputs)}
        rated = []
        for index in self.dear:
            values = frozenset(loop.body.equations[index].outputs) & wanted
            size = self.body_bytes(values)
            if index in again.again.equations and size:
                rated.append((-self.seconds[index] / size, index, values))
        found = [frozenset[int]()]
        for _, _, values in sorted(rated, key=lambda one: one[:2]):
            found.append(found[-1] | values)
        step = max(1, math.ceil((len(found) - 1) / MOST_SAVED_SETS))
        return [found[0], *found[1::step]]


def best_chunk(length: int) -> int:
    """The chunk size that keeps fewest carries: about √length."""

    def kept(chunk: int) -> int:
        return (length - 1) // chunk + 1 + chunk

    root = math.isqrt(length)
    return min(range(max(1, root - 2), root + 4), key=kept)
