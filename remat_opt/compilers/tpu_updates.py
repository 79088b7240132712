"""Results that would take the place of what a TPU's product still reads.

What a loop carries, and a donated argument, give their places to results. A product needs its operands until it is
done, so a result that it makes of its own operand, with elementwise work on both sides, is made beside it and copied
into its place. (What stands beside the product it may be written over: `tpu_beside.py`.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from remat_opt.graph.graph import Graph, Kind, Op


def with_results_copied(kernels: Graph, ops: Graph) -> Graph:
    """A graph of kernels in which no product's result takes the place of its operand.

    Args:
        kernels: in an order in which they can run.
        ops: the same graph before these were made of it.
    """
    stored = {*kernels.inputs, *(value for kernel in kernels.ops for value in kernel.outputs)}
    sizes = list(kernels.sizes)
    copied: dict[int, dict[int, int]] = {}  # by kernel, for each such result what is made beside
    for given, output in kernels.aliases:
        at = kernels.producer[output]
        if at < 0 or kernels.ops[at].kind is not Kind.PRODUCT or given not in kernels.ops[at].inputs:
            continue
        own = stored.difference(kernels.ops[at].outputs)
        products = [one for one in _made_in_kernel(ops, output, own) if ops.ops[one].kind is Kind.PRODUCT]
        if any(given in _read_by(ops, product, own) for product in products):
            copied.setdefault(at, {})[output] = len(sizes)
            sizes.append(sizes[output])
    if not copied:
        return kernels
    found: list[Op] = []
    for at, kernel in enumerate(kernels.ops):
        instead = copied.get(at, {})
        found.append(kernel.but(outputs=tuple(instead.get(x, x) for x in kernel.outputs)) if instead else kernel)
        found += [Op((made,), (output,), name="copied back") for output, made in instead.items()]
    return dataclasses.replace(kernels, sizes=tuple(sizes), ops=tuple(found))


def _made_in_kernel(ops: Graph, output: int, stored: Container[int]) -> set[int]:
    """Ops that a result is made by, up to what other kernels store; of products not what they read."""
    found: set[int] = set()
    waiting = [output]
    while waiting:
        at = ops.producer[waiting.pop()]
        if at >= 0 and at not in found:
            found.add(at)
            if ops.ops[at].kind is not Kind.PRODUCT:
                waiting += [value for value in ops.ops[at].inputs if value not in stored]
    return found


def _read_by(ops: Graph, product: int, stored: Container[int]) -> set[int]:
    """Buffers that a product reads, through what is computed in its kernel."""
    found: set[int] = set()
    waiting, seen = list(ops.ops[product].inputs), set[int]()
    while waiting:
        value = waiting.pop()
        if value in stored:
            found.add(value)
        elif value not in seen and ops.producer[value] >= 0:
            seen.add(value)
            waiting += ops.ops[ops.producer[value]].inputs
    return found
