"""Programs as they are written by a schedule, and how they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from remat_opt.emit.train_step import write
from remat_opt.graph.build import Bridge, build
from remat_opt.graph.cost import Rates
from remat_opt.graph.schedule import Schedule
from remat_opt.trace import compat
from remat_opt.trace.inline import Constant, Program, inline

RATES = Rates(bandwidth=1e9, flops={"float32": 1e9})


def bridge_of(fun: Callable, *arguments: Any, donated: int = 0) -> Bridge:
    """The graph of a function; the leaves of its first `donated` arguments are donated."""
    leaves = [index < donated for index, argument in enumerate(arguments) for _ in jax.tree.leaves(argument)]
    return build(inline(jax.make_jaxpr(fun)(*arguments)), RATES, tuple(leaves))


def written(bridge: Bridge, schedule: Schedule, names: dict[int, str] | None = None) -> Callable:
    """The step as a flat function of its leaves."""
    return lambda *leaves: write(bridge, schedule, names or {}, leaves)


def jaxpr_of(bridge: Bridge, schedule: Schedule, names: dict[int, str] | None = None) -> Any:
    """The written step as a closed jaxpr, found well formed."""
    avals = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        for aval in map(bridge.program.avals.__getitem__, bridge.program.inputs)
    ]
    jaxpr = jax.make_jaxpr(written(bridge, schedule, names))(*avals)
    core.check_jaxpr(compat.bare_jaxpr(jaxpr))
    return jaxpr


def evaluate(program: Program, *arguments: Any) -> list[Any]:
    """One equation after the other."""
    environment = dict(zip(program.inputs, jax.tree.leaves(arguments), strict=True)) | dict(program.constants)

    def read(atom: int | Constant) -> Any:
        return atom.value if isinstance(atom, Constant) else environment[atom]

    for equation in program.equations:
        results = compat.bind_equation(equation.primitive, equation.params, list(map(read, equation.inputs)))
        environment.update(zip(equation.outputs, results, strict=True))
    return list(map(read, program.outputs))


def equations(jaxpr: Any, *, inside: bool = False) -> Iterator[Any]:
    """Equations of a jaxpr, those inside of recomputed runs on request."""
    for equation in compat.bare_jaxpr(jaxpr).eqns:
        yield equation
        if inside and equation.primitive is compat.remat_p:
            yield from equations(equation.params["jaxpr"])


def names_of(jaxpr: Any, *, inside: bool = False) -> list[str]:
    return [equation.primitive.name for equation in equations(jaxpr, inside=inside)]


def outline(jaxpr: Any) -> list[str]:
    """One line for each equation, `results = primitive operands`, values named in order; inner jaxprs are indented."""
    jaxpr = compat.bare_jaxpr(jaxpr)
    letters: dict[Any, str] = {}

    def show(atom: Any) -> str:
        if isinstance(atom, compat.Literal):
            return str(atom.val)
        return letters.setdefault(atom, chr(ord("a") + len(letters)))

    lines = ["in " + " ".join(map(show, jaxpr.invars))]
    for equation in jaxpr.eqns:
        operands = " ".join(map(show, equation.invars))
        name = "remat" if equation.primitive is compat.remat_p else equation.primitive.name
        lines.append(f"{' '.join(map(show, equation.outvars))} = {name} {operands}")
        if equation.primitive is compat.remat_p:
            lines += ["  " + line for line in outline(equation.params["jaxpr"])]
    return [*lines, "out " + " ".join(map(show, jaxpr.outvars))]
