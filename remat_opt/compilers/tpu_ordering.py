"""In which order a TPU's compiler runs kernels.

It is the scheduler of XLA's other compilers (`hlo_memory_scheduler.cc`), which takes of a list scheduler's order, a
depth-first one, and one by operands as they stand that which peaks lowest; seen in dumps of libtpu 0.0.51, whose
schedules behind `hlo-memory-scheduler-with-brkga-fallback` peak within a kilobyte of one of these orders of what stands
there. What it orders is more than the kernels: donated arguments are overwritten behind control dependencies, not
copied, and loops have buffers of their own. (A search where memory is short is not here.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from graphlib import CycleError, TopologicalSorter

from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of, simulate
from remat_opt.graph.ordering import LOOPS, as_operands, behind_operands, depth_first, greedy, in_order, runs_before
from remat_opt.graph.schedule import save_everything
from remat_opt.program import compat
from remat_opt.program.inline import Equation

NEGLIGIBLE = 2048  # bytes: numbers and vectors of one tile, of which XLA's count has others


def tpu_order(graph: Graph, sharing: Callable[[Graph], Graph] = lambda graph: graph) -> tuple[int, ...]:
    """The order in which a TPU's compiler runs a step's kernels.

    Args:
        graph: of kernels.
        sharing: a graph in an order with what kernels write over their operands: of the orders that is taken which
            peaks lowest so, as XLA's simulated heap shares places when it counts (`heap_simulator.cc`).
    """
    begun, originals = _with_beginnings(graph)
    waiting, before = with_updates_behind_readers(begun)
    first = tuple(before[at] for at in greedy(_of_loops(waiting, weighed=True)))
    second = tuple(before[at] for at in depth_first(waiting))
    counted = _of_loops(begun, weighed=False)
    taken = _lower_of(counted, first, second, sharing)
    if _peaks_in_a_loop(sharing(in_order(counted, taken))):
        taken = _lower_of(counted, taken, tuple(before[at] for at in as_operands(waiting)), sharing)
    return tuple(originals[at] for at in taken if originals[at] >= 0)


def _lower_of(
    graph: Graph, first: tuple[int, ...], second: tuple[int, ...], sharing: Callable[[Graph], Graph]
) -> tuple[int, ...]:
    in_first, in_second = in_order(graph, first), in_order(graph, second)
    lower = peak_of(sharing(in_first)) - peak_of(sharing(in_second))
    if abs(lower) <= NEGLIGIBLE:
        lower = peak_of(in_first) - peak_of(in_second)
    return second if lower > NEGLIGIBLE else first


def _peaks_in_a_loop(graph: Graph) -> bool:
    """Whether most is live while a loop runs. In which order a loop's tuple holds what it reads is known
    (`as_loops_read`), unlike that of kernels' operands, so that the third order is known where loops decide."""
    position = simulate(graph, save_everything(graph)).peak_position
    return position < len(graph.ops) and graph.ops[position].name in LOOPS


def with_updates_behind_readers(graph: Graph) -> tuple[Graph, list[int]]:
    """The graph with what takes a donated argument's place behind all others that read it and do not need it, and for
    each op which one of the graph it is.

    A kernel that updates several states and reads all of them is several here, of which none waits for another.
    """
    before = runs_before(graph)
    updates = {graph.producer[output] for _, output in graph.aliases}
    sizes = list(graph.sizes)
    done: dict[int, list[int]] = {}  # by reader, what says that it is
    awaited: dict[int, list[int]] = {}
    for given, output in graph.aliases:
        update = graph.producer[output]
        for reader in sorted(set(graph.users[given]) - updates) if update >= 0 else ():
            if not (before[update] >> reader | before[reader] >> update) & 1:
                done.setdefault(reader, []).append(len(sizes))
                awaited.setdefault(update, []).append(len(sizes))
                sizes.append(0)
    ops = [
        dataclasses.replace(op, inputs=(*op.inputs, *awaited.get(at, ())), outputs=(*op.outputs, *done.get(at, ())))
        for at, op in enumerate(graph.ops)
    ]
    if not _can_run(ops):
        return graph, list(range(len(graph.ops)))
    order = behind_operands(ops)
    return dataclasses.replace(graph, sizes=tuple(sizes), ops=tuple(ops[at] for at in order)), order


def _can_run(ops: list[Op]) -> bool:
    """Whether no op waits for itself."""
    maker = {value: index for index, op in enumerate(ops) for value in op.outputs}
    waiting = {index: {maker[value] for value in op.inputs if value in maker} for index, op in enumerate(ops)}
    try:
        TopologicalSorter(waiting).prepare()
    except CycleError:
        return False
    return True


def _with_beginnings(graph: Graph) -> tuple[Graph, list[int]]:
    """The graph with the empty buffers that loops begin with, each made by an op of its own, which depends on nothing;
    and for each op which one of the graph it is, -1 for none."""
    sizes, ops, originals = list(graph.sizes), [], []
    for at, op in enumerate(graph.ops):
        if op.name in LOOPS:
            given = [graph.sizes[value] for value in op.inputs]
            begun: list[int] = []
            for size in (graph.sizes[value] for value in op.outputs):
                if size in given:
                    given.remove(size)  # it begins with that
                elif size:
                    begun.append(len(sizes))
                    ops.append(Op((), (len(sizes),), kind=Kind.OPAQUE, name="empty"))
                    originals.append(-1)
                    sizes.append(size)
            op = dataclasses.replace(op, inputs=(*op.inputs, *begun))
        ops.append(op)
        originals.append(at)
    return dataclasses.replace(graph, sizes=tuple(sizes), ops=tuple(ops)), originals


def _of_loops(graph: Graph, *, weighed: bool) -> Graph:
    """The graph with its loops as the list scheduler weighs them, which make what their bodies need and nothing else,
    or as memory is counted, with a second buffer for all that they are given and return."""
    ops = list(graph.ops)
    for at, op in enumerate(ops):
        if op.name in LOOPS:
            made = sum(graph.sizes[value] for value in op.outputs)
            given = sum(graph.sizes[value] for value in op.inputs if graph.producer[value] >= 0)
            more = -made if weighed else max(given - made, 0)
            ops[at] = dataclasses.replace(op, workspace=op.workspace + more)
    return dataclasses.replace(graph, ops=tuple(ops))


def as_loops_read(loop: Equation, values: Sequence[int]) -> tuple[int, ...]:
    """What a loop reads in the order in which its tuple holds it: what it carries, its stacks, and what is the same in
    all turns."""
    constants, carries = compat.scan_counts(loop.params)
    given = loop.inputs[constants : constants + carries], loop.inputs[constants + carries :], loop.inputs[:constants]
    place = {x: at for at, x in reversed([*enumerate(x for part in given for x in part)]) if isinstance(x, int)}
    return tuple(sorted(values, key=lambda value: place.get(value, len(place))))
