"""From a function before differentiation to the segments that `remat_opt.checkpoint` writes.

The function is differentiated once, symbolically: forward and backward become one program, with cotangents as inputs.
Names tie the values of the function to those of that program; the search sees only the latter.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from remat_opt.graph.derive import Choice
from remat_opt.planning import Prepared, prepare
from remat_opt.program import compat
from remat_opt.program.capture import Captured
from remat_opt.program.inline import Constant, Program, inline
from remat_opt.program.names import name_values
from remat_opt.search import Problem, Solution
from remat_opt.targets import Target
from remat_opt.write.checkpoint import Layout, Segment, evaluate, is_repeatable, stored_operands

_TIE = "remat_opt.value."  # names with it never leave this module


@dataclasses.dataclass(frozen=True, eq=False)
class Differentiated:
    """A function's program with the program of its forward and backward pass together.

    Attributes:
        program: the function, before differentiation.
        prepared: forward and backward as one program, with its graph.
        joint_value: for values of the function the value of the joint program that is the same.
        cotangents: the joint program's inputs that are cotangents.
    """

    program: Program
    prepared: Prepared
    joint_value: dict[int, int]
    cotangents: frozenset[int]

    @property
    def problem(self) -> Problem:
        """The joint graph as the searches see it."""
        return self.prepared.problem

    @functools.cached_property
    def backward_ops(self) -> frozenset[int]:
        """Ops of the joint graph that depend on a cotangent."""
        graph = self.problem.graph
        reached = set(self.cotangents)
        found = set()
        for index, op in enumerate(graph.ops):
            if not reached.isdisjoint(op.inputs):
                reached.update(op.outputs)
                found.add(index)
        return frozenset(found)

    @functools.cached_property
    def turn(self) -> int:
        """The position, in the order of first runs, behind the last op that makes a value of the function."""
        producer = self.problem.graph.producer
        made_by = {producer[value] for value in self.joint_value.values()}
        return max((at + 1 for at, op in enumerate(self.problem.order) if op in made_by), default=0)

    @functools.cached_property
    def residuals(self) -> frozenset[int]:
        """Buffers of the joint graph that the forward pass makes and the backward pass reads."""
        graph = self.problem.graph
        read = {value for op in self.backward_ops for value in graph.ops[op].inputs}
        return frozenset(
            value for value in read if graph.producer[value] >= 0 and graph.producer[value] not in self.backward_ops
        ) - frozenset(graph.outputs)

    @property
    def residual_bytes(self) -> int:
        """Bytes that JAX and XLA keep between forward and backward when nothing is recomputed."""
        return sum(self.problem.graph.sizes[value] for value in self.residuals)

    @property
    def result_bytes(self) -> int:
        """Bytes of the results that have a derivative."""
        return sum(self.problem.graph.sizes[value] for value in self.cotangents)


def differentiate(program: Program, target: Target, *, keep_checkpoints: bool) -> Differentiated | None:
    """Differentiate a program by all its inputs and results that have a derivative; None where there are none.

    Raises:
        Whatever JAX raises for a program that has no reverse derivative.
    """
    avals = [program.avals[value] for value in program.inputs]
    active = [compat.is_inexact(aval) for aval in avals]
    outputs = [x.aval if isinstance(x, Constant) else program.avals[x] for x in program.outputs]
    results = [compat.is_inexact(aval) for aval in outputs]
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

    shapes = [compat.abstract(aval) for aval in avals]
    cotangents = [compat.abstract(aval) for aval in itertools.compress(outputs, results)]
    closed = jax.make_jaxpr(forward_and_backward)(shapes, cotangents)
    joint = inline(closed, keep_checkpoints=keep_checkpoints, keep_names=False)
    prepared = prepare(Captured(None, joint, (False,) * len(joint.inputs), ()), target)
    ties = {int(name.removeprefix(_TIE)): v for name, v in joint.named if name.startswith(_TIE)}
    return Differentiated(
        program,
        prepared,
        {value: tied for value, tied in ties.items() if not isinstance(tied, Constant)},
        frozenset(joint.inputs[len(avals) :]),
    )


def user_names(differentiated: Differentiated) -> dict[str, frozenset[int]]:
    """The user's own names, with the values of the joint program that bear them."""
    found: dict[str, set[int]] = {}
    for name, value in differentiated.prepared.captured.program.named:
        if not name.startswith(_TIE) and not isinstance(value, Constant):
            found.setdefault(name, set()).add(value)
    return {name: frozenset(values) for name, values in found.items()}


def _tie(value: int, result: Any) -> Any:
    if jax.dtypes.issubdtype(result.dtype, jax.dtypes.extended):
        return result  # random keys cannot be named
    return compat.name_p.bind(result, name=f"{_TIE}{value}")


