"""The backward pass of max-pooling without a scatter, in two parts.

JAX differentiates max-pooling into `select_and_scatter_add`. XLA's CPU and GPU compilers expand that into a windowed
reduction that carries an index for every dimension (four arrays of integers beside the maximum, for images), an array
of zeros of the input's size, and a scatter; and it reads the pool's whole operand again. On a TPU it is one
instruction, which needs none of that.

The form here has one byte for each window, its *place*, which says where in the window the maximum was found. It is
made with the pool and is all that the backward pass reads; the rest is elementwise and is fused. Windows are visited
in the same order and each element sums its windows in the same order, so that the results are the same to the bit, for
ties, infinities and NaNs too.

*Rectified operands.* The gradient of a rectifier in front of a pool is masked where its input was not positive. The
only elements that the pool gives a gradient to are those that it selected: their windows say it themselves, by a place
of -1, and neither the mask nor what it was made of is kept.

*On the CPU* both parts stay one operation, which reads the operand again: in two parts less would have to be
recomputed, and without the barriers of what is recomputed XLA:CPU leaves the gradients of weights for the end (a small
VGG-16: 59 MB for 45).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import primitives

from remat_opt.rewrites.masks import is_zero
from remat_opt.trace.inline import Constant, Equation, Program, alive
from remat_opt.trace.platforms import EXPANDING
from remat_opt.trace.pool_parts import BOTH, PLACES, SPREAD, places_of

# One term of the sum for each place in a window; beyond this a scatter is the shorter program.
LARGEST_WINDOW = 64
_WINDOWS = ("window_dimensions", "window_strides", "padding")


def without_scatter(equation: Equation, platform: str) -> bool:
    """Whether an equation is to be written by `scatter_free`: the platform's compiler would expand it, and the window
    is small and not padded by a whole window."""
    if equation.primitive is not primitives.select_and_scatter_add_p or platform not in EXPANDING:
        return False
    window, padding = equation.params["window_dimensions"], equation.params["padding"]
    inside = all(0 <= pad < size for size, pads in zip(window, padding, strict=True) for pad in pads)
    return inside and math.prod(window) <= LARGEST_WINDOW


def by_places(program: Program, platform: str) -> Program:
    """The same program with such scatters in two parts, and on the CPU in one.

    Places are made right after the pool and are read after one barrier with its result, so that no compiler makes
    them later, or a second time, from the operand.
    """
    scatters = [equation for equation in program.equations if without_scatter(equation, platform)]
    if not scatters:
        return program
    if platform == "cpu":
        in_one = {id(one): dataclasses.replace(one, primitive=BOTH, params={"pool": _pool(one)}) for one in scatters}
        return dataclasses.replace(program, equations=tuple(in_one.get(id(one), one) for one in program.equations))
    return _Rewriting(program).run(scatters)


def _pool(equation: Equation) -> dict[str, Any]:
    return {name: equation.params[name] for name in ("select_prim", *_WINDOWS)}


class _Rewriting:
    def __init__(self, program: Program):
        self.program = program
        self.avals = list(program.avals)
        self.producer, self.readers = program.producer, program.readers
        self.instead: dict[int, Equation] = {}  # by the index of the equation that makes the result
        self.inserted_after: dict[int, list[Equation]] = {}  # what comes next; -1 for the beginning
        self.places: set[int] = set()
        self.in_one_barrier = list(program.in_one_barrier)

    def run(self, scatters: Sequence[Equation]) -> Program:
        for equation in scatters:
            self.divide(equation)
        equations = [*self.inserted_after.get(-1, ())]
        for index, equation in enumerate(self.program.equations):
            equations += [self.instead.get(index, equation), *self.inserted_after.get(index, ())]
        kept = alive(equations, self.program.outputs)
        # A rectifier's result need not be hidden for a mask that is not made any more.
        compared = {value for one in kept if one.primitive is primitives.gt_p for value in one.reads}
        return dataclasses.replace(
            self.program,
            avals=tuple(self.avals),
            equations=kept,
            opaque=self.program.opaque.intersection(compared) | self.places,
            in_one_barrier=tuple(self.in_one_barrier),
        )

    def divide(self, equation: Equation) -> None:
        source, operand = equation.inputs
        (at,) = {self.producer[value] for value in equation.outputs}
        mask = self.mask_after(equation)
        aval = self.program.aval_of(operand)
        pool = _pool(equation)
        params = {"pool": pool, "rectified": mask is not None}
        given = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        windows = jax.eval_shape(functools.partial(places_of, **params), given)
        which = len(self.avals)
        self.avals.append(windows)
        self.places.add(which)
        places = dataclasses.replace(equation, primitive=PLACES, inputs=(operand,), outputs=(which,), params=params)
        pooled = self.pool_of(operand, pool, at)
        if pooled is None:
            made = self.producer.get(operand, -1) if isinstance(operand, int) else -1
        else:
            made = pooled
            self.in_one_barrier.append((which, self.program.equations[pooled].outputs[0]))
        self.inserted_after.setdefault(made, []).append(places)
        last = at if mask is None else mask
        self.instead[last] = dataclasses.replace(
            equation,
            primitive=SPREAD,
            inputs=(source, which),
            outputs=self.program.equations[last].outputs,
            params={"pool": pool, "shape": tuple(aval.shape)},
        )

    def pool_of(self, operand: int | Constant, pool: dict[str, Any], before: int) -> int | None:
        """The equation, before another one, that pools an operand."""
        for index in self.readers.get(operand, ()) if isinstance(operand, int) else ():
            one = self.program.equations[index]
            is_pool = one.primitive.name.startswith("reduce_window") and index < before
            if is_pool and all(one.params.get(name) == pool[name] for name in _WINDOWS):
                return index
        return None

    def mask_after(self, equation: Equation) -> int | None:
        """The equation that masks a gradient where the rectifier in front of the pool was not positive, and is all that
        reads it."""
        (result,), operand = equation.outputs, equation.inputs[1]
        readers = self.readers.get(result, ())
        rectifier = self.made_by(operand, primitives.max_p)
        is_maximum = equation.params["select_prim"] is primitives.ge_p
        if len(readers) != 1 or result in self.program.outputs or rectifier is None or not is_maximum:
            return None
        if not is_zero(rectifier.inputs[1]):
            return None
        select = self.program.equations[readers[0]]
        if select.primitive is not primitives.select_n_p or len(select.inputs) != 3:
            return None
        mask = self.made_by(select.inputs[0], primitives.gt_p)
        asks = mask is not None and mask.inputs[0] in (rectifier.inputs[0], operand) and is_zero(mask.inputs[1])
        return readers[0] if asks and self.is_zeros(select.inputs[1]) else None

    def made_by(self, value: int | Constant, primitive: Any) -> Equation | None:
        maker = self.producer.get(value) if isinstance(value, int) else None
        equation = None if maker is None else self.program.equations[maker]
        return equation if equation is not None and equation.primitive is primitive else None

    def is_zeros(self, value: int | Constant) -> bool:
        spread_out = self.made_by(value, primitives.broadcast_in_dim_p)
        return is_zero(value) or (spread_out is not None and is_zero(spread_out.inputs[0]))
