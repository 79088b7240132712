"""In which order a compiler runs the kernels of a step that says only which depends on which.

A jaxpr's order is not kept: compilers see dependencies, and choose. XLA's CPU compiler takes the order in which most
can run side by side, `breadth_first`, and `depth_first` where it is asked to save memory; its GPU compiler `greedy` or
`depth_first`, whichever peaks lower. Their rules are those of XLA's `hlo_memory_scheduler.cc`; which is taken is what
compiled steps show. (A third order, by operands alone, the GPU's compiler tries, too; in which order a kernel reads is
not known here.) So does a TPU's, of kernels that depend on more: `compilers/tpu_ordering.py`. Of an unknown platform
the program's order is taken, with updates as early as they can be. Sizes are those of the graph, so that an order is
only as true as they are.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from remat_opt.graph.derive import early_order
from remat_opt.graph.fusion import held_by
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of

LOOPS = frozenset({"scan", "while"})
ZEROS = "zeros"  # ops that make them for all who change them
_WITHIN_OUR_KNOWLEDGE = 0.01  # of a peak: what one of a GPU's orders seems to spare is less than what is not known


def order_of(
    graph: Graph, platform: str, saving_memory: bool, sharing: Callable[[Graph], Graph] = lambda graph: graph
) -> tuple[int, ...]:
    """The order in which a platform's compiler runs a step's kernels.

    Args:
        graph: of kernels.
        platform: of any compiler but a TPU's.
        saving_memory: whether the compiler is asked to.
        sharing: a graph in an order with what kernels write over their operands: of two orders with one peak that is
            taken which peaks lower so.
    """
    if platform == "cpu":
        return depth_first(graph) if saving_memory else breadth_first(graph)
    if platform not in ("cuda", "rocm"):
        return early_order(graph)
    return lower_of(graph, greedy(graph), depth_first(graph), sharing, margin=_WITHIN_OUR_KNOWLEDGE)


def lower_of(
    graph: Graph,
    first: tuple[int, ...],
    second: tuple[int, ...],
    sharing: Callable[[Graph], Graph],
    margin: float = 0.0,
) -> tuple[int, ...]:
    """Of two orders that which peaks lower, or does with `sharing` as of `order_of`; else the first. What it spares is
    to be more than a part of the first one's peak, `margin`."""
    in_first, in_second = in_order(graph, first), in_order(graph, second)
    peak = peak_of(in_first)
    saved = peak - peak_of(in_second) or peak_of(sharing(in_first)) - peak_of(sharing(in_second))
    return second if saved > margin * peak else first


def in_order(graph: Graph, order: Sequence[int]) -> Graph:
    """The graph with its ops in another order."""
    return dataclasses.replace(graph, ops=tuple(graph.ops[op] for op in order))


def runs_before(graph: Graph) -> list[int]:
    """For each op those that run before it whatever the order, as bits."""
    before: list[int] = []
    for op in graph.ops:
        known = 0
        for maker in {graph.producer[value] for value in op.inputs} - {-1}:
            known |= before[maker] | 1 << maker
        before.append(known)
    return before


def behind_operands(ops: Sequence[Op], left_out: Iterable[int] = ()) -> list[int]:
    """Positions of ops in an order in which each stands behind what it reads, else as they stand.

    Args:
        ops: in any order.
        left_out: positions of ops that are not in it, nor what they make.

    Raises:
        ValueError: where ops wait for each other.
    """
    most = len(ops) + sum(len(op.inputs) for op in ops)  # each waits in the stack once for each that reads it
    done = set(left_out)
    maker = {value: index for index, op in enumerate(ops) if index not in done for value in op.outputs}
    order: list[int] = []
    for root in range(len(ops)):
        stack = [root]
        while stack:
            index = stack[-1]
            missing = [maker[x] for x in ops[index].inputs if x in maker and maker[x] not in done]
            if missing and index not in done:
                stack += missing
                if len(stack) > most:
                    raise ValueError(f"ops wait for each other: {ops[index].name} for {ops[missing[0]].name}")
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                order.append(index)
    return order


