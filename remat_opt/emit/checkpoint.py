"""Emits a function, before differentiation, in segments under the public `jax.checkpoint`.

The function's flat program is evaluated segment by segment. The inputs of a segment are stored values only. The cheap
values between them (`Layout.on_demand`) are recomputed in every segment that reads them, so that none is saved between
segments. Every JAX transform applies to the result, since it calls only public functions of JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from remat_opt.trace import compat
from remat_opt.trace.avals import is_inexact
from remat_opt.trace.effects import communicates, is_stateful
from remat_opt.trace.evaluation import bind, make_on_demand, read
from remat_opt.trace.inline import Constant, Equation, Program, values_among

_RESULT = -1  # stands for the function's results among the readers of a value


@dataclasses.dataclass(frozen=True)
class Segment:
    """Equations that are differentiated together.

    Attributes:
        equations: indices of the program's equations that the segment evaluates, in program order; those of its inner
            segments included.
        recomputed: whether the segment stands under a `jax.checkpoint`; else its residuals are what JAX makes of it.
        saved: values made inside that are kept nevertheless, by name.
        inner: how the equations are divided again, for nested recomputation; empty where they are not.
    """

    equations: tuple[int, ...]
    recomputed: bool
    saved: frozenset[int] = frozenset()
    inner: tuple[Segment, ...] = ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a program is written.

    Attributes:
        segments: in the order in which they run forward. Together they hold all equations but those on demand.
        on_demand: for each value that is made afresh wherever it is read the equation that makes it.
        names: the `checkpoint_name` of each value that may be kept, inside a segment or between two.
        on_host: the `checkpoint_name` of each argument that lies in the host's memory until the backward pass; then all
            segments stand in one region.
    """

    segments: tuple[Segment, ...]
    on_demand: dict[int, int]
    names: dict[int, str]
    on_host: dict[int, str] = dataclasses.field(default_factory=dict)


def is_repeatable(equation: Equation) -> bool:
    """Whether an equation may run again, or later: it has no effects, is deterministic, and contains no collective."""
    if communicates(equation.primitive, equation.params):
        return False
    return not equation.effects and not is_stateful(equation.primitive, equation.params)


def write_segments(
    program: Program, layout: Layout, arguments: Sequence[Any], prevent_cse: bool | Sequence[bool] = True
) -> list[Any]:
    """Evaluate a program on arguments or tracers, with its segments under `jax.checkpoint`.

    Args:
        program: a function before differentiation, its custom derivative rules kept.
        layout: what becomes of its equations.
        arguments: one value for each input of the program.
        prevent_cse: whether recomputation reads its inputs after a barrier. A sequence says it for each argument;
            values that the program makes are then always read after one.

    Returns:
        One value for each output of the program.
    """
    return _Writer(program, layout, prevent_cse).run(arguments)


def evaluate(program: Program, arguments: Sequence[Any], name: Callable[[int, Any], Any]) -> list[Any]:
    """Evaluate a program as it stands; `name(value id, value)` takes the place of each result of an equation."""
    environment: dict[int, Any] = dict(zip(program.inputs, arguments, strict=True))
    environment.update(program.constants)
    for equation in program.equations:
        results = bind(equation, [read(x, environment) for x in equation.inputs])
        environment.update((v, name(v, x)) for v, x in zip(equation.outputs, results, strict=True))
    return [array_of(x.value, x.aval) if isinstance(x, Constant) else environment[x] for x in program.outputs]


