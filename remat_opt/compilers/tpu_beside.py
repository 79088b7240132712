"""What a TPU's products make beside what they are: kernels with several results, by XLA's multi-output fusion.

A product that is stored goes on: elementwise work that is stored, too, is done on its result at once, so that this is
read from no memory. It may be written over what such work reads beside the product; what the product itself reads it
needs until it is done (seen in dumps of libtpu 0.0.51).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat_opt.compilers.tpu_loops import PRODUCTS
from remat_opt.graph.graph import Graph, Kind, Op


def with_pieces_beside(graph: Graph, elements: Sequence[int]) -> Graph:
    """A graph of ops in which a product whose result is stored makes of it what a concatenation that another product
    reads takes, too.

    Args:
        graph: ops in an order in which they can run.
        elements: of each value their number.
    """
    kernels: dict[int, Op] = {}
    inside = set[int]()
    for index, op in enumerate(graph.ops):
        steps = _piece_of(graph, elements, index) if op.kind is Kind.PRODUCT and len(op.outputs) == 1 else []
        if not steps:
            continue
        work = [op, *(graph.ops[step] for step in steps)]
        made = {value for one in work for value in one.outputs}
        kernels[index] = dataclasses.replace(
            op,
            inputs=tuple(dict.fromkeys(value for one in work for value in one.inputs if value not in made)),
            outputs=(*op.outputs, *work[-1].outputs),
            flops=sum(one.flops for one in work),
            seconds=sum(one.seconds for one in work),
            in_tuple=True,
        )
        inside.update(steps)
    ops = [kernels.get(index, op) for index, op in enumerate(graph.ops) if index not in inside]
    return dataclasses.replace(graph, ops=tuple(ops)) if kernels else graph


def with_work_beside(graph: Graph, elements: Sequence[int]) -> Graph:
    """A graph of kernels in which products do stored elementwise work of as many elements, too, of which they make the
    last operand; what nobody else reads is not stored then.

    Args:
        graph: kernels in an order in which they can run.
        elements: of each value their number.
    """
    beside = _Beside(graph, elements)
    for at, op in enumerate(graph.ops):
        if op.kind is Kind.ELEMENTWISE:
            beside.add(at)
    return beside.graph()


class _Beside:
    """Kernels, with those of products that do more."""

    def __init__(self, graph: Graph, elements: Sequence[int]):
        self._given = graph
        self._elements = elements
        self._outputs = frozenset(graph.outputs)
        self._ops: list[Op | None] = list(graph.ops)
        self._kernel_of = {value: at for at, op in enumerate(graph.ops) for value in op.outputs}
        self._users: dict[int, set[int]] = {v: set(users) for v, users in enumerate(graph.users)}

    def graph(self) -> Graph:
        return dataclasses.replace(self._given, ops=tuple(op for op in self._ops if op is not None))

    def add(self, at: int) -> None:
        """Do elementwise work in the kernel of the product that makes its last operand, if there is one that can."""
        op = self._given.ops[at]
        last = max((self._kernel_of[value] for value in op.inputs if value in self._kernel_of), default=-1)
        product = self._ops[last] if last >= 0 else None
        if product is None or product.name not in PRODUCTS:
            return
        if not self._outputs.isdisjoint((*op.outputs, *product.outputs)):
            return
        made = max(self._elements[value] for value in op.outputs)
        # Sums that the product makes are there behind it alone.
        if all(self._elements[value] == made > 1 for value in op.inputs if value in product.outputs):
            self._join(at, last, product)

    def _join(self, at: int, last: int, product: Op) -> None:
        op = self._given.ops[at]
        self._ops[at] = None
        for value in op.inputs:
            self._users[value].discard(at)
            if self._kernel_of.get(value) != last:
                self._users[value].add(last)
        self._kernel_of.update(dict.fromkeys(op.outputs, last))
        made = tuple(value for value in (*product.outputs, *op.outputs) if self._users[value])
        by_elements = (v for v in op.inputs if v not in (*op.moved_of, *op.rows_of, *product.outputs, *product.inputs))
        self._ops[last] = dataclasses.replace(
            product,
            inputs=tuple(dict.fromkeys((*product.inputs, *(v for v in op.inputs if v not in product.outputs)))),
            outputs=made,
            flops=product.flops + op.flops,
            tables=product.tables + op.tables,
            written_over=tuple(dict.fromkeys((*product.written_over, *by_elements))),
            in_tuple=len(made) > 1,
        )


def _piece_of(graph: Graph, elements: Sequence[int], product: int) -> list[int]:
    """The elementwise ops, in their order, from a product's result to a piece of a concatenation, if others read the
    result, too, and all else that they read is there before the product."""
    (result,) = graph.ops[product].outputs
    first = graph.users[result]
    found = (_piece_from(graph, elements, product, step) for step in first) if len(first) > 1 else ()
    return next(filter(None, found), [])


def _piece_from(graph: Graph, elements: Sequence[int], product: int, step: int) -> list[int]:
    steps: list[int] = []
    made = graph.ops[product].outputs[0]
    while True:
        op = graph.ops[step]
        is_there = all(value == made or graph.producer[value] < product for value in op.inputs)
        is_alike = [elements[value] for value in op.outputs] == [elements[made]]
        if op.kind is not Kind.ELEMENTWISE or not is_there or not is_alike:
            return []
        steps.append(step)
        made = op.outputs[0]
        readers = graph.users[made]
        if readers and all(_joins_for_products(graph, reader) for reader in readers):
            return steps
        if len(readers) != 1:
            return []
        step = readers[0]


def _joins_for_products(graph: Graph, index: int) -> bool:
    """Whether an op is a concatenation that products alone read."""
    op = graph.ops[index]
    users = [user for value in op.outputs for user in graph.users[value]]
    return op.name == "concatenate" and bool(users) and all(graph.ops[user].kind is Kind.PRODUCT for user in users)
