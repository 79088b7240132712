"""From a function before differentiation to the segments that `remat_opt.checkpoint` writes.

The function is differentiated once, symbolically: forward and backward become one program, with cotangents as inputs.
Names tie the values of the function to those of that program; the search sees only the latter.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from remat_opt.graph.build import Bridge, build
from remat_opt.graph.cost import Rates
from remat_opt.program import compat
from remat_opt.program.inline import Constant, Program, inline
from remat_opt.program.names import name_values
from remat_opt.search import Problem, Solution
from remat_opt.targets import Target
from remat_opt.write.checkpoint import Layout, Segment, evaluate, stored_operands

_TIE = "remat_opt.value."


@dataclasses.dataclass(frozen=True, eq=False)
class Differentiated:
    """A function's program with the program of its forward and backward pass together.

    Attributes:
        program: the function, before differentiation.
        joint: forward and backward as one program and its graph.
        joint_value: for values of the function the value of the joint program that is the same.
    """

    program: Program
    joint: Bridge
    joint_value: dict[int, int]

    @functools.cached_property
    def problem(self) -> Problem:
        """The joint graph as the searches see it."""
        return Problem(self.joint.graph)


def differentiate(program: Program, target: Target, *, keep_checkpoints: bool) -> Differentiated | None:
    """Differentiate a program by all its inputs and results that have a derivative; None where there are none.

    Raises:
        Whatever JAX raises for a program that has no reverse derivative.
    """
    avals = [program.avals[value] for value in program.inputs]
    active = [compat.is_inexact(aval) for aval in avals]
    results = [compat.is_inexact(x.aval if isinstance(x, Constant) else program.avals[x]) for x in program.outputs]
    if not any(active) or not any(results):
        return None

    def forward(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = evaluate(program, arguments, _tie)
        return list(itertools.compress(values, results)), [v for v, on in zip(values, results, strict=True) if not on]

    def forward_and_backward(arguments: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def of_active(*values):
            given = iter(values)
            return forward([next(given) if on else x for on, x in zip(active, arguments, strict=True)])

        outputs, pullback, others = jax.vjp(of_active, *itertools.compress(arguments, active), has_aux=True)
        return outputs, others, pullback(list(cotangents))

    shapes = jax.eval_shape(lambda *values: forward(values)[0], *map(_shape_of, avals))
    closed = jax.make_jaxpr(forward_and_backward)(list(map(_shape_of, avals)), shapes)
    joint = inline(closed, keep_checkpoints=keep_checkpoints, keep_names=False)
    bridge = build(joint, Rates(target.bandwidth, target.flops))
    ties = {int(name.removeprefix(_TIE)): v for name, v in joint.named if name.startswith(_TIE)}
    return Differentiated(program, bridge, {f: v for f, v in ties.items() if not isinstance(v, Constant)})


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _tie(value: int, result: Any) -> Any:
    if jax.dtypes.issubdtype(result.dtype, jax.dtypes.extended):
        return result  # random keys cannot be named
    return compat.name_p.bind(result, name=f"{_TIE}{value}")


def layout_of(differentiated: Differentiated, solution: Solution, *, close: bool = False) -> Layout:
    """The segments of a solution, in terms of the function before differentiation.

    Args:
        differentiated: the function and its joint program.
        solution: what a search found on the joint graph.
        close: whether what the search leaves to be kept at the end is recomputed, too.
    """
    return _LayoutOf(differentiated, solution, close).run()


class _LayoutOf:
    def __init__(self, differentiated: Differentiated, solution: Solution, close: bool):
        self.program = differentiated.program
        self.joint_value = differentiated.joint_value
        self.graph = differentiated.joint.graph
        self.solution = solution
        self.close = close
        self.position = {op: at for at, op in enumerate(differentiated.problem.order)}
        self.again = frozenset(solution.schedule.recomputed)
        self.on_demand: dict[int, int] = {}

    def run(self) -> Layout:
        choice = self.solution.choice
        cuts = sorted({*choice.cuts, *choice.turning_points})
        turn = max(choice.turning_points, default=0)
        members: dict[int, list[int]] = {}
        latest = 0
        segment_of: dict[int, int] = {}
        for index, equation in enumerate(self.program.equations):
            op = self.joint_op(index)
            if op is None:
                self.on_demand.update(dict.fromkeys(equation.outputs, index))
                continue
            at = self.position[op]
            segment = sum(cut <= at for cut in cuts)
            reads = stored_operands(self.program, self.on_demand, equation.inputs)
            segment = max([segment, *(segment_of.get(value, 0) for value in reads)])
            segment_of.update(dict.fromkeys(equation.outputs, segment))
            members.setdefault(segment, []).append(index)
        segments = [self.segment(members[key], key == len(cuts)) for key in sorted(members)]
        del turn, latest
        saved = {v for v, u in self.joint_value.items() if u in choice.saved and v not in self.on_demand}
        return Layout(tuple(segments), self.on_demand, name_values(self.program, saved))

    def joint_op(self, index: int) -> int | None:
        """The op of the joint graph that stores a result of an equation; None where none is stored."""
        for value in self.program.equations[index].outputs:
            joint = self.joint_value.get(value, -1)
            op = self.graph.producer[joint] if joint >= 0 else -1
            if op >= 0:
                return op
        return None

    def segment(self, equations: list[int], last: bool) -> Segment:
        ops = {self.joint_op(index) for index in equations}
        recomputed = (self.close if last else not self.again.isdisjoint(ops))
        made = [v for index in equations for v in self.program.equations[index].outputs]
        saved = frozenset(v for v in made if self.joint_value.get(v) in self.solution.choice.saved)
        return Segment(tuple(equations), recomputed, saved if recomputed else frozenset())
