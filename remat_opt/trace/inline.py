"""Inline: a closed jaxpr becomes a flat `Program`, free of calls, of duplicates and of dead equations.

Calls (`jit`, `custom_jvp`, `custom_vjp`, `checkpoint`, …) are entered. A user's `jax.checkpoint` has left a second copy
of the forward pass in the differentiated step; value numbering merges it with the first, so that the search starts
free. Control flow (`scan`, `while`, `cond`, `shard_map`) stays one equation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import primitives

from remat_opt.trace import compat
from remat_opt.trace.effects import communicates, is_stateful
from remat_opt.trace.primitives import ELEMENTWISE
from remat_opt.trace.scopes import recomputed_scope
from remat_opt.trace.unrolled import unstacked


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """An operand that is known while tracing: a literal of the jaxpr."""

    value: Any
    aval: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One primitive application; `inputs` holds value ids and `Constant`s, `outputs` value ids."""

    primitive: Any
    inputs: tuple[int | Constant, ...]
    outputs: tuple[int, ...]
    params: dict[str, Any]
    effects: frozenset
    source_info: Any
    context: Any

    @property
    def reads(self) -> list[int]:
        """The operands that are no literals, each once."""
        return values_among(self.inputs)


def values_among(atoms: Iterable[int | Constant]) -> list[int]:
    """The operands that are no literals, each once."""
    return list(dict.fromkeys(x for x in atoms if isinstance(x, int)))


@dataclasses.dataclass(frozen=True)
class BackwardSlice:
    """The equations of a program that make some values, by index and in program order, and what they start from."""

    equations: tuple[int, ...]
    reads: frozenset[int]


class BodyFigures(NamedTuple):
    """What is known of an equation whose body we wrote; None for what can be read off it."""

    workspace: int | None = None  # bytes that the body needs
    seconds: float | None = None  # of all its runs


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A flat jaxpr. Values are numbered 0 … len(avals) − 1; the inputs and the constants come first."""

    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    equations: tuple[Equation, ...]
    outputs: tuple[int | Constant, ...]
    entered_checkpoints: bool = False  # the user's own were taken apart; the original step has them
    run_once: frozenset[int] = frozenset()  # values whose equations are not to be repeated: loops that repeat within
    opaque: frozenset[int] = frozenset()  # to be read after a barrier, which hides from the compiler how they were made
    # pairs of which the first is read behind one barrier with the second
    in_one_barrier: tuple[tuple[int, int], ...] = ()
    bodies: tuple[tuple[int, BodyFigures], ...] = ()  # by an equation's first result, of bodies that we wrote
    named: tuple[tuple[str, int | Constant], ...] = ()  # what was named, where names are taken out
    # Where arrays are divided among devices: the path to this program in the names of what is recomputed ("" for
    # the step, "_12" for the body of the loop whose first result is value 12); None writes no such names.
    marks: str | None = None
    pinned: frozenset[tuple[int, ...]] = frozenset()  # values not to be recomputed; a path leads into a body
    repeats_collectives: bool = False  # whether explicit collectives may run again
    gathers_once: bool = False  # inputs that devices gather for a product are not to be gathered again for another run
    # Scatters of one number into each row of zeros are written as comparisons; to be done in loop bodies, too
    # (`one_hot.py`).
    compares: bool = False

    def aval_of(self, x: int | Constant) -> Any:
        """The type of what an equation reads."""
        return x.aval if isinstance(x, Constant) else self.avals[x]

    @functools.cached_property
    def returned(self) -> frozenset[int]:
        """The values among the outputs."""
        return frozenset(values_among(self.outputs))

    @functools.cached_property
    def producer(self) -> dict[int, int]:
        """For each value that an equation makes the index of the equation."""
        return {value: index for index, equation in enumerate(self.equations) for value in equation.outputs}

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """For each value that equations read their indices."""
        found: dict[int, list[int]] = {}
        for index, equation in enumerate(self.equations):
            for value in equation.reads:
                found.setdefault(value, []).append(index)
        return found

    @functools.cached_property
    def constant(self) -> dict[int, int]:
        """For each value that depends on no input (a mask, zeros) the index of the equation that makes it."""
        known: dict[int, int] = {}
        for index, equation in enumerate(self.equations):
            if equation.primitive in ELEMENTWISE and known.keys() >= {*equation.reads}:
                known.update(dict.fromkeys(equation.outputs, index))
        return known

    def slice_back(self, wanted: Iterable[int | Constant], available: Collection[int] = ()) -> BackwardSlice:
        """The equations that make `wanted`; they read inputs of the program and `available` values."""
        equations: set[int] = set()
        reads: set[int] = set()
        stack = values_among(wanted)
        while stack:
            value = stack.pop()
            index = self.producer.get(value)
            if value in available or index is None:
                reads.add(value)
            elif index not in equations:
                equations.add(index)
                stack += self.equations[index].reads
        return BackwardSlice(
            tuple(sorted(equations)), frozenset(reads.difference(value for value, _ in self.constants))
        )

    @property
    def has_references(self) -> bool:
        """Whether it reads or writes mutable references."""
        return any(compat.is_reference(aval) for aval in self.avals)

    @property
    def effects(self) -> frozenset:
        """All effects of all equations."""
        return frozenset().union(*(equation.effects for equation in self.equations))


def within(program: Program, equation: Equation, body: Program) -> Program:
    """The body of one of a program's equations, with what is said of the program for the inside of that equation."""
    first = equation.outputs[0] if equation.outputs else -1
    return dataclasses.replace(
        body,
        marks=None if program.marks is None else f"{program.marks}_{first}",
        pinned=frozenset(path[1:] for path in program.pinned if len(path) > 1 and path[0] == first),
        repeats_collectives=program.repeats_collectives,
        compares=program.compares,
    )


