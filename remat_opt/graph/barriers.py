"""Finds where a scheduling barrier has to fix the order of two kernels, because the peak depends on it.

A compiler knows dependencies, not the schedule. There are five cases:

1. Two kernels that do not depend on each other may run in either order, or be fused into one kernel with two results.
   In a backward pass the gradient of a layer's weight is often the last reader of that layer's input, and the gradient
   of the input is as large. If the latter is computed first, both buffers are live at once. So the second kernel waits
   at a barrier over one of its operands and a result of the first.
2. A reduction and a later kernel may compute the same elementwise values of the same buffers, as in a batch norm's
   backward pass. The compiler then lets the reduction store these values, each as large as the buffers. It treats the
   values that an activation shares with its derivative in the same way. If the later kernel reads the buffers after a
   barrier that waits for the reduction, they are different values to the compiler, and the shared values are
   recomputed.
3. An activation may share expensive values with its derivative (GELU: a hyperbolic tangent), where it is recomputed or
   in one run with it. The compiler stores them, although the derivative needs the activation's operand as well. Here
   only the activation reads the operand after a barrier; a derivative that reads the operand directly may overwrite it.
   (For a softmax storing costs nothing: its derivative needs only the exponential.)
4. An expensive result that is recomputed may be read by an elementwise kernel and again by a later kernel. The compiler
   may fuse it with the elementwise kernel, and its operand stays live until then. So that kernel reads it after a
   barrier.
5. With copies to the host in the program, XLA's memory scheduler takes another order, in which a kernel of the forward
   pass whose result is saved is put off to the backward pass; its operands stay live. So later kernels of the forward
   pass wait for saved values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from remat_opt.graph.graph import Graph, Kind
from remat_opt.graph.liveness import Buffer, Liveness
from remat_opt.graph.schedule import Schedule

# Fractions of the peak: a barrier is placed only for buffers of at least BARRIER_THRESHOLD, and (but in case 5) only
# where live bytes without it could exceed NEAR_THE_PEAK.
BARRIER_THRESHOLD = 0.02
NEAR_THE_PEAK = 0.85
LARGE = 0.1  # what elementwise work makes, so that a derivative of it is looked for


@dataclasses.dataclass(frozen=True, slots=True)
class Barrier:
    """The kernel and all later ones read `operands` after a barrier that waits for `results` of earlier kernels.

    Without `results`, only this kernel reads its operands after a barrier.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def is_alone(self) -> bool:
        """Whether no other kernel reads the operands behind the barrier."""
        return not self.results


def barriers(
    graph: Graph, schedule: Schedule, liveness: Liveness, slices: Collection[int] | None = None
) -> dict[tuple[int, int], Barrier]:
    """Find the barriers of a schedule.

    If the step recomputes values, only the runs from the first recomputed one on are examined, or what follows the
    first copy back from the host: before it nothing is freed that could be late. If nothing is recomputed, only
    products wait (the gradients of a weight that is used many times, each for the sum of those before it), since a
    barrier before other kernels may cost a buffer.

    Args:
        graph: the step, fused.
        schedule: the order to keep.
        liveness: what `simulate` says of the schedule.
        slices: of one step of a reverse loop, those of its inputs that can be read again from stacks. All runs of such
            a step are looked at: its backward part is in all of them.

    Returns:
        Barriers by the run's index in the schedule and the op.
    """
    found: dict[tuple[int, int], Barrier] = {}
    born = {(buffer.value, buffer.birth): buffer for buffer in liveness.buffers}
    dying: dict[int, set[int]] = {}
    for buffer in liveness.buffers:
        if buffer.birth < buffer.death:
            dying.setdefault(buffer.death, set()).add(buffer.value)
    copies = bool(schedule.transfers or graph.host)
    if slices is None and not any(run.recomputed for run in schedule.runs) and not copies:
        return _barriers_of_products(graph, schedule, liveness, born, dying)
    position, recomputing = 0, slices is not None
    place, back = 0, _first_copy_back(graph, schedule)
    for index, run in enumerate(schedule.runs):
        recomputing |= run.recomputed
        again = index > 0 and schedule.runs[index - 1].recomputed
        position += run.recomputed  # its barrier has a position of its own
        if recomputing or place + len(run.ops) > back:
            of_run = _BarriersOfRun(graph, liveness, born, dying, position, slices).find(run.ops)
            late = run.ops if recomputing else run.ops[max(back - place, 0) :]
            found.update(((index, op), of_run[op]) for op in late if op in of_run)
        if copies and not recomputing:
            of_run = _saved_in_time(graph, liveness, dying, run.ops[: max(back - place, 0)], position)
            found = {**{(index, op): barrier for op, barrier in of_run.items()}, **found}
        place += len(run.ops)
        if slices is None and not run.recomputed:
            before = dict.fromkeys(schedule.runs[index - 1].ops, index - 1) if again else {}
            apart = _separate_activations(graph, liveness, before.keys(), run.ops, position)
            found.update(((before.get(op, index), op), barrier) for op, barrier in apart.items())
        if slices is None and not run.recomputed and again:
            whole = _read_whole(graph, liveness, dying, schedule.runs[index - 1].ops, run.ops, position)
            for op, values in whole.items():
                barrier = found.get((index, op), Barrier((), ()))
                found[index, op] = Barrier(tuple(dict.fromkeys((*barrier.operands, *values))), barrier.results)
        position += len(run.ops)
    return found


