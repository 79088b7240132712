"""Tables of addresses: a TPU's kernels with several results list these in the device's memory, a page for each."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Set

from jax.extend.core import primitives as P

from remat_opt.compilers.packing import OF_BODIES
from remat_opt.graph.graph import Graph, Kind, Op


def has_several_results(graph: Graph, op: Op) -> bool:
    """Whether a kernel has a table for what it makes. (Updates are counted otherwise; a loop's body has its own.)"""
    is_update = not set(graph.outputs).isdisjoint(op.outputs)
    return not is_update and op.name not in OF_BODIES and sum(graph.sizes[value] > 0 for value in op.outputs) > 1


def with_small_tables(graph: Graph, accumulated: Set[int], numbers: Set[int], page: int) -> Graph:
    """A graph of kernels with the tables of those that XLA joins and we do not: updates of several arrays by one
    gradient, sums of what the step is given, and the mean and the variance that are made of two sums.

    Args:
        graph: kernels in an order in which they can run, none joined yet.
        accumulated: results of sums over columns.
        numbers: values of one element.
        page: bytes of a table.
    """
    families = collections.defaultdict[object, list[int]](list)
    for at, kind, value in _family_members(graph, accumulated, numbers):
        families[kind, value].append(at)
    tables = collections.Counter(members[0] for members in families.values() if len(members) > 1)
    ops = [dataclasses.replace(op, tables=op.tables + page * tables[at]) for at, op in enumerate(graph.ops)]
    return dataclasses.replace(graph, ops=tuple(ops))


def _family_members(graph: Graph, accumulated: Set[int], numbers: Set[int]) -> Iterable[tuple[int, str, int]]:
    """Kernels that may be joined with others, each with what they have in common."""
    outputs = set(graph.outputs)
    gradient_of: dict[int, int] = {}  # for a result what it is an update by, itself or through another result
    for at, op in enumerate(graph.ops):
        if op.kind is Kind.ELEMENTWISE and outputs.issuperset(op.outputs):
            made = [gradient_of.get(value, value) for value in op.inputs if graph.producer[value] >= 0]
            if made:
                gradient = max(made, key=lambda value: (graph.sizes[value], value))
                gradient_of.update(dict.fromkeys(op.outputs, gradient))
                yield from ((at, "update", gradient) for _ in op.outputs)
        elif op.kind is Kind.PRODUCT and outputs.issuperset(op.outputs):
            gradient_of.update(dict.fromkeys(op.outputs, op.outputs[0]))
            yield from ((at, "update", op.outputs[0]) for _ in op.outputs)
        elif op.kind is Kind.REDUCTION and op.inputs:
            reduced = max(op.inputs, key=lambda v: (graph.sizes[v], _is_product(graph, v), graph.producer[v]))
            if graph.producer[reduced] < 0:
                if not accumulated.isdisjoint(op.outputs):
                    yield at, "of given", reduced
            elif op.name == P.reduce_sum_p.name and numbers.isdisjoint(op.outputs):
                yield at, "sum", reduced


def _is_product(graph: Graph, value: int) -> bool:
    maker = graph.producer[value]
    return maker >= 0 and graph.ops[maker].kind is Kind.PRODUCT