def scope_of(program: Program, equation: Equation) -> str | None:
    """The name scope for one of a program's equations where it is recomputed; None where there are no marks."""
    if program.marks is None or not equation.outputs:
        return None
    return recomputed_scope(f"{program.marks}_{equation.outputs[0]}")


def can_recompute(program: Program, equation: Equation) -> bool:
    """Whether a second run of one of a program's equations is allowed."""
    effects = equation.effects
    if program.repeats_collectives:
        effects = compat.without_axis_effects(effects)
    elif communicates(equation.primitive, equation.params) or _gathers(program, equation):
        return False
    if effects or is_stateful(equation.primitive, equation.params):
        return False
    return program.run_once.isdisjoint(equation.outputs) and not any((v,) in program.pinned for v in equation.outputs)


def _gathers(program: Program, equation: Equation) -> bool:
    """Whether an explicit `reshard` puts an array together that was divided among devices.

    The compiler does not say so: from jax 0.12 on the names of its collectives leave out what they are recomputed for.
    """
    if equation.primitive is not compat.reshard_p or isinstance(equation.inputs[0], Constant):
        return False
    divided, result = (program.avals[one].sharding.spec for one in (equation.inputs[0], equation.outputs[0]))
    return any(axes is not None and axes != left for axes, left in zip(divided, result, strict=False))


def inline(
    closed: Any,
    *,
    keep_checkpoints: bool = False,
    keep_rules: bool = False,
    keep_names: bool = True,
    merge_checkpoints: bool = True,
) -> Program:
    """Flatten a closed jaxpr.

    Args:
        closed: the traced step.
        keep_checkpoints: leave the user's own `jax.checkpoint` regions as single equations.
        keep_rules: leave `custom_jvp` and `custom_vjp` calls as single equations, so that the program can still be
            differentiated as its author wants.
        keep_names: leave `checkpoint_name` equations; else they are taken out and listed in `Program.named`.
        merge_checkpoints: merge what the user's own checkpoints recompute with the first computation; else it stays, as
            in a compiler that honours their barriers.
    """
    return _Inliner(keep_checkpoints, keep_rules, keep_names, merge_checkpoints).run(closed)


# Which calls are entered: primitive -> function of the parameters that gives the jaxpr to enter, or None to leave it.


def _enter_jit(params: dict[str, Any]) -> Any | None:
    specified = [s for s in (*params["in_shardings"], *params["out_shardings"]) if not compat.is_unspecified(s)]
    layouts = [x for x in (*params.get("in_layouts", ()), *params.get("out_layouts", ())) if x is not None]
    if specified or layouts or params.get("compiler_options_kvs"):
        return None  # they bind at this boundary, which inlining would remove
    return params["jaxpr"]


_ENTERED: dict[Any, Callable[[dict[str, Any]], Any | None]] = {
    primitives.jit_p: _enter_jit,
    primitives.closed_call_p: lambda params: params["call_jaxpr"],
    primitives.call_p: lambda params: params["call_jaxpr"],
}
_ENTERED_RULES: dict[Any, Callable[[dict[str, Any]], Any | None]] = {
    primitives.custom_jvp_call_p: lambda params: params["call_jaxpr"],
    primitives.custom_vjp_call_p: lambda params: params["call_jaxpr"],
}