class _Writer:
    def __init__(self, program: Program, layout: Layout, prevent_cse: bool | Sequence[bool]):
        self.program = program
        self.layout = layout
        self.prevent_cse = prevent_cse
        self.can_name = compat.can_name()
        self.reads: dict[int, dict[int, None]] = {}  # for each equation not on demand the stored values it reads
        self.readers: dict[int, set[int]] = {}
        kept = (index for segment in layout.segments for index in segment.equations)
        for index in kept:
            self.note_reads(index, program.equations[index].inputs)
        self.note_reads(_RESULT, program.outputs)

    def note_reads(self, reader: int, operands: Iterable[int | Constant]) -> None:
        self.reads[reader] = stored_operands(self.program, self.layout.on_demand, operands)
        for value in self.reads[reader]:
            self.readers.setdefault(value, set()).add(reader)

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        if not self.layout.on_host:
            return self.run_all(arguments)
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=sorted(self.layout.on_host.values()),
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(self.run_from_host, policy=policy, prevent_cse=self.prevent_cse)(*arguments)

    def run_from_host(self, *arguments: Any) -> list[Any]:
        """Arguments are named inside the region, because a region's own inputs stay on the device."""
        named = zip(self.program.inputs, arguments, strict=True)
        on_host = self.layout.on_host
        return self.run_all([checkpoint_name(x, on_host[value]) if value in on_host else x for value, x in named])

    def run_all(self, arguments: Sequence[Any]) -> list[Any]:
        environment = dict(zip(self.program.inputs, arguments, strict=True))
        environment.update(self.program.constants)
        self.run_segments(self.layout.segments, frozenset(), environment)
        on_demand: dict[int, Any] = {}
        return [
            array_of(x.value, x.aval) if isinstance(x, Constant) else self.read(x, environment, on_demand)
            for x in self.program.outputs
        ]

    def run_segments(self, segments: Sequence[Segment], saved: frozenset[int], environment: dict[int, Any]) -> None:
        for at, segment in enumerate(segments):
            if segment.recomputed:
                self.checkpoint(segment, self.passing(segments, at, environment), saved, environment)
            else:
                self.run_inside(segment, saved, environment)

    def run_inside(self, segment: Segment, saved: frozenset[int], environment: dict[int, Any]) -> None:
        if segment.inner:
            self.run_segments(segment.inner, saved, environment)
            return
        on_demand: dict[int, Any] = {}
        for index in segment.equations:
            equation = self.program.equations[index]
            results = self.bind(equation, environment, on_demand)
            environment.update(zip(equation.outputs, results, strict=True))
            self.name(equation, saved, environment)

    def name(self, equation: Equation, named: Collection[int], environment: dict[int, Any]) -> None:
        """Put their names on those results of an equation that have one, as its author would. Random keys have none."""
        for value in equation.outputs:
            if value in named and value in self.layout.names and self.can_name:
                with compat.equation_context(equation.source_info, equation.context):
                    environment[value] = checkpoint_name(environment[value], self.layout.names[value])

    def passing(self, segments: Sequence[Segment], at: int, environment: dict[int, Any]) -> list[int]:
        """Older values that the segments from here to the next recomputed one read: they pass through this segment.

        They are then among this segment's results, so recomputing this segment waits for their cotangents, too.
        Otherwise a compiler may postpone the last sums of these cotangents and keep all terms until then.
        """
        fresh: dict[int, None] = {}
        for following in segments[at + 1 :]:
            fresh.update(dict.fromkeys(self.boundary(following)[0]))
            if following.recomputed:
                break
        before = {index for segment in segments[: at + 1] for index in segment.equations}
        inputs = set(self.program.inputs)
        return [
            value
            for value in fresh
            if value in environment
            and is_inexact(self.program.avals[value])
            and (value not in inputs or not before.isdisjoint(self.readers[value]))
        ]

    def checkpoint(
        self, segment: Segment, passing: Sequence[int], saved: frozenset[int], environment: dict[int, Any]
    ) -> None:
        """Evaluate a segment, and values that pass through it, under `jax.checkpoint`; what it makes is added to the
        environment. `saved` is what segments around it save."""
        named_inside = saved | segment.saved
        reads, makes = self.boundary(segment)
        covered, results = list(dict.fromkeys((*reads, *passing))), [*makes, *passing]

        def segment_function(*values):
            inside = dict(zip(covered, values, strict=True))
            self.run_inside(segment, named_inside, inside)
            return [inside[value] for value in results]

        names = sorted({self.layout.names[value] for value in segment.saved})
        policy = jax.checkpoint_policies.save_only_these_names(*names) if names else None
        recompute = jax.checkpoint(segment_function, policy=policy, prevent_cse=self.prevent_cse_of(covered))
        environment.update(zip(results, recompute(*(environment[value] for value in covered)), strict=True))
        named = set(makes) - named_inside
        for index in segment.equations:
            self.name(self.program.equations[index], named, environment)

    def prevent_cse_of(self, values: Sequence[int]) -> bool | tuple[bool, ...]:
        if isinstance(self.prevent_cse, bool):
            return self.prevent_cse
        of_inputs = dict(zip(self.program.inputs, self.prevent_cse, strict=True))
        return tuple(of_inputs.get(value, True) for value in values)

    def boundary(self, segment: Segment) -> tuple[list[int], list[int]]:
        """Values that a segment reads from outside, and those that it makes for others."""
        inside = set(segment.equations)
        made = dict.fromkeys(v for index in segment.equations for v in self.program.equations[index].outputs)
        read = dict.fromkeys(v for index in segment.equations for v in self.reads[index] if v not in made)
        return list(read), [value for value in made if self.readers.get(value, set()) - inside]

    def bind(self, equation: Equation, environment: dict[int, Any], on_demand: dict[int, Any]) -> list[Any]:
        inputs = [x.value if isinstance(x, Constant) else self.read(x, environment, on_demand) for x in equation.inputs]
        return bind(equation, inputs)

    def read(self, wanted: int, environment: dict[int, Any], on_demand: dict[int, Any]) -> Any:
        """A stored value, or one on demand, made with all that it needs."""
        makers = self.layout.on_demand
        if wanted not in makers:
            return environment[wanted]
        make_on_demand(self.program, makers, wanted, on_demand, lambda one: self.bind(one, environment, on_demand))
        return on_demand[wanted]


def stored_operands(program: Program, on_demand: dict[int, int], operands: Iterable[int | Constant]) -> dict[int, None]:
    """The values, none of them on demand, that some operands are or are made of."""
    found: dict[int, None] = {}
    seen: set[int] = set()
    stack = values_among(operands)[::-1]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in on_demand:
            stack += reversed(program.equations[on_demand[value]].reads)
        else:
            found[value] = None
    return found


def array_of(literal: Any, aval: Any) -> Any:
    """A literal of a jaxpr as an array of its type, weak where the literal is."""
    if isinstance(literal, jax.Array):  # tracers, too
        return literal
    if getattr(aval, "weak_type", False):
        return jax.numpy.asarray(np.asarray(literal).item())
    return jax.numpy.asarray(literal, aval.dtype)
