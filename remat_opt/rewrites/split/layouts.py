"""How a value lies with respect to the batch, and how an equation runs on a chunk of it.

A value has one of three layouts. `None`: it is whole, the same for every chunk. A number: its axis of that number holds
the batch, as B contiguous blocks of equal size, one for each row of the batch (an axis of B × T is one where a reshape
has merged the batch with the T that follow it). A `Sum`: the value is the sum (or maximum, …) of what chunks give.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from remat_opt.rewrites.split.devices import Devices
from remat_opt.trace import compat
from remat_opt.trace.inline import Equation, Program, inline


class Sum(enum.Enum):
    """How the results of chunks become the result for the batch."""

    ADD = "sum"
    MAX = "maximum"
    MIN = "minimum"
    OR = "or"
    AND = "and"
    SAME = "the same"  # in every chunk

    def combine(self, total: Any, part: Any) -> Any:
        """The result of the chunks so far and of one more."""
        return part if self is Sum.SAME else _COMBINE[self](total, lax.convert_element_type(part, total.dtype))

    def start(self, aval: Any) -> Any:
        """The result of no chunk: of the type in which chunks are combined."""
        dtype = accumulated(aval.dtype) if self is Sum.ADD else aval.dtype
        return lax.full(aval.shape, _neutral(self, dtype), dtype)

    def over(self, parts: Any) -> Any:
        """The result of parts that a leading axis has."""
        return _REDUCE[self](parts, (0,))


_COMBINE: dict[Sum, Callable[[Any, Any], Any]] = {
    Sum.ADD: lax.add,
    Sum.MAX: lax.max,
    Sum.MIN: lax.min,
    Sum.OR: lax.bitwise_or,
    Sum.AND: lax.bitwise_and,
}
_REDUCE: dict[Sum, Callable[[Any, Sequence[int]], Any]] = {
    Sum.ADD: lax.reduce_sum,
    Sum.MAX: lax.reduce_max,
    Sum.MIN: lax.reduce_min,
    Sum.OR: lax.reduce_or,
    Sum.AND: lax.reduce_and,
}


def accumulated(dtype: Any) -> Any:
    """The type in which sums over chunks are carried: float32 at least; integers in their own."""
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype("float32") if is_short else dtype


def _neutral(kind: Sum, dtype: Any) -> Any:
    if kind in (Sum.ADD, Sum.OR, Sum.SAME):
        return np.zeros((), dtype)
    if kind is Sum.AND:
        return np.array(True) if dtype == np.bool_ else np.array(-1).astype(dtype)
    if dtype == np.bool_:
        return np.array(kind is Sum.MIN)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.array(-np.inf if kind is Sum.MAX else np.inf, dtype)
    return np.array(jnp.iinfo(dtype).min if kind is Sum.MAX else jnp.iinfo(dtype).max, dtype)


Layout = int | Sum | None


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One of the chunks that the batch is split into, while the body of the loop over them is traced.

    Attributes:
        index: its number, an int32 scalar.
        rows: how many rows of the batch it has.
        batch: how many rows the batch has.
        devices: that the batch is divided among, where it is.
        turn: its number among the chunks of its device; `index` on one device.
    """

    index: Any
    rows: int
    batch: int
    devices: Devices | None = None
    turn: Any = None

    def size(self, whole: int) -> int:
        """The part of an axis that holds the batch."""
        return whole // self.batch * self.rows

    def shape(self, whole: Sequence[int], axis: int) -> tuple[int, ...]:
        """The shape of the part of an array."""
        return tuple(self.size(n) if at == axis else n for at, n in enumerate(whole))

    def start(self, whole: int) -> Any:
        """Where the part of an axis begins."""
        return lax.mul(self.index, np.int32(self.size(whole)))

    def slice(self, array: Any, axis: int) -> Any:
        """The part of a whole array."""
        whole = array.shape[axis]
        return lax.dynamic_slice_in_dim(array, self.start(whole), self.size(whole), axis)

    def start_on_device(self, part: int) -> Any:
        """Where the part of an axis begins in what its device has of it."""
        whole = part * (self.devices.count if self.devices else 1)
        return lax.mul(self.turn, np.int32(self.size(whole)))

    def slice_on_device(self, array: Any, axis: int) -> Any:
        """The part of what its device has of an array."""
        whole = array.shape[axis] * (self.devices.count if self.devices else 1)
        return lax.dynamic_slice_in_dim(array, self.start_on_device(array.shape[axis]), self.size(whole), axis)

    def first_only(self, array: Any) -> Any:
        """A whole array in the first chunk, zeros in the others: the sum over all chunks is the array."""
        return lax.select(lax.broadcast(lax.eq(self.index, np.int32(0)), array.shape), array, lax.full_like(array, 0))


Bind = Callable[[Equation, Sequence[Any], Chunk], Sequence[Any]]


