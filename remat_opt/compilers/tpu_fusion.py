"""Elementwise work that a TPU's compiler does on a product's result before it is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

from jax.extend.core import primitives as P

from remat_opt.compilers.tpu_masks import MASK, UNPACK
from remat_opt.graph.fusion import held_by, there_from
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.ordering import behind_operands
from remat_opt.program.images import POOLS

MOST_STEPS = 64  # of elementwise work on one result
_OF_IMAGES = frozenset({P.conv_general_dilated_p.name, *(pool.name for pool in POOLS)})


def with_results_computed(graph: Graph, elements: Sequence[int]) -> Graph:
    """A graph of ops in which products go on computing with their results as long as all that is made of them are
    results of the step, and at most one other value, of as many elements: these are stored.

    Args:
        graph: ops in an order in which they can run.
        elements: of each value their number.
    """
    kernels: dict[int, list[Op]] = {}  # behind which op
    taken: set[int] = set()
    outputs = frozenset(graph.outputs)
    there = there_from(graph)
    given_of = {output: given for given, output in graph.aliases}
    for index, op in enumerate(graph.ops):
        if op.kind is not Kind.PRODUCT or len(op.outputs) != 1 or op.outputs[0] in outputs:
            continue
        steps = _steps_after(graph, outputs, taken, elements, there, index)
        if not steps:
            continue
        work = [op, *(graph.ops[step] for step in steps)]
        made = [value for one in work for value in one.outputs]
        inside = {index, *steps}
        stored = [v for v in made if v in outputs or any(user not in inside for user in graph.users[v])]
        kernel = dataclasses.replace(
            op,
            inputs=tuple(dict.fromkeys(value for one in work for value in one.inputs if value not in made)),
            outputs=tuple(stored),
            flops=sum(one.flops for one in work),
            seconds=sum(one.seconds for one in work),
        )
        taken |= inside
        # What takes an argument's place waits for all that read the argument.
        overwritten = [given_of[value] for value in stored if value in given_of]
        readers = [user for given in overwritten for user in graph.users[given] if user not in inside]
        last = max([index, *(user for user in readers if graph.ops[user].kind is not Kind.ELEMENTWISE)])
        kernels.setdefault(last, []).append(kernel)
    left = [one for at, op in enumerate(graph.ops) for one in (*(() if at in taken else (op,)), *kernels.get(at, ()))]
    return dataclasses.replace(graph, ops=tuple(left[at] for at in behind_operands(left)))


def _steps_after(
    graph: Graph,
    outputs: Container[int],
    taken: Container[int],
    elements: Sequence[int],
    there: Sequence[int],
    product: int,
) -> list[int]:
    """The elementwise ops, in their order, that a product does on its result. What else they read is there before the
    product, or is given to the step and read behind a barrier, for which the product then waits."""

    (result,) = graph.ops[product].outputs
    waiting = {result: set(graph.users[result])}
    steps: list[int] = []
    found = 0
    while waiting and len(steps) < MOST_STEPS:
        step = min(min(users) for users in waiting.values())
        op = graph.ops[step]
        if op.kind is not Kind.ELEMENTWISE or len(op.outputs) != 1 or step in taken:
            break
        if not _may_read(graph, there, product, steps, op.inputs):
            break
        steps.append(step)
        for value in op.inputs:
            if value in waiting:
                waiting[value].discard(step)
                if not waiting[value]:
                    del waiting[value]
        (made,) = op.outputs
        users = {user for user in graph.users[made] if made not in outputs or graph.ops[user].kind is not Kind.BARRIER}
        if op.name == MASK:  # stored beside the other value
            if len(waiting) <= 1:
                found = len(steps)
            continue
        if len(users) > 1 and any(graph.ops[user].name == P.transpose_p.name for user in users):
            break  # it is made in two layouts
        if users:
            waiting[made] = users
        if made in outputs and elements[made] != elements[result]:
            break
        is_stored_so = list(waiting) == [made] and elements[made] == elements[result] and not is_widened(graph, op)
        if not waiting or is_stored_so:
            found = len(steps)
    return _left_to_reader(graph, outputs, elements, product, steps[:found])


def _left_to_reader(
    graph: Graph, outputs: Container[int], elements: Sequence[int], product: int, steps: list[int]
) -> list[int]:
    """The steps behind a convolution that it does itself if another convolution or a pool alone reads what comes of
    them: up to the first result that several read, or step that reads another array of as many elements. The other one
    does the rest on its operand."""
    has_mask = any(graph.ops[step].name == MASK for step in steps)  # which is written beside what it is of
    if not steps or has_mask or graph.ops[product].name != P.conv_general_dilated_p.name:
        return steps
    (result,), (last,) = graph.ops[product].outputs, graph.ops[steps[-1]].outputs
    while last not in outputs and len(graph.users[last]) == 1:
        reader = graph.ops[graph.users[last][0]]
        if reader.kind is not Kind.ELEMENTWISE or len(reader.outputs) != 1:
            break
        (last,) = reader.outputs
    users = graph.users[last]
    if last in outputs or len(users) != 1 or graph.ops[users[0]].name not in _OF_IMAGES:
        return steps
    made = result
    for at, step in enumerate(steps):
        others = [value for value in graph.ops[step].inputs if value != made]
        if len(graph.users[made]) > 1 or any(elements[value] == elements[result] for value in others):
            return steps[:at]
        (made,) = graph.ops[step].outputs
    return steps


def _may_read(graph: Graph, there: Sequence[int], product: int, steps: Container[int], values: Sequence[int]) -> bool:
    """Whether a product and the steps behind it may read values: what is there before it, or the step's arguments and
    what is computed of them, behind barriers that do not wait for the product."""
    seen, unseen = set[int](), list(values)
    while unseen:
        value = unseen.pop()
        maker = graph.producer[value]
        is_kernel = maker >= 0 and graph.ops[maker].name == UNPACK
        if value in seen or maker in steps or (there[value] <= product and not is_kernel):
            continue
        seen.add(value)
        kind = Kind.BARRIER if is_kernel else graph.ops[maker].kind
        if kind is Kind.ELEMENTWISE:
            unseen += graph.ops[maker].inputs
        elif kind is not Kind.BARRIER or _waits_for(graph, maker, product):
            return False
    return True


def _waits_for(graph: Graph, later: int, earlier: int) -> bool:
    """Whether an op needs the results of one before it, itself or through others."""
    seen, unseen = {later}, [later]
    while unseen:
        makers = {graph.producer[value] for value in graph.ops[unseen.pop()].inputs}
        if earlier in makers:
            return True
        found = {maker for maker in makers if maker > earlier} - seen
        seen |= found
        unseen += found
    return False


NUMBER = "number"


def with_numbers_apart(graph: Graph, elements: Sequence[int]) -> Graph:
    """A graph of ops in which arithmetic on single numbers is in no kernel with other work: the scalar unit does it, in
    a memory of its own.

    Args:
        graph: of ops.
        elements: of each value their number.
    """
    ops = [
        dataclasses.replace(op, kind=Kind.OPAQUE, name=NUMBER)
        if op.kind is Kind.ELEMENTWISE
        and op.outputs
        and all(elements[value] == 1 for value in (*op.inputs, *op.outputs))
        else op
        for op in graph.ops
    ]
    return dataclasses.replace(graph, ops=tuple(ops))


def is_widened(graph: Graph, op: Op) -> bool:
    """Whether an op gives each element of an array more bytes, which those who read it can do themselves."""
    return op.name == "convert_element_type" and graph.sizes[op.outputs[0]] > sum(graph.sizes[v] for v in op.inputs) > 0


def widened(graph: Graph) -> frozenset[int]:
    """What is stored only for those who can read nothing but buffers: arrays that others are stored as in fewer
    bytes."""
    return frozenset(op.outputs[0] for op in graph.ops if is_widened(graph, op))


def with_widened_beside(graph: Graph) -> Graph:
    """A graph of kernels in which a product that is stored in fewer bytes, and in more for those who can read nothing
    but buffers, writes both."""
    ops = list(graph.ops)
    beside: dict[int, list[int]] = {}
    for op in graph.ops:
        if is_widened(graph, op) and len(op.inputs) == 1:
            maker = graph.producer[op.inputs[0]]
            if maker >= 0 and ops[maker].kind is Kind.PRODUCT:
                beside.setdefault(maker, []).append(op.outputs[0])
    moved = {value for values in beside.values() for value in values}
    kept = [
        dataclasses.replace(op, outputs=(*op.outputs, *beside.get(at, ())))
        for at, op in enumerate(ops)
        if moved.isdisjoint(op.outputs)
    ]
    return dataclasses.replace(graph, ops=tuple(kept))


def with_pads_in_readers(graph: Graph) -> Graph:
    """A graph of ops in which what a barrier reads padded the others pad themselves."""
    sizes, ops = list(graph.sizes), list(graph.ops)
    again: dict[int, Op] = {}
    for index, op in enumerate(graph.ops):
        if op.name != "pad" or len(op.outputs) != 1:
            continue
        (padded,) = op.outputs
        users = graph.users[padded]
        before = [user for user in users if graph.ops[user].kind is not Kind.BARRIER]
        others = [user for user in before if padded not in held_by(graph, graph.ops[user])]
        if not others or len(others) == len(users):
            continue
        sizes.append(sizes[padded])
        again[index] = dataclasses.replace(op, outputs=(len(sizes) - 1,))
        for user in others:
            inputs = tuple(len(sizes) - 1 if value == padded else value for value in ops[user].inputs)
            ops[user] = dataclasses.replace(ops[user], inputs=inputs)
    if not again:
        return graph
    both = [one for index, op in enumerate(ops) for one in ((op, again[index]) if index in again else (op,))]
    return dataclasses.replace(graph, sizes=tuple(sizes), ops=tuple(both))