def _first_copy_back(graph: Graph, schedule: Schedule) -> int:
    """The place before which the first copy comes back from the host, for an op or by a loop."""
    fetching = (place for place, op in enumerate(schedule.order) if not graph.host.isdisjoint(graph.ops[op].inputs))
    return min([*(one.back for one in schedule.transfers), next(fetching, len(schedule.order))])


def _barriers_of_products(
    graph: Graph,
    schedule: Schedule,
    liveness: Liveness,
    born: dict[tuple[int, int], Buffer],
    dying: dict[int, set[int]],
) -> dict[tuple[int, int], Barrier]:
    """The barriers of products in a schedule that computes nothing again."""
    position, found = 0, {}
    for index, run in enumerate(schedule.runs):
        of_run = _BarriersOfRun(graph, liveness, born, dying, position, None).find(run.ops)
        found |= {(index, op): barrier for op, barrier in of_run.items() if graph.ops[op].kind is Kind.CONTRACTION}
        position += len(run.ops)
    return found


def _saved_in_time(
    graph: Graph, liveness: Liveness, dying: Mapping[int, Collection[int]], ops: Sequence[int], start: int
) -> dict[int, Barrier]:
    """Barriers of a forward pass that wait for saved values, where what these are made of is done with."""
    lives, end = liveness.lives, start + len(ops)
    saved = {*lives.value[(lives.birth >= start) & (lives.birth < end) & (lives.death >= end)].tolist()}
    found: dict[int, Barrier] = {}
    waiting: dict[int, None] = {}
    read: set[int] = set()  # by the ops that make what is waited for
    freed = 0
    for position, op in enumerate(ops, start):
        made = [value for value in graph.ops[op].inputs if graph.producer[value] >= 0]
        if made and waiting and freed >= BARRIER_THRESHOLD * liveness.peak:
            over = graph.overwritable_by(graph.ops[op])
            operand = max(made, key=lambda value: (value not in over, graph.sizes[value], value))
            found[op] = Barrier((operand,), tuple(value for value in waiting if value != operand))
            waiting, read, freed = {}, set(), 0
        if mine := saved.intersection(graph.ops[op].outputs):
            waiting.update(dict.fromkeys(sorted(mine)))
            read.update(graph.ops[op].inputs)
        freed += sum(graph.sizes[value] for value in read.intersection(dying.get(position, ())))
    return found


