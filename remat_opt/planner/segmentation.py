"""Divides a function, before differentiation, into the segments that `remat_opt.checkpoint` emits.

The function is differentiated once, symbolically: forward and backward pass become one joint program, with cotangents
as inputs. Names map the values of the function to those of the joint program. The search sees only the joint program.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_opt.emit.checkpoint import Layout, Segment, evaluate, is_repeatable, stored_operands
from remat_opt.planner.prepared import Prepared, prepare
from remat_opt.rewrites.captured import Captured
from remat_opt.rewrites.loop_bodies import Body
from remat_opt.search import Problem, Solution
from remat_opt.targets import Target
from remat_opt.trace import compat
from remat_opt.trace.avals import abstract, is_inexact
from remat_opt.trace.inline import Constant, Program, inline
from remat_opt.trace.names import name_values

_TIE = "remat_opt.value."  # names with it never leave this module


class Loops(enum.Enum):
    """What becomes of the loops in a function, the fastest first."""

    AS_GIVEN = ""
    RECOMPUTED = "each step of its loops is recomputed in the backward pass"
    IN_CHUNKS = "the steps of its loops are recomputed in the backward pass, some of them at a time"
    ON_HOST = "each step of its loops is recomputed from its carry, which is kept in the host's memory"


@dataclasses.dataclass(frozen=True, eq=False)
class Differentiated:
    """A function's program with the program of its forward and backward pass together.

    Attributes:
        program: the function, before differentiation.
        prepared: forward and backward as one program, with its graph.
        joint_value: for values of the function the value of the joint program that is the same.
        cotangents: the joint program's inputs that are cotangents.
        body: of a loop's body, which runs many times before its backward pass begins; None for other functions.
        loops: what became of the loops in it.
        steps: for each of its loops, how many steps are recomputed at a time; empty for one in all.
        given: the same function with its loops as they were given; None where it is that.
    """

    program: Program
    prepared: Prepared
    joint_value: dict[int, int]
    cotangents: frozenset[int]
    body: Body | None = None
    loops: Loops = Loops.AS_GIVEN
    steps: tuple[int, ...] = ()
    given: Differentiated | None = None

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
    def forward_end(self) -> int:
        """The position, in first-run order, just after the last op that makes a value of the function."""
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
    def rewritten_loops(self) -> int:
        """How many of its loops have other bodies."""
        given = (self.given or self).program.equations
        return sum(one is not other for one, other in zip(given, self.program.equations, strict=True))

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
    outputs = [program.aval_of(x) for x in program.outputs]
    if not any(map(is_inexact, avals)) or not any(map(is_inexact, outputs)):
        return None
    closed = _forward_and_backward(lambda arguments: evaluate(program, arguments, _tie), avals, outputs)
    joint = inline(closed, keep_checkpoints=keep_checkpoints, keep_names=False)
    joint = dataclasses.replace(joint, entered_checkpoints=False)  # those of chunks are ours
    captured = Captured(None, joint, joint, (False,) * len(joint.inputs), ())
    # JAX will differentiate the segments itself: pools have its backward pass.
    prepared = prepare(captured, target, keep_scatters=True)
    ties = {int(name.removeprefix(_TIE)): v for name, v in joint.named if name.startswith(_TIE)}
    return Differentiated(
        program,
        prepared,
        {value: tied for value, tied in ties.items() if not isinstance(tied, Constant)},
        frozenset(joint.inputs[len(avals) :]),
    )


def _forward_and_backward(
    fun: Callable[[Sequence[Any]], Sequence[Any]], avals: Sequence[Any], outputs: Sequence[Any]
) -> Any:
    """The closed jaxpr of a flat function with its backward pass, of arguments and cotangents.

    Args:
        fun: takes a list, returns a list.
        avals: types of its arguments.
        outputs: types of its results.
    """
    active, results = list(map(is_inexact, avals)), list(map(is_inexact, outputs))

    def forward(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = fun(arguments)
        return list(itertools.compress(values, results)), [v for v, on in zip(values, results, strict=True) if not on]

    def forward_and_backward(arguments: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def of_active(*values):
            given = iter(values)
            return forward([next(given) if on else x for on, x in zip(active, arguments, strict=True)])

        outputs, pullback, others = jax.vjp(of_active, *itertools.compress(arguments, active), has_aux=True)
        return outputs, others, pullback(list(cotangents))

    shapes = [abstract(aval) for aval in avals]
    cotangents = [abstract(aval) for aval in itertools.compress(outputs, results)]
    return jax.make_jaxpr(forward_and_backward)(shapes, cotangents)


def jax_differentiates(captured: Captured) -> bool:
    """Whether JAX itself has a reverse derivative of a function as it was given."""
    fun = compat.function_of_jaxpr(captured.traced)
    outputs = [variable.aval for variable in compat.bare_jaxpr(captured.traced.jaxpr).outvars]
    try:
        _forward_and_backward(lambda arguments: fun(*arguments), captured.input_avals, outputs)
    except Exception:  # a rule of the user's may raise what it likes
        return False
    return True


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


def layout_of(differentiated: Differentiated, solution: Solution) -> Layout:
    """The segments of a solution's schedule, in terms of the function before differentiation.

    Ops that one run of the schedule recomputes form a segment. Results of ops between them that are not recomputed are
    saved in it. Ops recomputed together once more form a nested segment, and so on.
    """
    return _LayoutOf(differentiated, solution).run()


class _LayoutOf:
    def __init__(self, differentiated: Differentiated, solution: Solution):
        self.program = differentiated.program
        self.joint_program = differentiated.prepared.captured.program
        self.joint_value = differentiated.joint_value
        self.graph = differentiated.problem.graph
        self.repeats: dict[int, list[int]] = {}  # for each op the runs that repeat it
        for number, run in enumerate(solution.schedule.runs):
            for op in run.ops if run.recomputed else ():
                self.repeats.setdefault(op, []).append(number)
        self.on_demand: dict[int, int] = {}
        self.repeats_of: dict[int, list[int]] = {}  # the same for equations that are not on demand, in program order

    def run(self) -> Layout:
        for index, equation in enumerate(self.program.equations):
            op = self.joint_op(index)
            if op is None and is_repeatable(equation):
                self.on_demand.update(dict.fromkeys(equation.outputs, index))
            else:
                self.repeats_of[index] = self.repeats.get(op, []) if op is not None and is_repeatable(equation) else []
        segments = self.segments(list(self.repeats_of), 0)
        made = {v for index in self.repeats_of for v in self.program.equations[index].outputs}
        named = {value: self.joint_value[value] for value in made & self.joint_value.keys()}
        names = name_values(self.joint_program, named.values())
        return Layout(
            segments, self.on_demand, {value: names[joint] for value, joint in named.items() if joint in names}
        )

    def joint_op(self, index: int) -> int | None:
        """The op of the joint graph that stores a result of an equation; None where none is stored."""
        for value in self.program.equations[index].outputs:
            joint = self.joint_value.get(value, -1)
            op = self.graph.producer[joint] if joint >= 0 else -1
            if op >= 0:
                return op
        return None

    def segments(self, equations: Sequence[int], level: int) -> tuple[Segment, ...]:
        """Divide equations by the run of their repeat number `level`."""
        members: dict[int, list[int]] = {}
        for index, place in self.places(equations, level).items():
            members.setdefault(place, []).append(index)
        found: list[Segment] = []
        for place in sorted(members):
            # What may not run twice stands between parts of a segment.
            for free, group in itertools.groupby(members[place], lambda i: is_repeatable(self.program.equations[i])):
                part = tuple(group)
                found.append(self.recomputed(part, level) if place % 2 and free else Segment(part, recomputed=False))
        return tuple(found)

    def recomputed(self, equations: tuple[int, ...], level: int) -> Segment:
        kept = [index for index in equations if len(self.repeats_of[index]) <= level]
        inner: tuple[Segment, ...] = ()
        if any(len(self.repeats_of[index]) > level + 1 for index in equations):
            inner = self.segments(equations, level + 1)
            if len(inner) == 1 and inner[0].recomputed:
                inner = inner[0].inner  # the same as a whole
        saved = frozenset(
            value
            for index in kept
            for value in self.program.equations[index].outputs
            if value in self.joint_value and self.joint_value[value] not in self.graph.inputs
        )
        return Segment(equations, True, saved, inner)

    def places(self, equations: Sequence[int], level: int) -> dict[int, int]:
        """For each equation its place among the segments: odd for recomputed ones, even for what is kept between.

        A segment reaches from its first to its last op in program order. Equations after it that read values evicted in
        it belong to it, too: outside, their derivatives would keep those values live. No equation stands before one
        that makes what it reads.
        """
        run_of = {i: self.repeats_of[i][level] for i in equations if len(self.repeats_of[i]) > level}
        rank = {run: 2 * number + 1 for number, run in enumerate(dict.fromkeys(run_of.values()))}
        last = {rank[run]: index for index, run in run_of.items()}
        place_of: dict[int, int] = {}  # of the values so far
        evicted: dict[int, int] = {}  # of those of them that are recomputed
        places: dict[int, int] = {}
        latest = 0
        for index in equations:
            equation = self.program.equations[index]
            reads = stored_operands(self.program, self.on_demand, equation.inputs)
            if index in run_of:
                place = rank[run_of[index]]
                latest = max(latest, place)
            elif index <= last.get(latest, -1):
                place = latest
            else:
                place = max((evicted[value] for value in reads if value in evicted), default=latest + latest % 2)
            places[index] = max([place, *(place_of.get(value, 0) for value in reads)])
            place_of.update(dict.fromkeys(equation.outputs, places[index]))
            if index in run_of:
                evicted.update(dict.fromkeys(equation.outputs, places[index]))
        return places


def close(layout: Layout, program: Program) -> Layout:
    """A layout in which what is saved outside the segments is recomputed as well, but for what may not run twice."""
    segments = []
    for segment in layout.segments:
        free = all(is_repeatable(program.equations[index]) for index in segment.equations)
        segments.append(segment if segment.recomputed or not free else dataclasses.replace(segment, recomputed=True))
    return dataclasses.replace(layout, segments=tuple(segments))


def enclose(layout: Layout) -> Layout:
    """A layout whose segments stand together in one more; all of its equations may run twice."""
    everything = tuple(sorted(index for segment in layout.segments for index in segment.equations))
    return dataclasses.replace(layout, segments=(Segment(everything, recomputed=True, inner=layout.segments),))


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
