"""A model of XLA's fusion: which values become buffers.

XLA fuses elementwise ops into their users, so that most values of a jaxpr are never stored. The rules:

1. Results of reductions, contractions and opaque ops are buffers. So are the operands of contractions and opaque ops,
   and the results of the step.
2. The elementwise values between them are *virtual*: each reader recomputes them. They keep the buffers they are
   computed from alive, their *sources*.
3. A virtual value becomes a buffer if fusing it would move more bytes than storing it. With c readers and
   sources of R bytes, fusing reads c·R; storing a value of S bytes reads R, writes S, and reads c·S. A compiler weighs
   the same two (XLA's `PriorityFusion` by a cost model), and limits how many operands a kernel has.
4. In the programs we write, a *sum* is a buffer too: a virtual value whose op is the last use of two or more buffers at
   least as large as it, if either (a) something other than elementwise work depends on it, or (b) it is made only of
   products and other sums, and a reader of it waits for something else, as with the partial gradients of a weight that
   is used in many places. Left virtual, both cotangents of a residual connection wait for the layer before it to be
   recomputed; the sum is one buffer. A compiler would fuse it, so that it is written behind a barrier.
5. In the original step, the compiler stores a virtual value with several readers instead of recomputing it in each: on
   CPUs any such value (`CpuInstructionFusion`), on GPUs expensive arithmetic (`PriorityFusion`). In the programs we
   write, each run makes virtual values afresh.
6. A kernel's result may be written over an operand that it reads at the places alone where it writes (`same_place`, see
   `liveness.py`), but not over a sum of rule 4, which is read behind its own barrier, nor over one of several results
   of an instruction, as those of cuDNN's convolutions and their workspace. In the programs we write this holds on GPUs.
   On a CPU rule 5 would have to hold for them as well: plans found with rule 6 but without rule 5 are predicted less
   accurately and need no less memory (docs/measured.md).

`fuse` applies the rules once: in the graph that it gives every op is a kernel and every value a buffer, and the
virtual values are gone. Searches see that graph, several times smaller; the writer makes virtual values afresh wherever
a kernel reads them, so that none is ever carried across a barrier.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from remat_opt.graph.graph import Graph, Kind, Op

MOST_SOURCES = 16
_STORED_OPERANDS = (Kind.CONTRACTION, Kind.OPAQUE)


def _no_op(op: Op) -> bool:
    return False


def materialised(graph: Graph) -> list[bool]:
    """For each value, whether it is a buffer in the program as it was written."""
    return _stored(graph, None, _no_op)


def _stored_by_kind(graph: Graph) -> list[bool]:
    """For each value, whether it is a buffer whatever it costs: what ops of some kinds make or read, and what the step
    is given and returns."""
    stored = [False] * len(graph.sizes)
    for value in (*graph.inputs, *graph.outputs):
        stored[value] = True
    for op in graph.ops:
        if op.kind is not Kind.ELEMENTWISE or not op.repeatable:
            for value in op.outputs:
                stored[value] = True
        if op.kind in _STORED_OPERANDS:
            for value in op.inputs:
                stored[value] = True
    return stored


def _stored(graph: Graph, sums: set[int] | None, is_stored_if_shared: Callable[[Op], bool]) -> list[bool]:
    """The same by rule 5, too; with `sums`, rule 4 holds, and the values that it stores are added to it."""
    if graph.fused:
        return [True] * len(graph.sizes)
    stored = _stored_by_kind(graph)
    _store_what_is_expensive_to_fuse(graph, stored, sums, is_stored_if_shared)
    return stored


def _store_what_is_expensive_to_fuse(
    graph: Graph, stored: list[bool], sums: set[int] | None, is_stored_if_shared: Callable[[Op], bool]
) -> None:
    sources: dict[int, frozenset[int]] = {}
    made_of: dict[int, list[int]] = {}  # for a buffer itself and the virtual values that are made of it
    passed_on, waits = (_passed_on(graph), _waiting(graph)) if sums is not None else ([], [])
    for index, op in enumerate(graph.ops):
        if op.kind is not Kind.ELEMENTWISE:
            continue
        read = frozenset().union(*(sources.get(value, (value,)) for value in op.inputs))
        for value in op.outputs:
            if stored[value]:
                continue
            readers, size = len(graph.users[value]), graph.sizes[value]
            moved = sum(graph.sizes[source] for source in read)
            is_shared = readers > 1 and moved >= size > 0 and is_stored_if_shared(op)
            if is_shared or readers * moved > moved + (1 + readers) * size or len(read) > MOST_SOURCES:
                stored[value] = True
            elif (
                sums is not None
                and (passed_on[value] or (waits[value] and _is_of_products(graph, read, sums)))
                and _is_last_of_two(graph, index, value, read, made_of)
            ):
                stored[value] = True
                sums.add(value)
            else:
                sources[value] = read
                for source in read:
                    made_of.setdefault(source, [source]).append(value)


def _passed_on(graph: Graph) -> list[bool]:
    """For each value, whether anything but elementwise work is made of it: not so in an optimizer's update, which
    follows its gradient at once."""
    found = [False] * len(graph.sizes)
    for op in reversed(graph.ops):
        if op.kind is not Kind.ELEMENTWISE or any(found[value] for value in op.outputs):
            for value in op.inputs:
                found[value] = True
    return found


def _there_from(graph: Graph) -> list[int]:
    """For each value the last op other than elementwise work that has to run before it can be made; -1 for none."""
    there = [-1] * len(graph.sizes)
    for index, op in enumerate(graph.ops):
        ready = _ready(op, index, there)
        for value in op.outputs:
            there[value] = ready
    return there


def _ready(op: Op, index: int, there: Sequence[int]) -> int:
    return max((there[value] for value in op.inputs), default=-1) if op.kind is Kind.ELEMENTWISE else index


def _waiting(graph: Graph) -> list[bool]:
    """For each value, whether who reads it waits for something else: so does a part of a sum for the rest, as the
    gradient is one of a weight that is used in many places."""
    there, found = _there_from(graph), [False] * len(graph.sizes)
    for index, op in enumerate(graph.ops):
        ready = _ready(op, index, there)
        for value in op.inputs:
            found[value] = found[value] or there[value] < ready
    return found


def _is_of_products(graph: Graph, read: frozenset[int], sums: Container[int]) -> bool:
    """Whether something is made of products and sums of them alone, which can be put off no further. (What an embedding
    scatters is small until it is scattered, and compilers scatter it into the sum.)"""
    makers = (graph.producer[source] for source in read if source not in sums)
    return all(maker >= 0 and graph.ops[maker].kind is Kind.CONTRACTION for maker in makers)


def _is_last_of_two(graph: Graph, index: int, value: int, read: frozenset[int], made_of: dict[int, list[int]]) -> bool:
    """Whether an op is the last to read at least two buffers of its result's size."""
    freed = 0
    for source in read:
        if graph.producer[source] >= 0 and graph.sizes[source] >= graph.sizes[value] > 0:
            freed += all(graph.users[v][-1] <= index for v in made_of.get(source, [source]) if graph.users[v])
    return freed >= 2 and bool(graph.users[value])