def breadth_first(graph: Graph) -> tuple[int, ...]:
    """Every op as soon as what it reads is there, the longest waiting first."""
    missing = [len(set(op.inputs)) for op in graph.ops]
    queue: deque[tuple[int, int]] = deque((-1, index) for index, op in enumerate(graph.ops) if not op.inputs)
    queue.extend((value, -1) for value in graph.inputs)
    order: list[int] = []
    while queue:
        value, op = queue.popleft()
        made: Sequence[int] = (value,) if op < 0 else graph.ops[op].outputs
        if op >= 0:
            order.append(op)
        for result in made:
            for user in graph.users[result]:
                missing[user] -= 1
                if not missing[user]:
                    queue.append((-1, user))
    return tuple(order)


def greedy(graph: Graph) -> tuple[int, ...]:
    """Of the ops that can run always the one that frees most, less what it makes (XLA's list scheduler)."""
    uses = [len(users) for users in graph.users]
    for value in graph.outputs:
        uses[value] += 1
    given = set(graph.inputs)
    reads = [[v for v in dict.fromkeys(op.inputs) if v not in given] for op in graph.ops]
    made = [sum(graph.sizes[value] for value in op.outputs) + op.workspace for op in graph.ops]
    handed_on = _handed_on(graph)
    fan_out = [len(_users(graph, op, handed_on)) for op in graph.ops]
    missing = [len(values) for values in reads]

    def gain(op: int) -> int:
        return sum(graph.sizes[value] for value in reads[op] if uses[value] == 1) - made[op]

    ready: list[tuple[int, int, int, int]] = []
    best_of: dict[int, int] = {}
    count = 0

    def push(op: int, enabled_by: int = -1) -> None:
        nonlocal count
        behind = enabled_by >= 0 and graph.ops[enabled_by].kind is Kind.BARRIER
        best_of[op] = -made[op] if behind else gain(op)
        count += 1
        heapq.heappush(ready, (-best_of[op], -fan_out[op], -count, op))

    for index in range(len(graph.ops)):
        if not missing[index]:
            push(index)
    order: list[int] = []
    done = [False] * len(graph.ops)
    while ready:
        lost, _, _, op = heapq.heappop(ready)
        if done[op] or -lost != best_of[op]:
            continue
        done[op] = True
        order.append(op)
        for value in reads[op]:
            uses[value] -= 1
        for value in graph.ops[op].outputs:
            # A view is an instruction of its own, which comes first: its readers are ready after all others.
            for user in sorted(graph.users[value], key=lambda user: graph.ops[user].of_views):
                missing[user] -= 1
                if not missing[user]:
                    push(user, op)
        for value in reads[op]:
            if uses[value] == 1:
                for user in graph.users[value]:
                    if (
                        not done[user]
                        and user in best_of
                        and not graph.ops[user].of_views
                        and gain(user) != best_of[user]
                    ):
                        push(user)
    return tuple(order)


def _instructions(graph: Graph) -> int:
    """About how many instructions a compiler has: arguments, kernels, and tuples that are put together for barriers and
    loops, and taken apart behind these and kernels with several results."""
    count = len(graph.inputs) + len(graph.ops)
    for op in graph.ops:
        is_of_tuple = op.kind is Kind.BARRIER or op.name in LOOPS
        count += len(op.outputs) * (len(op.outputs) > 1) + (1 + len(op.inputs)) * is_of_tuple
    return count


def _handed_on(graph: Graph) -> list[frozenset[int]]:
    """For each op the buffers that it reads but has from others than their makers: from the barrier before it, and from
    what has changed them where they lie."""
    changed = {
        value: op.inputs
        for op in graph.ops
        if op.kind is not Kind.BARRIER
        for value in op.outputs
        if not graph.sizes[value]
    }
    found = []
    for op in graph.ops:
        behind = (value for token in op.inputs if token in changed for value in changed[token])
        found.append(held_by(graph, op).union(behind))
    return found


def _users(graph: Graph, op: Op, handed_on: Sequence[frozenset[int]]) -> set[int]:
    """The ops that have something from an op."""
    return {user for value in op.outputs for user in graph.users[value] if value not in handed_on[user]}


def _makers(graph: Graph, handed_on: Sequence[frozenset[int]]) -> list[list[int]]:
    """For each op those that it has something from."""
    found = []
    for op, behind in zip(graph.ops, handed_on, strict=True):
        makers = dict.fromkeys(graph.producer[value] for value in op.inputs if value not in behind)
        found.append([maker for maker in makers if maker >= 0])
    return found


