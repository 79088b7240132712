"""Replaces the bodies of `lax.scan` loops in a function before it is differentiated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var, jaxpr_as_fun, primitives

from remat_opt.trace import compat
from remat_opt.trace.avals import abstract, bytes_of, is_inexact
from remat_opt.trace.inline import Equation, Program

_PAGE = 4096  # bytes; less is not worth a copy, and small copies fail on TPUs (jax issue 24115)


class Body(NamedTuple):
    """What is known of a function that is the body of a loop.

    Attributes:
        carried: positions of those arguments that the loop hands from step to step and that are worth a copy.
        kept_bytes: of all that it hands on, over all its runs; 0 where the loop is not known.
        steps: of the loop that one run does.
    """

    carried: tuple[int, ...]
    kept_bytes: int = 0
    steps: int = 1


def has_loops(program: Program) -> bool:
    """Whether there is a `lax.scan` among a program's equations."""
    return any(equation.primitive is primitives.scan_p for equation in program.equations)


def loops_of(program: Program, *, keep_checkpoints: bool) -> Iterator[Equation]:
    """The loops of a program whose bodies may be replaced.

    Args:
        program: a function before differentiation.
        keep_checkpoints: leave out loops in which the user has placed a `jax.checkpoint`.
    """
    for equation in program.equations:
        inside = compat.equations_in(equation.params) if keep_checkpoints else ()
        if equation.primitive is primitives.scan_p and all(one.primitive is not compat.remat_p for one in inside):
            yield equation


def body_of(loop: Equation, steps: int = 1) -> Body:
    """What is known of so many steps of a loop as a function."""
    constants, carries = compat.scan_counts(loop.params)
    avals = loop.params["jaxpr"].in_avals
    runs = -(-loop.params["length"] // steps)
    kept = runs * sum(map(bytes_of, avals[constants : constants + carries]))
    carried = tuple(at for at in range(constants, constants + carries) if _is_worth_a_copy(avals[at]))
    return Body(carried, kept, steps)


def kept_of_a_step(loop: Equation) -> int:
    """Bytes that JAX keeps of one step of a loop for its backward pass, with its carry, without what the loop reads."""
    step = loop.params["jaxpr"]
    constants, carries = compat.scan_counts(loop.params)

    def residuals(*operands: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(jaxpr_as_fun(step), *operands)[1])

    jaxpr = compat.bare_jaxpr(jax.make_jaxpr(residuals)(*map(abstract, step.in_avals)))
    read = {*jaxpr.invars[:constants], *jaxpr.invars[constants + carries :]}
    kept = {atom for atom in jaxpr.outvars if isinstance(atom, Var)} - read
    return sum(bytes_of(value.aval) for value in kept)


Wrap = Callable[[Callable, Body], Callable]


def with_bodies(program: Program, wrap: Wrap, *, keep_checkpoints: bool, steps: Sequence[int] = ()) -> Program:
    """A program whose loops have other bodies.

    Args:
        program: a function before differentiation.
        wrap: gives the new body of a flat function.
        keep_checkpoints: see `loops_of`.
        steps: for each of these loops, how many of its steps one run of the new body does; 1 in all by default.
    """
    loops = [*loops_of(program, keep_checkpoints=keep_checkpoints)]
    written = {
        id(loop): _with_body(loop, wrap) if count == 1 else _in_chunks(program, loop, wrap, count)
        for loop, count in zip(loops, steps or [1] * len(loops), strict=True)
    }
    return dataclasses.replace(program, equations=tuple(written.get(id(one), one) for one in program.equations))


def _with_body(loop: Equation, wrap: Wrap) -> Equation:
    step = loop.params["jaxpr"]
    again = jax.make_jaxpr(wrap(jaxpr_as_fun(step), body_of(loop)))(*map(abstract, step.in_avals))
    return dataclasses.replace(loop, params={**loop.params, "jaxpr": again})


def _in_chunks(program: Program, loop: Equation, wrap: Wrap, steps: int) -> Equation:
    """A loop over chunks of some steps, and a last chunk of those that are left, as one call."""
    length, is_reverse = loop.params["length"], loop.params["reverse"]
    constants, carries = compat.scan_counts(loop.params)
    chunks, left = divmod(length, steps)

    def some(count: int) -> Callable[..., Sequence[Any]]:
        """So many steps of the loop."""
        params = {**loop.params, "length": count, "unroll": min(count, loop.params["unroll"])}
        return wrap(lambda *operands: compat.bind_equation(loop.primitive, params, operands), body_of(loop, count))

    def chunked(*operands: Any) -> list[Any]:
        fixed, carry, xs = operands[:constants], operands[constants:][:carries], operands[constants + carries :]
        start = left if is_reverse else 0  # the chunk that is left comes last
        many, few = slice(start, start + chunks * steps), slice(0, left) if is_reverse else slice(length - left, None)

        def chunk(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = some(steps)(*fixed, *carry, *xs)
            return list(results[:carries]), list(results[carries:])

        stacks = [x[many].reshape(chunks, steps, *x.shape[1:]) for x in xs]
        carry, found = lax.scan(chunk, list(carry), stacks, reverse=is_reverse, length=chunks)
        found = [y.reshape(chunks * steps, *y.shape[2:]) for y in found]
        if left:
            last = some(left)(*fixed, *carry, *(x[few] for x in xs))
            carry, ends = last[:carries], last[carries:]
            pairs = zip(ends, found, strict=True) if is_reverse else zip(found, ends, strict=True)
            found = [jnp.concatenate(pair) for pair in pairs]
        return [*carry, *found]

    avals = [abstract(program.aval_of(x)) for x in loop.inputs]
    (call,) = compat.bare_jaxpr(jax.make_jaxpr(jax.jit(chunked))(*avals)).eqns
    return dataclasses.replace(loop, primitive=call.primitive, params=call.params, effects=call.effects)


def as_body(program: Program) -> Body | None:
    """Treats a layer as the body of an unknown loop: arguments with the shape and dtype of a result count as its carry.

    None where none of them is worth a copy.
    """
    results = [program.aval_of(x) for x in program.outputs]
    found = []
    for position, value in enumerate(program.inputs):
        aval = program.avals[value]
        at = next((at for at, x in enumerate(results) if (x.shape, x.dtype) == (aval.shape, aval.dtype)), None)
        if at is not None and _is_worth_a_copy(aval):
            del results[at]
            found.append(position)
    return Body(tuple(found)) if found else None


def _is_worth_a_copy(aval: Any) -> bool:
    return is_inexact(aval) and bytes_of(aval) >= _PAGE
