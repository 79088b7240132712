"""Finds where XLA's CPU compiler needs a scheduling barrier, because it orders by dependencies alone.

To save memory it visits the operands of each result depth first. It begins with the operands that have the most users
and bytes before them, no matter what they free (`ordering.depth_first`). Three kinds of kernels then run too early or
too late:

- Values made of nearly nothing, as random bits are of a key. After the barrier of a recomputed run a key depends on as
  much as any other value, so that a whole block's bits may be made before the first of them is read: in a transformer
  with dropout, two arrays of each mask at once. They wait for the value that the schedule makes just before them.
- Small values that are broadcast for a reduction, as a batch norm's factors for the gradient of its mean. The broadcast
  buffer is as large as the gradient and may be made as soon as the factors are there. The factors are read after a
  barrier that waits for the gradient.
- Values made of something larger and read much later, as the gradient of a logits' product that waits for the gradient
  of an embedding with the same weights. The compiler may make the value where it is read, and keep the logits until
  then, through the loop over all layers. The loop waits for the value.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat_opt.graph.barriers import BARRIER_THRESHOLD, NEAR_THE_PEAK, Barrier
from remat_opt.graph.graph import Graph, Kind
from remat_opt.graph.liveness import Liveness
from remat_opt.graph.schedule import Schedule

NEARLY_NOTHING = 0.01  # of what is made of it


def cpu_barriers(graph: Graph, schedule: Schedule, liveness: Liveness) -> dict[tuple[int, int], Barrier]:
    """Find the barriers of a schedule for a CPU.

    Args:
        graph: the step, fused.
        schedule: the order to keep.
        liveness: what `simulate` says of the schedule.

    Returns:
        Barriers by the run's index in the schedule and the op.
    """
    position = {op: at for at, op in enumerate(schedule.order)}  # of the last time that an op runs
    least = BARRIER_THRESHOLD * liveness.peak
    found: dict[tuple[int, int], Barrier] = {}
    fresh: list[int] = []  # made since the last recomputed run
    start = 0
    for index, run in enumerate(schedule.runs):
        start += run.recomputed  # its barrier has a position of its own
        live = liveness.live[start : start + len(run.ops)]
        start += len(run.ops)
        if run.recomputed:
            fresh = []
            found.update(
                ((index, op), barrier) for op, barrier in _made_of_nearly_nothing(graph, run.ops, least).items()
            )
            continue
        for op, bytes_live in zip(run.ops, live.tolist(), strict=True):
            barrier = _of_a_loop(graph, op, fresh, position) if index else None
            if barrier is None and index and (spread := _spread_in_a_sum(graph, op)):
                is_near = bytes_live + graph.sizes[spread.results[0]] > NEAR_THE_PEAK * liveness.peak
                barrier = spread if is_near and graph.sizes[spread.results[0]] >= least else None
            if barrier:
                found[index, op] = barrier
            fresh += graph.ops[op].outputs
    return found


def _made_of_nearly_nothing(graph: Graph, ops: Sequence[int], least: float) -> dict[int, Barrier]:
    """The ops of a run that make much of little, each with what is made in front of it and read behind it."""
    last_read = {value: index for index, op in enumerate(ops) for value in graph.ops[op].inputs}
    found: dict[int, Barrier] = {}
    made: list[int] = []
    for index, op in enumerate(ops):
        made_of, makes = graph.ops[op].inputs, graph.ops[op].outputs
        size = sum(graph.sizes[value] for value in makes)
        if size >= least and sum(graph.sizes[value] for value in made_of) < NEARLY_NOTHING * size:
            before = [v for v in made if last_read.get(v, -1) > index and graph.sizes[v] >= NEARLY_NOTHING * size]
            if before and made_of:
                found[op] = Barrier(tuple(dict.fromkeys(made_of)), (before[-1],))
        made += makes
    return found


def _spread_in_a_sum(graph: Graph, op: int) -> Barrier | None:
    """What a reduction reads that is small beside the largest that it reads, made to wait for that."""
    if graph.ops[op].kind is not Kind.REDUCTION:
        return None
    largest = max(graph.ops[op].inputs, key=graph.sizes.__getitem__, default=-1)
    if largest < 0 or graph.producer[largest] < 0:
        return None
    small = [v for v in dict.fromkeys(graph.ops[op].inputs) if graph.sizes[v] < NEARLY_NOTHING * graph.sizes[largest]]
    made = tuple(value for value in small if graph.producer[value] >= 0)  # a barrier would copy a donated argument
    return Barrier(made, (largest,)) if made else None


def _of_a_loop(graph: Graph, op: int, fresh: Sequence[int], position: dict[int, int]) -> Barrier | None:
    """What a loop waits for: values made in front of it, of larger ones that nobody else still reads."""
    loop = graph.ops[op]
    if loop.kind is not Kind.OPAQUE or not loop.workspace:
        return None
    results = tuple(value for value in fresh if _frees_more(graph, value, position[op], position))
    operands = tuple(value for value in dict.fromkeys(loop.inputs) if value in fresh and value not in results)
    return Barrier(operands, results) if results and operands else None


def _frees_more(graph: Graph, value: int, now: int, position: dict[int, int]) -> bool:
    """Whether a value is read after a moment only, and something larger that it is made of is not."""
    if value in graph.outputs or not graph.users[value] or any(position[user] <= now for user in graph.users[value]):
        return False
    sources = (one for one in graph.ops[graph.producer[value]].inputs if graph.producer[one] >= 0)
    ended = (one for one in sources if all(position[user] < now for user in graph.users[one]))
    return any(graph.sizes[one] > graph.sizes[value] for one in ended)