class _Inliner:
    def __init__(self, keep_checkpoints: bool, keep_rules: bool, keep_names: bool, merge_checkpoints: bool):
        self.keep_checkpoints = keep_checkpoints
        self.merge_checkpoints = merge_checkpoints
        self.rules = _ENTERED if keep_rules else _ENTERED | _ENTERED_RULES
        self.keep_names = keep_names
        self.named: list[tuple[str, int | Constant]] = []
        self.avals: list[Any] = []
        self.equations: list[Equation] = []
        self.numbering: dict[Any, tuple[int, ...]] = {}
        self.constants: dict[int, tuple[int, Any]] = {}
        self.entered_checkpoints = False

    def run(self, closed: Any) -> Program:
        jaxpr = compat.bare_jaxpr(closed)
        environment: dict[Any, int | Constant] = {}
        inputs = []
        for variable in compat.input_variables(closed):
            environment[variable] = self.new_value(variable.aval)
            inputs.append(environment[variable])
        self.bind_constants(closed, environment)
        self.walk(jaxpr, environment, None, None)
        outputs = tuple(self.read(atom, environment) for atom in jaxpr.outvars)
        constants = tuple(self.constants.values())
        return Program(
            tuple(self.avals),
            tuple(inputs),
            constants,
            alive(self.equations, outputs),
            outputs,
            self.entered_checkpoints,
            named=tuple(self.named),
        )

    def new_value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def bind_constants(self, closed: Any, environment: dict) -> None:
        for variable, constant in zip(compat.constant_variables(closed), compat.constants_of(closed), strict=True):
            if id(constant) not in self.constants:
                self.constants[id(constant)] = (self.new_value(variable.aval), constant)
            environment[variable] = self.constants[id(constant)][0]

    def read(self, atom: Any, environment: dict) -> int | Constant:
        if isinstance(atom, compat.Literal):
            return Constant(atom.val, atom.aval)
        return environment[atom]

    def walk(self, jaxpr: Any, environment: dict, outer_source: Any, name: str | None) -> None:
        for equation in jaxpr.eqns:
            inputs = tuple(self.read(atom, environment) for atom in equation.invars)
            source = equation.source_info
            if outer_source is not None:
                source = compat.nest_source_info(outer_source, source, name)
            if equation.primitive is compat.name_p and not self.keep_names:
                self.named.append((equation.params["name"], inputs[0]))
                environment[equation.outvars[0]] = inputs[0]
                continue
            inner = self.entered(equation)
            if inner is not None:
                self.enter(equation, inner, inputs, environment, source)
                continue
            if _does_nothing(equation):
                environment[equation.outvars[0]] = inputs[0]
                continue
            outputs = self.emit(equation, inputs, source)
            environment.update(zip(equation.outvars, outputs, strict=True))

    def entered(self, equation: Any) -> Any | None:
        if equation.primitive is compat.remat_p:
            keep = self.keep_checkpoints or compat.policy_offloads(equation.params["policy"])
            self.entered_checkpoints |= not keep
            return None if keep else equation.params["jaxpr"]
        if equation.primitive is compat.unstack_p:
            return unstacked(*equation.invars, **equation.params)
        rule = self.rules.get(equation.primitive)
        return None if rule is None else rule(equation.params)

    def enter(self, equation: Any, inner: Any, inputs: tuple, environment: dict, source: Any) -> None:
        local: dict[Any, int | Constant] = dict(zip(compat.input_variables(inner), inputs, strict=True))
        self.bind_constants(inner, local)
        numbering = self.numbering
        if equation.primitive is compat.remat_p and not self.merge_checkpoints:
            self.numbering = {}
        self.walk(compat.bare_jaxpr(inner), local, source, equation.params.get("name"))
        self.numbering = numbering
        for variable, atom in zip(equation.outvars, compat.bare_jaxpr(inner).outvars, strict=True):
            environment[variable] = self.read(atom, local)

    def emit(self, equation: Any, inputs: tuple, source: Any) -> tuple[int, ...]:
        key = None if equation.effects else _number(equation, inputs)
        if key is not None and key in self.numbering:
            return self.numbering[key]
        outputs = tuple(self.new_value(variable.aval) for variable in equation.outvars)
        self.equations.append(
            Equation(
                equation.primitive, inputs, outputs, equation.params, frozenset(equation.effects), source, equation.ctx
            )
        )
        if key is not None:
            self.numbering[key] = outputs
        return outputs


def alive(equations: Sequence[Equation], outputs: Sequence[int | Constant]) -> tuple[Equation, ...]:
    """The equations, in program order, that have effects or make what is needed."""
    needed = {*values_among(outputs)}
    kept = []
    for equation in reversed(equations):
        if equation.effects or not needed.isdisjoint(equation.outputs):
            kept.append(equation)
            needed.update(equation.reads)
    return tuple(reversed(kept))


def _does_nothing(equation: Any) -> bool:
    """Whether an equation hands its operand on: the reversal of a 1×1 kernel in a convolution's gradient, a pad by
    nothing in a max-pool's second derivative. To a compiler both are one buffer, which an update of that weight has to
    wait for."""
    if equation.primitive is primitives.pad_p:
        is_as_before = equation.outvars[0].aval == equation.invars[0].aval
        return is_as_before and not any(map(any, equation.params["padding_config"]))
    if equation.primitive is not primitives.rev_p:
        return False
    shape = equation.outvars[0].aval.shape
    return all(shape[axis] == 1 for axis in equation.params["dimensions"])


def _number(equation: Any, inputs: tuple) -> Any | None:
    """The value number: equal keys compute equal values. None where two runs may differ or the key cannot be told."""
    if is_stateful(equation.primitive, equation.params):
        return None
    try:
        params = tuple(sorted((name, _hashable(value)) for name, value in equation.params.items()))
        operands = tuple(_constant_key(x) if isinstance(x, Constant) else x for x in inputs)
        key = (equation.primitive, operands, params, equation.ctx)
        hash(key)
    except TypeError:
        return None
    return key


def _hashable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype), value.tobytes())
    return value


def _constant_key(constant: Constant) -> Any:
    value = constant.value
    if isinstance(value, jax.Array) and value.size > 1:
        return ("array", id(value))
    return ("literal", str(constant.aval), np.asarray(value).tobytes())
