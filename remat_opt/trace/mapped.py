"""A `shard_map` that communicates, in two: what does not depend on a collective may be recomputed.

Differentiated from outside, a mapped layer is one equation that makes both its result, which devices sum up, and the
residuals for its backward pass, which they mostly have before. As one equation it may not run a second time. As two it
may, but for the collectives: one makes what depends on them, the other all the rest. What both compute a compiler
merges, as long as both run at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from remat_opt.trace import compat
from remat_opt.trace.effects import communicates
from remat_opt.trace.inline import Equation, Program


def in_two_parts(program: Program) -> Program:
    """The program with each such `shard_map` in two; the program itself where there are none."""
    equations = [part for equation in program.equations for part in _parts(equation)]
    if len(equations) == len(program.equations):
        return program
    return dataclasses.replace(program, equations=tuple(equations))


def _parts(equation: Equation) -> tuple[Equation, ...]:
    if equation.primitive is not compat.shard_map_p or equation.effects:
        return (equation,)
    depends = _depends_on_collectives(compat.bare_jaxpr(equation.params["jaxpr"]))
    if all(depends) or not any(depends):
        return (equation,)
    return _with_results(equation, depends), _with_results(equation, [not one for one in depends])


def _depends_on_collectives(jaxpr: Any) -> list[bool]:
    """For each result of a jaxpr whether it depends on what devices send each other."""
    tainted: set[Any] = set()
    for equation in jaxpr.eqns:
        reads = (atom for atom in equation.invars if not isinstance(atom, compat.Literal))
        if communicates(equation.primitive, equation.params) or not tainted.isdisjoint(reads):
            tainted.update(equation.outvars)
    return [not isinstance(atom, compat.Literal) and atom in tainted for atom in jaxpr.outvars]


def _with_results(equation: Equation, wanted: Iterable[bool]) -> Equation:
    """A `shard_map` with some of its results, and what these need of its body."""
    wanted = list(wanted)
    of = [at for at, is_wanted in enumerate(wanted) if is_wanted]
    params = {
        **equation.params,
        "jaxpr": compat.with_results(equation.params["jaxpr"], wanted),
        "out_specs": tuple(equation.params["out_specs"][at] for at in of),
    }
    return dataclasses.replace(equation, params=params, outputs=tuple(equation.outputs[at] for at in of))