@dataclasses.dataclass(frozen=True, eq=False)
class Fusion:
    """A fused graph with the way back.

    Attributes:
        graph: kernels and buffers; values keep their numbers, virtual ones are read and made by nobody.
        op_of: for each kernel the op of the original graph whose results are buffers.
        virtual: for each virtual value the op of the original graph that makes it.
        sums: values that are buffers by rule 4.
    """

    graph: Graph
    op_of: tuple[int, ...]
    virtual: dict[int, int]
    sums: frozenset[int] = frozenset()


def fuse(
    graph: Graph,
    *,
    with_sums: bool = False,
    overwrites: bool = False,
    in_tuples: Container[int] = (),
    is_stored_if_shared: Callable[[Op], bool] = _no_op,
) -> Fusion:
    """Merge virtual values into the kernels that read them, by rules 1 to 3.

    Args:
        graph: what `Fusion` is made of.
        with_sums: rule 4 holds, too.
        overwrites: rule 6 holds, too.
        in_tuples: values that the compiler makes as one of several results.
        is_stored_if_shared: the ops whose results rule 5 stores.
    """
    sums: set[int] = set()
    stored = _stored(graph, sums if with_sums else None, is_stored_if_shared)
    made: dict[int, _Virtual] = {}
    virtual: dict[int, int] = {}
    arithmetic = _ExpensiveArithmetic()
    kernels: list[Op] = []
    op_of: list[int] = []
    counted: set[int] = set()  # of what several kernels repeat each, the FLOPs count once, as in the program
    for index, op in enumerate(graph.ops):
        read = {value: made.get(value, _BUFFER) for value in op.inputs}
        computed = [one for one in read.values() if one is not _BUFFER]
        inputs = _each_once((value,) if one is _BUFFER else one.sources for value, one in read.items())
        chain = _each_once(one.chain for one in computed)
        moved = frozenset().union(
            *((one.moved if value in op.same_place else (one.sources or (value,))) for value, one in read.items())
        )
        reads = _reads(op, made, graph.sizes)
        by_expensive, beside = arithmetic.of(op)
        if op.outputs and not any(stored[value] for value in op.outputs):
            for value in op.outputs:
                made[value] = _Virtual(inputs, (*chain, index), moved, reads)
                arithmetic.reads[value] = by_expensive, beside
            virtual.update(dict.fromkeys(op.outputs, index))
            continue
        kernel = dataclasses.replace(
            op,
            inputs=inputs,
            flops=op.flops + sum(graph.ops[o].flops for o in chain if o not in counted),
            workspace=op.workspace + max((graph.ops[o].workspace for o in chain), default=0),  # one after the other
            traffic=sum(reads.values()) + sum(graph.sizes[value] for value in op.outputs),
            expensive_operands=tuple(value for value in inputs if value in by_expensive and value in beside),
            same_place=tuple(
                value for value in inputs if overwrites and not (value in moved or value in sums or value in in_tuples)
            ),
        )
        counted.update(chain)
        kernels.append(kernel)
        op_of.append(index)
    fused = dataclasses.replace(graph, ops=tuple(kernels), fused=True)
    return Fusion(fused, tuple(op_of), virtual, frozenset(sums))


