"""What lies as a TPU's products have it that make gradients of weights with two dimensions of features.

Of features in two dimensions, as ten splines at each of 784 figures, products that sum over both, or make both, have
the larger one in the tiles beside the batch, and the smaller one outside: so they pad least, too. A gradient of
weights (784, 8, outputs) is made in that order, with the last features in the sublanes, where they fill these and the
first ones do not fill the lanes; what is summed over the batch for it then has these last features and the batch in its
tiles. XLA's layout assignment hands that on to all that elementwise work, barriers and cuts connect with it, of which
some may pad much more: eight splines are made of nine, and these of ten, which take sixteen sublanes.

The last product that reads any of it decides, so that one that sums over both follows its gradient. Where a product
makes some of it, as cotangents of the features, that decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.graph.tiles import LANES, SUBLANES, bytes_with_lanes
from remat_opt.program.images import connected_arrays
from remat_opt.program.inline import Equation, Program


def lying_for_gradients(program: Program) -> Mapping[int, tuple[int, int]]:
    """Values that lie as a gradient of weights has them: which dimensions of each are in the lanes and sublanes."""
    products = [equation for equation in program.equations if equation.primitive is P.dot_general_p]
    turned = {e.inputs[0]: e.params["permutation"] for e in program.equations if e.primitive is P.transpose_p}
    tiles = {(at, x): tile for at, e in enumerate(products) for x, tile in _read(e, program, turned).items()}
    found: dict[int, tuple[int, int]] = {}
    if not tiles:
        return found
    connected = connected_arrays(program)
    for (at, x), tile in tiles.items():
        group = connected([x])
        last = max(place for place, product in enumerate(products) if not group.isdisjoint(product.inputs))
        if last == at and not any(product.outputs[0] in group for product in products):
            found.update(dict.fromkeys(group.difference(program.inputs), tile))
    return found


def _read(product: Equation, program: Program, turned: Mapping[Any, Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Features in two dimensions that a product sums over their batch for weights in the same order, and that lie so:
    which dimensions are in the lanes and sublanes."""
    contracted, batch = product.params["dimension_numbers"]
    shapes = [program.aval_of(x).shape for x in product.inputs]
    (result,) = product.outputs
    order = turned.get(result, range(3))
    found: dict[int, tuple[int, int]] = {}
    for at, x in enumerate(product.inputs):
        if not isinstance(x, int) or batch[0] or len(shapes[at]) != 3 or len(shapes[1 - at]) != 2:
            continue
        if tuple(contracted[at]) != (0,) or tuple(order) != ((1, 2, 0) if at else (0, 1, 2)):
            continue
        _, first, last = shapes[at]
        if not last % SUBLANES and first % LANES:
            found[x] = min((0, 2), (2, 0), key=lambda tile: bytes_with_lanes(shapes[at], 4, *tile))
    return found