def bind_as_it_is(equation: Equation, operands: Sequence[Any], chunk: Chunk) -> Sequence[Any]:
    """The equation on a chunk, where no parameter says how large the batch is."""
    return compat.bind_equation(equation.primitive, equation.params, operands)


@dataclasses.dataclass(frozen=True)
class Run:
    """How an equation runs on one chunk.

    Attributes:
        inputs: the layout in which each operand is read.
        outputs: the layout of each result; none is whole.
        bind: evaluates it.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    bind: Bind = bind_as_it_is


class Context:
    """What is split by which rules, and the bodies of equations as programs, read once.

    Args:
        batch: rows of the batch.
        rules: by the primitive.
        bodies: bodies that were read before.
        is_body: whether it is part of an equation of another program, which runs on chunks as a whole.
    """

    def __init__(
        self,
        batch: int,
        rules: Mapping[Any, Rule],
        bodies: dict[int, tuple[Any, Program]],
        *,
        is_body: bool = False,
    ):
        self.batch = batch
        self.rules = rules
        self.bodies = bodies
        self.is_body = is_body

    def inside(self) -> Context:
        """The same for the body of an equation."""
        return Context(self.batch, self.rules, self.bodies, is_body=True)

    def body(self, jaxpr: Any) -> Program:
        """A jaxpr of an equation's parameters as a program; the user's own checkpoints stay."""
        if id(jaxpr) not in self.bodies:
            self.bodies[id(jaxpr)] = jaxpr, inline(jaxpr, keep_checkpoints=True)
        return self.bodies[id(jaxpr)][1]


@dataclasses.dataclass(frozen=True)
class View:
    """An equation with what is known of the layouts of its operands, and what is wanted of its results.

    Attributes:
        program: the program of the equation.
        equation: the equation.
        context: what is split.
        inputs: the layouts of the operands.
        wanted: for results that are read by rows the axis.
    """

    program: Program
    equation: Equation
    context: Context
    inputs: tuple[Layout, ...]
    wanted: Mapping[int, int]

    @property
    def params(self) -> dict[str, Any]:
        return self.equation.params

    def shape(self, operand: int) -> tuple[int, ...]:
        """The shape of an operand."""
        return self.program.aval_of(self.equation.inputs[operand]).shape

    def shape_out(self, result: int = 0) -> tuple[int, ...]:
        """The shape of a result."""
        return self.program.avals[self.equation.outputs[result]].shape

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.context.batch


@dataclasses.dataclass(frozen=True)
class Factor:
    """A dimension of an equation's work along which it can be split, as in the sharding rules of Shardy.

    Attributes:
        inputs: for each operand the axis of that dimension, None where it has none.
        outputs: for each result the axis, or how the results of parts are combined.
        bind: see `Run`.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | Sum, ...]
    bind: Bind = bind_as_it_is

    def __post_init__(self) -> None:
        """Axes as Python's integers: parameters of some equations have NumPy's."""
        inputs = tuple(None if axis is None else int(axis) for axis in self.inputs)
        outputs = tuple(axis if isinstance(axis, Sum) else int(axis) for axis in self.outputs)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "outputs", outputs)


Rule = Callable[[View], "Run | None"]
"""How an equation runs on a chunk, given its operands' layouts; None where it has to run on the whole batch."""


def along(factors: Callable[[View], Sequence[Factor]]) -> Rule:
    """The rule of a primitive that can be split along one of some factors: the one that most operands are split by."""

    def rule(view: View) -> Run | None:
        best, best_rank = None, (0, 0)
        for factor in factors(view):
            agree = sum(a == b for a, b in zip(factor.inputs, view.inputs, strict=True) if isinstance(b, int))
            agree += sum(factor.outputs[result] == axis for result, axis in view.wanted.items())
            at_odds = sum(a != b for a, b in zip(factor.inputs, view.inputs, strict=True) if isinstance(b, int))
            if agree and can_be_split(view, factor) and (best is None or (-at_odds, agree) > best_rank):
                best, best_rank = factor, (-at_odds, agree)
        return None if best is None else Run(best.inputs, best.outputs, best.bind)

    return rule


def can_be_split(view: View, factor: Factor) -> bool:
    """Whether all axes of a factor consist of a block for each row of the batch."""
    shapes = [(view.shape(at), axis) for at, axis in enumerate(factor.inputs) if axis is not None]
    shapes += [(view.shape_out(at), axis) for at, axis in enumerate(factor.outputs) if isinstance(axis, int)]
    return all(shape[axis] and shape[axis] % view.batch == 0 for shape, axis in shapes)


def resized(name: str, axis: int) -> Bind:
    """The equation with a parameter that is a shape made smaller along an axis."""

    def bind(equation: Equation, operands: Sequence[Any], chunk: Chunk) -> Sequence[Any]:
        params = {**equation.params, name: chunk.shape(equation.params[name], axis)}
        return compat.bind_equation(equation.primitive, params, operands)

    return bind