def close(differentiated: Differentiated, solution: Solution) -> Solution:
    """A solution in which the last segment, whose residuals a search keeps, is recomputed as well."""
    problem, choice, turn = differentiated.problem, solution.choice, differentiated.turn
    last = max(choice.turning_points, default=0)
    if last >= turn:
        return solution
    before = {value for op in problem.order[:last] for value in problem.graph.ops[op].outputs}
    behind = {value for op in problem.order[last:turn] for value in problem.graph.ops[op].inputs}
    cuts = tuple(sorted({*choice.cuts, *choice.turning_points, turn}))
    return problem.solution(Choice(choice.saved | (before & behind), (turn,), cuts))


def layout_of(differentiated: Differentiated, solution: Solution) -> Layout:
    """The segments of a solution, in terms of the function before differentiation."""
    return _LayoutOf(differentiated, solution).run()


class _LayoutOf:
    def __init__(self, differentiated: Differentiated, solution: Solution):
        self.program = differentiated.program
        self.joint_program = differentiated.prepared.captured.program
        self.joint_value = differentiated.joint_value
        self.graph = differentiated.problem.graph
        self.position = {op: at for at, op in enumerate(differentiated.problem.order)}
        self.cuts = sorted({*solution.choice.cuts, *solution.choice.turning_points})
        self.chosen = solution.choice.saved
        self.again = frozenset(solution.schedule.recomputed)
        self.on_demand: dict[int, int] = {}

    def run(self) -> Layout:
        members = self.members()
        segments = [segment for key in sorted(members) for segment in self.segments(members[key])]
        kept = {
            value: joint
            for value, joint in self.joint_value.items()
            if joint in self.chosen and value not in self.on_demand
        }
        names = name_values(self.joint_program, kept.values())
        return Layout(tuple(segments), self.on_demand, {value: names[joint] for value, joint in kept.items()})

    def members(self) -> dict[int, list[int]]:
        """The equations that are not made on demand, by segment; a segment reads none that is behind it."""
        members: dict[int, list[int]] = {}
        segment_of: dict[int, int] = {}
        for index, equation in enumerate(self.program.equations):
            op = self.joint_op(index)
            if op is None and is_repeatable(equation):
                self.on_demand.update(dict.fromkeys(equation.outputs, index))
                continue
            segment = 0 if op is None else sum(cut <= self.position[op] for cut in self.cuts)
            reads = stored_operands(self.program, self.on_demand, equation.inputs)
            segment = max([segment, *(segment_of.get(value, 0) for value in reads)])
            segment_of.update(dict.fromkeys(equation.outputs, segment))
            members.setdefault(segment, []).append(index)
        return members

    def joint_op(self, index: int) -> int | None:
        """The op of the joint graph that stores a result of an equation; None where none is stored."""
        for value in self.program.equations[index].outputs:
            joint = self.joint_value.get(value, -1)
            op = self.graph.producer[joint] if joint >= 0 else -1
            if op >= 0:
                return op
        return None

    def segments(self, equations: list[int]) -> list[Segment]:
        """One segment; where equations in it may not run twice, they stand between parts of it."""
        if self.again.isdisjoint(self.joint_op(index) for index in equations):
            return [Segment(tuple(equations), recomputed=False)]
        segments = []
        for free, group in itertools.groupby(equations, lambda index: is_repeatable(self.program.equations[index])):
            part = tuple(group)
            segments.append(Segment(part, free, self.saved(part) if free else frozenset()))
        return segments

    def saved(self, equations: Iterable[int]) -> frozenset[int]:
        made = (value for index in equations for value in self.program.equations[index].outputs)
        return frozenset(value for value in made if self.joint_value.get(value) in self.chosen)


def kept_bytes(differentiated: Differentiated, layout: Layout) -> int:
    """Bytes of the residuals that a layout keeps between forward and backward; arguments and results not counted."""
    program, joint = differentiated.program, differentiated.joint_value
    made: set[int] = set()
    kept: set[int] = set()
    for segment in layout.segments:
        results = {value for index in segment.equations for value in program.equations[index].outputs}
        reads = {
            value
            for index in segment.equations
            for value in stored_operands(program, layout.on_demand, program.equations[index].inputs)
        }
        if segment.recomputed:
            kept |= (reads & made) | segment.saved
        else:
            kept |= {v for v in (reads & made) | results if joint.get(v) in differentiated.residuals}
        made |= results
    graph = differentiated.problem.graph
    there = {joint[value] for value in kept if value in joint} - set(graph.outputs)
    return sum(graph.sizes[value] for value in there)
