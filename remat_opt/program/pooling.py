"""The backward pass of max-pooling without a scatter, in two parts.

JAX differentiates max-pooling into `select_and_scatter_add`. XLA's CPU and GPU compilers expand that into a windowed
reduction that carries an index for every dimension (four arrays of integers beside the maximum, for images), an array
of zeros of the input's size, and a scatter; and it reads the pool's whole operand again. On a TPU it is one
instruction, which needs none of that.

The form here has one byte for each window, its *place*, which says where in the window the maximum was found. It is
made beside the pool and is all that the backward pass reads; the rest is elementwise and is fused. Windows are visited
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
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.masks import is_zero
from remat_opt.program.platforms import GPUS

# One term of the sum for each place in a window; beyond this a scatter is the shorter program.
LARGEST_WINDOW = 64
_WINDOWS = ("window_dimensions", "window_strides", "padding")
EXPANDING_PLATFORMS = GPUS | {"cpu"}


def without_scatter(equation: Equation, platform: str) -> bool:
    """Whether an equation is to be written by `scatter_free`: the platform's compiler would expand it, and the window
    is small and not padded by a whole window."""
    if equation.primitive is not primitives.select_and_scatter_add_p or platform not in EXPANDING_PLATFORMS:
        return False
    window, padding = equation.params["window_dimensions"], equation.params["padding"]
    inside = all(0 <= pad < size for size, pads in zip(window, padding, strict=True) for pad in pads)
    return inside and math.prod(window) <= LARGEST_WINDOW


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Stands in an equation for a primitive: several operations that are one to the planner."""

    name: str
    bind: Callable[..., jax.Array]
    multiple_results: bool = False

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """As of JAX's primitives."""
        return params


def places_of(operand: jax.Array, *, pool: dict[str, Any], rectified: bool = False) -> jax.Array:
    """For each window of an array the index of the place in it that is selected.

    Args:
        operand: the array.
        pool: parameters of `select_and_scatter_add`: `select_prim` ("ge" for a maximum), window dimensions, strides and
            padding.
        rectified: give -1 where what is selected is not positive.

    Returns:
        int8 (windows along each dimension of `operand`); there are at most `LARGEST_WINDOW` places.
    """
    window, padding, strides = pool["window_dimensions"], pool["padding"], pool["window_strides"]
    select = pool["select_prim"]
    places = list(itertools.product(*map(range, window)))
    counts = [
        (size + low + high - reach) // stride + 1
        for size, (low, high), reach, stride in zip(operand.shape, padding, window, strides, strict=True)
    ]
    least = -np.inf if select is primitives.ge_p else np.inf
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        limits = jnp.iinfo(operand.dtype)
        least = limits.min if select is primitives.ge_p else limits.max
    padded = lax.pad(operand, jnp.asarray(least, operand.dtype), [(low, high, 0) for low, high in padding])

    def at(place: tuple[int, ...]) -> jax.Array:
        ends = [start + (count - 1) * step + 1 for start, count, step in zip(place, counts, strides, strict=True)]
        return lax.slice(padded, place, ends, strides)

    best = at(places[0])
    which = jnp.zeros_like(best, jnp.int8)
    for index, place in enumerate(places[1:], 1):
        candidate = at(place)
        keep = select.bind(best, candidate)
        best = lax.select(keep, best, candidate)
        which = lax.select(keep, which, jnp.full_like(which, index))
    return lax.select(best > 0, which, jnp.full_like(which, -1)) if rectified else which