def _separate_activations(
    graph: Graph, liveness: Liveness, recomputed: Collection[int], ops: Sequence[int], start: int
) -> dict[int, Barrier]:
    """Case 3: for each activation of this run, or of the recomputed run before it, the operands that it alone reads
    after a barrier: large ones on which an op near the peak also does expensive arithmetic, and which are used so again
    later."""
    last: dict[int, int] = {}
    derived: set[int] = set()
    for position, op in enumerate(ops, start):
        last.update(dict.fromkeys(graph.ops[op].expensive_operands, op))
        made = sum(graph.sizes[value] for value in graph.ops[op].outputs)
        if int(liveness.live[position]) + made > NEAR_THE_PEAK * liveness.peak:
            derived.update(graph.ops[op].expensive_operands)
    large = {value for value in derived if graph.sizes[value] >= BARRIER_THRESHOLD * liveness.peak}
    read = {
        op: tuple(value for value in graph.ops[op].expensive_operands if value in large and last[value] != op)
        for op in (*recomputed, *ops)
    }
    return {op: Barrier(operands, results=()) for op, operands in read.items() if operands}


def _read_whole(
    graph: Graph,
    liveness: Liveness,
    dying: Mapping[int, Collection[int]],
    recomputed: Sequence[int],
    ops: Sequence[int],
    start: int,
) -> dict[int, tuple[int, ...]]:
    """For the elementwise kernels near the peak the expensive results of the recomputed run before them that they are
    to read behind a barrier: those that are stored in any case, because another kernel reads them later."""
    expensive = {value for op in recomputed if graph.ops[op].expensive for value in graph.ops[op].outputs}
    found: dict[int, tuple[int, ...]] = {}
    for position, op in enumerate(ops, start):
        kernel = graph.ops[op]
        stays = [v for v in kernel.inputs if v in expensive and v not in dying.get(position, ())]
        large = tuple(v for v in stays if graph.sizes[v] >= BARRIER_THRESHOLD * liveness.peak)
        again_live = int(liveness.live[position]) + sum(graph.sizes[value] for value in large)
        if large and kernel.kind is Kind.ELEMENTWISE and again_live > NEAR_THE_PEAK * liveness.peak:
            found[op] = large
    return found