class _Virtual(NamedTuple):
    """What a value is that is no buffer.

    Attributes:
        sources: buffers that it is made of.
        chain: ops that make it from these.
        moved: sources that it has at other places.
        reads: for each source how many of its bytes are read.
    """

    sources: tuple[int, ...]
    chain: tuple[int, ...]
    moved: frozenset[int] = frozenset()
    reads: Mapping[int, int] = MappingProxyType({})


_BUFFER = _Virtual((), ())


def _reads(op: Op, made: Mapping[int, _Virtual], sizes: Sequence[int]) -> dict[int, int]:
    """For each buffer that an op's result is made of, how many of its bytes a kernel reads: of a slice that part."""
    written = sum(sizes[value] for value in op.outputs)
    found: dict[int, int] = {}
    for value in op.inputs:
        is_part = op.kind is Kind.ELEMENTWISE and value not in op.same_place and sizes[value] > written
        share = written / sizes[value] if is_part else 1
        of_sources = made[value].reads if value in made else {value: sizes[value]}
        for source, read in of_sources.items():
            found[source] = min(sizes[source], found.get(source, 0) + int(share * read))
    return found


def _each_once(lists: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(lists)))


class _ExpensiveArithmetic:
    """Which buffers a virtual value is made of by expensive arithmetic, and which without."""

    def __init__(self):
        self.reads: dict[int, tuple[frozenset[int], frozenset[int]]] = {}

    def of(self, op: Op) -> tuple[frozenset[int], frozenset[int]]:
        """What an elementwise op's result is made of by expensive arithmetic, and what without."""
        if op.kind is not Kind.ELEMENTWISE:
            return frozenset(), frozenset()
        read = [self.reads.get(value, (frozenset(), frozenset([value]))) for value in op.inputs]
        by_expensive = frozenset().union(*(one for one, _ in read))
        beside = frozenset().union(*(other for _, other in read))
        return (by_expensive | beside, frozenset()) if op.expensive else (by_expensive, beside)
