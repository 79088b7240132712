"""The rules of control flow: a body runs on chunks if nothing in it needs the whole batch.

Carries of loops have one layout in all steps, which is found by going through the body until it does not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives as P

from remat_opt.rewrites.split.analysis import Analysis, analyse
from remat_opt.rewrites.split.chunks import ChunkValues
from remat_opt.rewrites.split.layouts import Chunk, Layout, Rule, Run, Sum, View
from remat_opt.trace import compat
from remat_opt.trace.avals import is_key
from remat_opt.trace.inline import Constant, Equation, Program


class _CannotBeJoined(Exception):
    """Two layouts that a value cannot have at once."""


def _join(one: Layout, other: Layout) -> Layout:
    """The layout as which both can be read."""
    one, other = (None if layout is Sum.SAME else layout for layout in (one, other))
    if one is None or one == other:
        return other
    if other is None:
        return one
    raise _CannotBeJoined


@dataclasses.dataclass(frozen=True)
class _Body:
    """A body on chunks: its analysis, and the layouts in which its results are handed out."""

    analysis: Analysis
    results: tuple[Layout, ...]

    @property
    def inputs(self) -> tuple[Layout, ...]:
        return tuple(self.analysis.layouts.get(value) for value in self.analysis.program.inputs)

    def evaluate(self, operands: Sequence[Any], chunk: Chunk) -> list[Any]:
        """The results of one run on operands in the layouts of `inputs`."""
        program = self.analysis.program
        given = dict(zip(program.inputs, operands, strict=True))
        is_part = {value: self.analysis.layouts.get(value) is not None for value in given}
        whole, parts = ({v: x for v, x in given.items() if is_part[v] is of_parts} for of_parts in (False, True))
        values = ChunkValues(self.analysis, chunk, whole, parts)
        values.evaluate(range(len(program.equations)))
        return [values.read(x, layout) for x, layout in zip(program.outputs, self.results, strict=True)]


def _body(view: View, program: Program, inputs: Sequence[Layout], results: Sequence[Layout]) -> _Body:
    """A body with some layouts of its inputs, where its results are wanted in some layouts."""
    layouts = {value: one for value, one in zip(program.inputs, inputs, strict=True) if one is not None}
    wanted = {
        value: axis
        for value, axis in zip(program.outputs, results, strict=True)
        if isinstance(value, int) and isinstance(axis, int)
    }
    analysis = analyse(program, view.context.inside(), layouts, wanted)
    if not analysis.is_one_loop():
        raise _CannotBeJoined
    own = [None if isinstance(x, Constant) else analysis.layouts.get(x) for x in program.outputs]
    return _Body(analysis, tuple(_join(a, b) for a, b in zip(own, results, strict=True)))


def _moved(layout: Layout, by: int) -> Layout:
    """A layout of a stack as one of its slices, and back; a stack of which slices are rows cannot be read so."""
    if not isinstance(layout, int):
        return layout
    if layout + by < 0:
        raise _CannotBeJoined
    return layout + by


def _where_possible(rule: Callable[[View], Run]) -> Rule:
    def checked(view: View) -> Run | None:
        try:
            run = rule(view)
        except _CannotBeJoined:
            return None
        avals = [view.program.avals[value] for value in view.equation.outputs]
        outputs = tuple(Sum.SAME if layout is None else layout for layout in run.outputs)
        same_keys = any(is_key(aval) for aval, one in zip(avals, outputs, strict=True) if isinstance(one, Sum))
        is_split = any(isinstance(layout, int) for layout in (*run.inputs, *outputs))
        return dataclasses.replace(run, outputs=outputs) if is_split and not same_keys else None

    return checked


def _without_sums(layouts: Sequence[Layout]) -> list[Layout]:
    """Sums are read whole, after the loop that makes them."""
    return [None if isinstance(layout, Sum) else layout for layout in layouts]


def _carried(inputs: Sequence[Layout]) -> list[Layout]:
    return [layout if layout is Sum.ADD or isinstance(layout, int) else None for layout in inputs]


def _wanted(view: View) -> list[Layout]:
    return [view.wanted.get(at) for at in range(len(view.equation.outputs))]


def _settled(read: Callable[[list[Layout]], _Body], carry: list[Layout], first: int) -> _Body:
    """A body whose carries come out as they go in.

    Args:
        read: gives the body for layouts of the carries.
        carry: their layouts before the first step.
        first: the first of them among the body's inputs.
    """
    for _ in range(len(carry) + 2):
        body = read(carry)
        again = [_join(a, b) for a, b in zip(body.inputs[first : first + len(carry)], body.results, strict=False)]
        if again == carry == list(body.results[: len(carry)]):
            return body
        carry = again
    raise _CannotBeJoined


def _scan(view: View) -> Run:
    constants, carries = compat.scan_counts(view.params)
    program = view.context.body(view.params["jaxpr"])
    before = _without_sums(view.inputs[:constants])
    xs = [_moved(one, -1) for one in _without_sums(view.inputs[constants + carries :])]
    wanted = _wanted(view)
    ys = [_moved(one, -1) for one in wanted[carries:]]

    def read(carry: list[Layout]) -> _Body:
        return _body(view, program, [*before, *carry, *xs], [*carry, *ys])

    start = [_join(a, b) for a, b in zip(_carried(view.inputs[constants : constants + carries]), wanted, strict=False)]
    body = _settled(read, start, constants)
    inputs = [*body.inputs[: constants + carries], *(_moved(one, 1) for one in body.inputs[constants + carries :])]
    outputs = [*body.results[:carries], *(_moved(one, 1) for one in body.results[carries:])]

    def bind(equation: Equation, operands: Sequence[Any], chunk: Chunk) -> Sequence[Any]:
        def step(carry: Any, x: Any) -> Any:
            results = body.evaluate([*operands[:constants], *carry, *x], chunk)
            return results[:carries], results[carries:]

        first, stacks = list(operands[constants : constants + carries]), list(operands[constants + carries :])
        options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
        last, made = lax.scan(step, first, stacks, **options)
        return [*last, *made]

    return Run(tuple(inputs), tuple(outputs), bind)


def _while(view: View) -> Run:
    """Loops whose condition does not look at the batch."""
    of_condition, of_body = compat.while_counts(view.params)
    constants = of_condition + of_body
    program, condition = (view.context.body(view.params[name]) for name in ("body_jaxpr", "cond_jaxpr"))
    before = _without_sums(view.inputs[of_condition:constants])

    def read(carry: list[Layout]) -> _Body:
        return _body(view, program, [*before, *carry], carry)

    start = [_join(a, b) for a, b in zip(_carried(view.inputs[constants:]), _wanted(view), strict=True)]
    body = _settled(read, start, of_body)
    carry = list(body.inputs[of_body:])
    asked = _body(view, condition, [*[None] * of_condition, *carry], [None])
    if asked.results != (None,) or asked.inputs != (*[None] * of_condition, *carry):
        raise _CannotBeJoined

    def bind(equation: Equation, operands: Sequence[Any], chunk: Chunk) -> Sequence[Any]:
        return lax.while_loop(
            lambda state: asked.evaluate([*operands[:of_condition], *state], chunk)[0],
            lambda state: body.evaluate([*operands[of_condition:constants], *state], chunk),
            list(operands[constants:]),
        )

    return Run((*[None] * of_condition, *body.inputs), tuple(carry), bind)


def _cond(view: View) -> Run:
    """Branches that are chosen by what does not depend on the batch."""
    programs = [view.context.body(jaxpr) for jaxpr in view.params["branches"]]
    inputs, results = _without_sums(view.inputs[1:]), _wanted(view)
    for _ in range(len(inputs) + len(results) + 2):
        bodies = [_body(view, program, inputs, results) for program in programs]
        before = inputs, results
        for body in bodies:
            inputs = [_join(a, b) for a, b in zip(inputs, body.inputs, strict=True)]
            results = [_join(a, b) for a, b in zip(results, body.results, strict=True)]
        if (inputs, results) == before:
            break
    else:
        raise _CannotBeJoined

    def bind(equation: Equation, operands: Sequence[Any], chunk: Chunk) -> Sequence[Any]:
        branches = [lambda *x, body=body: body.evaluate(x, chunk) for body in bodies]
        return lax.switch(operands[0], branches, *operands[1:])

    return Run((None, *inputs), tuple(results), bind)


def _checkpoint(view: View) -> Run:
    """A region of `jax.checkpoint` that the user wants to keep."""
    body = _body(view, view.context.body(view.params["jaxpr"]), _without_sums(view.inputs), _wanted(view))

    def bind(equation: Equation, operands: Sequence[Any], chunk: Chunk) -> Sequence[Any]:
        jaxpr = jax.make_jaxpr(lambda *x: body.evaluate(x, chunk))(*operands)
        constants = compat.constants_of(jaxpr)
        through = [False] * len(constants) + [True] * len(operands)
        return compat.bind_remat(compat.open_jaxpr(jaxpr), [*constants, *operands], through, equation.params["policy"])

    return Run(body.inputs, body.results, bind)


BODIES: Mapping[Any, Rule] = {
    P.scan_p: _where_possible(_scan),
    P.while_p: _where_possible(_while),
    P.cond_p: _where_possible(_cond),
    compat.remat_p: _where_possible(_checkpoint),
}