class _BarriersOfRun:
    def __init__(
        self,
        graph: Graph,
        liveness: Liveness,
        born: dict[tuple[int, int], Buffer],
        dying: dict[int, set[int]],
        start: int,
        slices: Collection[int] | None,
    ):
        self.graph = graph
        self.liveness = liveness
        self.born = born
        self.dying = dying
        self.start = start
        self.is_step_of_loop = slices is not None
        self.slices = frozenset(slices or ())
        self.outputs = frozenset(graph.outputs)
        self.made_by: dict[int, int] = {}  # value → index in this run
        self.before: list[int] = []  # for each kernel those that run before it whatever the compiler does, as bits
        self.reductions_of: dict[int, int] = {}  # for a value the reductions of this run that read it, as bits
        self.frees: list[int] = []  # bytes that stay longer if the kernel is done later than it should
        self.much_freed = 0  # the kernels for which these are worth a barrier, as bits
        self.stored: set[int] = set()  # values of this run that are still to be read, or results

    def find(self, ops: Sequence[int]) -> dict[int, Barrier]:
        found: dict[int, Barrier] = {}
        for index, op in enumerate(ops):
            self.stored -= self.dying.get(self.start + index, set()) - self.outputs
            known = 0
            for value in self.graph.ops[op].inputs:
                if value in self.made_by:
                    maker = self.made_by[value]
                    known |= self.before[maker] | 1 << maker
            waits = self.results_of(self.that_may_be_late(op, index, known), op)
            results = list(waits.values())
            operands = [self.operand(op)] if results else []
            for buffer, result in self.reduced_before(op, index).items():
                operands.append(buffer)
                results.append(result)
            for late in waits:
                known |= self.before[late] | 1 << late
            if results:
                found[op] = Barrier(tuple(dict.fromkeys(operands)), tuple(dict.fromkeys(results)))
            self.before.append(known)
            self.frees.append(self.freed_by(op, self.start + index))
            self.much_freed |= (self.frees[index] >= BARRIER_THRESHOLD * self.liveness.peak) << index
            self.made_by.update(dict.fromkeys(self.graph.ops[op].outputs, index))
            self.stored.update(v for v in self.graph.ops[op].outputs if self.is_stored(v, self.start + index))
            if self.graph.ops[op].kind is Kind.REDUCTION or (self.is_step_of_loop and self.makes_large(op)):
                for value in self.graph.ops[op].inputs:
                    self.reductions_of[value] = self.reductions_of.get(value, 0) | 1 << index
        return found

    def makes_large(self, op: int) -> bool:
        """Whether a kernel of elementwise work makes a large buffer: a derivative of it may need the same values."""
        made = sum(self.graph.sizes[value] for value in self.graph.ops[op].outputs)
        return self.graph.ops[op].kind is Kind.ELEMENTWISE and made >= LARGE * self.liveness.peak

    def reduced_before(self, op: int, index: int) -> dict[int, int]:
        """Large buffers that both the kernel and an earlier reduction read, each with a result of that reduction. In a
        step of a loop, elementwise kernels that make a large buffer count like reductions."""
        graph, peak = self.graph, self.liveness.peak
        read = (v for v in graph.ops[op].inputs if graph.producer[v] >= 0 or v in self.slices)
        large = [v for v in read if graph.sizes[v] >= BARRIER_THRESHOLD * peak]
        if int(self.liveness.live[self.start + index]) + sum(graph.sizes[v] for v in large) <= NEAR_THE_PEAK * peak:
            return {}
        found: dict[int, int] = {}
        for buffer in large:
            latest = self.reductions_of.get(buffer, 0).bit_length() - 1
            if latest >= 0:
                found.update((buffer, result) for result in self.results_of(1 << latest, op).values())
        return found

    def that_may_be_late(self, op: int, index: int, known: int) -> int:
        """Earlier kernels of this run (as bits) that free many bytes and on which this large kernel does not depend."""
        least = BARRIER_THRESHOLD * self.liveness.peak
        made = sum(self.graph.sizes[v] for v in self.graph.ops[op].outputs if v not in self.outputs)
        if made + self.graph.ops[op].workspace < least or self.operand(op) < 0:
            return 0
        loose = self.much_freed & ~known
        without_order = int(self.liveness.live[self.start + index]) + sum(self.frees[i] for i in _bits(loose))
        return loose if without_order > NEAR_THE_PEAK * self.liveness.peak else 0

    def freed_by(self, op: int, position: int) -> int:
        """Bytes that stay live if the kernel is late: those that it is the last to read and, for a product, those that
        elementwise work made for it. A compiler makes these just before the product, and may hold what they are made
        of until then."""
        graph = self.graph
        last = self.dying.get(position, frozenset())
        return sum(
            graph.sizes[value]
            for value in set(graph.ops[op].inputs)
            if value in last or (graph.ops[op].kind is Kind.CONTRACTION and self.is_elementwise(value))
        )

    def is_elementwise(self, value: int) -> bool:
        maker = self.graph.producer[value]
        return maker >= 0 and self.graph.ops[maker].kind is Kind.ELEMENTWISE

    def operand(self, op: int) -> int:
        """The operand that goes through the barrier: the largest that is not an argument (a barrier would copy a
        donated one); operands the result may be written over only if there is no other. −1 where there is none."""
        made = [value for value in self.graph.ops[op].inputs if self.graph.producer[value] >= 0]
        over = self.graph.overwritable_by(self.graph.ops[op])
        return max(made, key=lambda value: (value not in over, self.graph.sizes[value], value), default=-1)

    def results_of(self, late: int, op: int) -> dict[int, int]:
        """For each kernel (as bits) the smallest value still to be read that depends on the kernel, so that waiting for
        it means waiting for the kernel. Kernels without such a value are left out."""
        sizes, operand = self.graph.sizes, self.operand(op)
        found: dict[int, int] = {}
        if not late:
            return found
        still_read = self.stored | (self.made_by.keys() & self.graph.ops[op].inputs)
        for value in sorted(still_read - {operand}, key=lambda value: (sizes[value], value)):
            maker = self.made_by[value]
            shown = (self.before[maker] | 1 << maker) & late
            found.update((kernel, value) for kernel in _bits(shown))
            late &= ~shown
        return dict(sorted(found.items()))

    def is_stored(self, value: int, made: int) -> bool:
        """Whether a value that is made at a position is a result, or read after the next kernel has begun."""
        buffer = self.born.get((value, made))
        return value in self.outputs or (buffer is not None and buffer.death > made)


def _bits(mask: int) -> Iterator[int]:
    """The positions of ones, from the lowest."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