def spread(source: jax.Array, which: jax.Array, *, pool: dict[str, Any], shape: tuple[int, ...]) -> jax.Array:
    """For each element of a pooled array the sum over the windows that selected it.

    Args:
        source: one number for each window.
        which: the place that each window selected, from `places_of`.
        pool: as of `places_of`.
        shape: of the array that was pooled.
    """
    window, strides, padding = pool["window_dimensions"], pool["window_strides"], pool["padding"]
    places = list(itertools.product(*map(range, window)))
    # Elements that are a multiple of the stride apart are at the same places of windows: they are summed up together,
    # as many as there are windows, and spread once.
    sums: dict[tuple[int, ...], jax.Array] = {}
    for index in reversed(range(len(places))):  # windows in their order: the first has the element at its end
        begins = [place - low for place, (low, _) in zip(places[index], padding, strict=True)]
        first = tuple(begin % stride for begin, stride in zip(begins, strides, strict=True))
        counts = [-(-(n - start) // stride) for n, start, stride in zip(shape, first, strides, strict=True)]
        if min(counts) <= 0:  # in the padding, in all windows
            continue
        skipped = [begin // stride for begin, stride in zip(begins, strides, strict=True)]
        part = lax.select(which == index, source, jnp.zeros_like(source))
        shift = [(low, n - low - windows, 0) for low, n, windows in zip(skipped, counts, source.shape, strict=True)]
        part = lax.pad(part, np.zeros((), source.dtype), shift)
        sums[first] = sums[first] + part if first in sums else part
    total = None
    for first, part in sums.items():
        wide = [
            (start, n - start - (count - 1) * stride - 1, stride - 1)
            for start, n, count, stride in zip(first, shape, part.shape, strides, strict=True)
        ]
        part = lax.pad(part, np.zeros((), source.dtype), wide)
        total = part if total is None else total + part
    return jnp.zeros(shape, source.dtype) if total is None else total


def both(source: jax.Array, operand: jax.Array, *, pool: dict[str, Any]) -> jax.Array:
    """The whole backward pass: `spread` to the places of an array."""
    return spread(source, places_of(operand, pool=pool), pool=pool, shape=operand.shape)


PLACES = Part("max_pool_places", places_of)
SPREAD = Part("max_pool_spread", spread)
BOTH = Part("max_pool_backward", both)


def by_places(program: Program, platform: str) -> Program:
    """The same program with such scatters in two parts, and on the CPU in one.

    Places are made behind the pool and are read behind one barrier with its result, so that no compiler makes them
    later, or again, from the operand.
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
        self.producer = {value: index for index, one in enumerate(program.equations) for value in one.outputs}
        self.readers: dict[int, list[int]] = {}
        for index, equation in enumerate(program.equations):
            for value in {atom for atom in equation.inputs if isinstance(atom, int)}:
                self.readers.setdefault(value, []).append(index)
        self.instead: dict[int, Equation] = {}  # by the index of the equation that makes the result
        self.behind: dict[int, list[Equation]] = {}  # what comes next; -1 for the beginning
        self.gone: set[int] = set()
        self.opaque = set(program.opaque)
        self.together = list(program.together)

    def run(self, scatters: Sequence[Equation]) -> Program:
        for equation in scatters:
            self.divide(equation)
        equations = [*self.behind.get(-1, ())]
        for index, equation in enumerate(self.program.equations):
            if index not in self.gone:
                equations.append(self.instead.get(index, equation))
            equations += self.behind.get(index, ())
        return dataclasses.replace(
            self.program,
            avals=tuple(self.avals),
            equations=tuple(equations),
            opaque=frozenset(self.opaque),
            together=tuple(self.together),
        )

    def divide(self, equation: Equation) -> None:
        source, operand = equation.inputs
        (at,) = {self.producer[value] for value in equation.outputs}
        mask = self.mask_behind(equation)
        aval = operand.aval if isinstance(operand, Constant) else self.avals[operand]
        pool = _pool(equation)
        params = {"pool": pool, "rectified": mask is not None}
        given = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        windows = jax.eval_shape(functools.partial(places_of, **params), given)
        which = len(self.avals)
        self.avals.append(windows)
        self.opaque.add(which)
        places = dataclasses.replace(equation, primitive=PLACES, inputs=(operand,), outputs=(which,), params=params)
        pooled = self.pool_of(operand, pool, at)
        if pooled is None:
            made = self.producer.get(operand, -1) if isinstance(operand, int) else -1
        else:
            made = pooled
            self.together.append((which, self.program.equations[pooled].outputs[0]))
        self.behind.setdefault(made, []).append(places)
        last = at if mask is None else mask
        self.instead[last] = dataclasses.replace(
            equation,
            primitive=SPREAD,
            inputs=(source, which),
            outputs=self.program.equations[last].outputs,
            params={"pool": pool, "shape": tuple(aval.shape)},
        )
        if mask is not None:
            self.gone.add(at)
            self.drop_mask(mask, operand)

    def pool_of(self, operand: int | Constant, pool: dict[str, Any], before: int) -> int | None:
        """The equation, before another one, that pools an operand."""
        for index in self.readers.get(operand, ()) if isinstance(operand, int) else ():
            one = self.program.equations[index]
            is_pool = one.primitive.name.startswith("reduce_window") and index < before
            if is_pool and all(one.params.get(name) == pool[name] for name in _WINDOWS):
                return index
        return None

    def mask_behind(self, equation: Equation) -> int | None:
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

    def drop_mask(self, select: int, operand: int | Constant) -> None:
        """A mask that nothing else reads is not made, and its rectifier's result need not be hidden for it."""
        mask = self.program.equations[select].inputs[0]
        assert isinstance(mask, int)
        if self.readers[mask] != [select] or mask in self.program.outputs:
            return
        self.gone.add(self.producer[mask])
        if isinstance(operand, int):
            readers = [self.program.equations[index] for index in self.readers[operand]]
            if [one.outputs for one in readers if one.primitive is primitives.gt_p] == [(mask,)]:
                self.opaque.discard(operand)