def _roots(graph: Graph) -> list[int]:
    """What makes the results: the last barrier that one goes through, if nothing else reads it behind one, as it would
    not be in the barrier otherwise."""
    behind = set[int]().union(*(held_by(graph, op).intersection(op.inputs) for op in graph.ops))
    found = []
    for value in graph.outputs:
        barriers = [user for user in graph.users[value] if graph.ops[user].kind is Kind.BARRIER]
        found.append(barriers[-1] if barriers and value not in behind else graph.producer[value])
    return [root for root in dict.fromkeys(found) if root >= 0]


def _post_order(
    roots: Sequence[int],
    makers: Sequence[Sequence[int]],
    first: Callable[[int], tuple],
    before: Sequence[int] = (),
) -> tuple[int, ...]:
    """What each result needs, depth first, what an op needs in the order of a key; then all else.

    Args:
        roots: what makes the results.
        makers: of each op what it needs.
        first: the key.
        before: what comes before all results.
    """
    order: list[int] = []
    done = [False] * len(makers)
    for root in (*before, *sorted(roots, key=first), *range(len(makers))):
        stack = [(root, False)]
        while stack:
            op, is_ready = stack.pop()
            if done[op]:
                continue
            if is_ready:
                done[op] = True
                order.append(op)
                continue
            stack.append((op, True))
            stack.extend((maker, False) for maker in sorted(makers[op], key=first)[::-1] if not done[maker])
    return tuple(order)


def as_operands(graph: Graph) -> tuple[int, ...]:
    """What each result needs, depth first, results and operands as they stand."""
    return _post_order(_roots(graph), _makers(graph, _handed_on(graph)), lambda op: ())


def depth_first(graph: Graph, listed: Sequence[int] | None = None) -> tuple[int, ...]:
    """What each result needs, depth first: operands with the most users behind them first, then the largest.

    Both are counted once for each way to them, and so are at most as many as there are in all; sizes at most what the
    compiler had listed until then. Of zeros each array is taken out by an instruction of its own, which is a way.

    Args:
        graph: of kernels.
        listed: how the compiler lists them, taken for all that it has; None for depth first, too, as results and
            operands stand, and for more instructions than kernels.
    """
    extra = [0] * len(graph.ops)
    sizes = [0] * len(graph.ops)
    total, most = 0, _instructions(graph) if listed is None else len(listed)
    handed_on = _handed_on(graph)
    makers = _makers(graph, handed_on)
    ways = _ways(graph, makers, handed_on)
    roots = _roots(graph)
    for index in _post_order(roots, makers, lambda op: ()) if listed is None else listed:
        op = graph.ops[index]
        users = len(op.outputs) if _is_taken_apart(op) else len(_users(graph, op, handed_on))
        made = sum(graph.sizes[value] for value in op.outputs)
        total += made
        extra[index] = min(max(users - 1, 0) + sum(extra[m] + more for m, more in ways[index]), most)
        sizes[index] = min(made + sum(sizes[m] for m, _ in ways[index]), total)
    return _post_order(roots, makers, lambda op: (-extra[op], -sizes[op], op), _read_by_none(graph))


def _read_by_none(graph: Graph) -> list[int]:
    """Zeros of which one array is a result that nobody reads, which the compiler visits before all that is read."""
    return [
        index
        for index, op in enumerate(graph.ops)
        if op.name == ZEROS and any(not graph.users[value] and not graph.sizes[value] for value in op.outputs)
    ]


def _is_taken_apart(op: Op) -> bool:
    """Whether an op has several results, each of which is taken out by an instruction of its own, for certain: of other
    kernels the compiler may have made one with what reads their results."""
    return op.name == ZEROS and len(op.outputs) > 1


def _ways(
    graph: Graph, makers: Sequence[Sequence[int]], handed_on: Sequence[frozenset[int]]
) -> list[list[tuple[int, int]]]:
    """For each op the ways to what it has something from, with as many users more as come to that maker's own: of zeros
    those of each array that is read, but for one."""
    found = []
    for op, known, behind in zip(graph.ops, makers, handed_on, strict=True):
        ways = [(maker, 0) for maker in known if not _is_taken_apart(graph.ops[maker])]
        read = ((graph.producer[value], value) for value in op.inputs if value not in behind)
        apart = ((maker, value) for maker, value in read if maker >= 0 and _is_taken_apart(graph.ops[maker]))
        found.append([*ways, *((maker, len(graph.users[value]) - 1) for maker, value in apart)])
    return found
