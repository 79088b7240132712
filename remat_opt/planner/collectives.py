"""Sharded steps: recomputation does not repeat collectives.

The compiler partitions a step by its shardings and adds collectives, which only the compiled program shows. So both the
original and the planned step are compiled, and if the planned step sends more bytes, it is planned again. If sharded
weights are gathered more often, recomputation reads the arrays that were gathered before (the original step keeps them,
too); otherwise the values for which arrays are sent are saved.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax

from remat_opt.planner.budget import InfeasibleBudget
from remat_opt.planner.decision import Decision, Measure
from remat_opt.planner.prepared import Prepared
from remat_opt.targets import CompilationOutOfMemory, Figures
from remat_opt.targets.communication import Path
from remat_opt.trace import compat
from remat_opt.trace.effects import communicates
from remat_opt.trace.inline import Constant, Equation, Program, inline
from remat_opt.units import format_bytes

MOST_ROUNDS = 4  # a step that is planned again may compute other things again
MORE = 1.001  # times the bytes of the original step: a loss that is sent in another type is not more


def number_of_devices(program: Program, arguments: Any, jit_options: Any) -> int:
    """On how many devices a step runs.

    Args:
        program: the step.
        arguments: a tree of arrays or `jax.ShapeDtypeStruct`s.
        jit_options: a tree with the shardings that its jit has.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
    shardings += jax.tree.leaves(jit_options)
    shardings += [value for equation in program.equations for value in equation.params.values()]
    mesh = jax.sharding.get_abstract_mesh()  # that `jax.set_mesh` has set
    return max(1 if mesh.empty else mesh.size, *map(_devices, shardings), 1)


def _devices(sharding: Any) -> int:
    """Devices of a sharding or a mesh; 1 for anything else."""
    if isinstance(sharding, jax.sharding.Sharding):
        return sharding.num_devices
    return sharding.size if isinstance(sharding, (jax.sharding.Mesh, jax.sharding.AbstractMesh)) else 1


def without_repeats(
    decision: Decision, prepared: Prepared, plan_again: Callable[[Prepared, Measure], Decision], measure: Measure
) -> Decision:
    """Plan again until the compiled step sends no more bytes than the original step, or `MOST_ROUNDS` are over.

    Args:
        decision: the first one.
        prepared: the original step.
        plan_again: decides for the same step, in which fewer values may be recomputed.
        measure: the compiler.

    Returns:
        The decision that sends least; where all send more than the original step, its note says so.
    """
    first, plain, pinned, once = decision, None, frozenset[Path](), False
    found: list[tuple[int, Decision]] = []
    while not decision.is_unchanged and len(found) < MOST_ROUNDS:
        decision = _measured(measure, decision)
        sent = decision.plan.measured and decision.plan.measured.collectives
        if not sent:
            break
        plain = plain or _plain(measure, prepared, decision)
        found.append((sent.bytes, decision))
        if plain is None or plain.collectives is None or sent.bytes <= MORE * plain.collectives.bytes:
            break
        more = _with_their_like(sent.recomputed, _before_its_loops(decision.prepared).bridge.program)
        if sent.gathers > plain.collectives.gathers and not once:
            once = True
        elif more <= pinned:
            break
        else:
            pinned |= more
        try:
            decision = plan_again(_pinned(prepared, pinned).gathering_once(once), _with_cached_plain(measure, plain))
        except InfeasibleBudget:
            break
    if not found:
        return first
    size, best = min(found, key=lambda one: one[0])
    of_plain = plain and plain.collectives
    note = best.plan.note
    if of_plain and size > MORE * of_plain.bytes:
        before = format_bytes(of_plain.bytes)
        said = f"each device sends {format_bytes(size)} to others, {before} in the step as it was given"
        note = "; ".join(filter(None, (note, said)))
    return best.with_plan(plain_measured=plain, note=note)


def _measured(measure: Measure, decision: Decision) -> Decision:
    """The decision with the compiler's figures, compiled where it was not."""
    if decision.plan.measured is not None:
        return decision
    try:
        figures = measure(decision.prepared, decision.solution)
    except CompilationOutOfMemory:
        return decision
    return decision.with_plan(measured=figures)


def _plain(measure: Measure, prepared: Prepared, decision: Decision) -> Figures | None:
    """The compiler's figures of the original step; None where the compiler refuses it."""
    if decision.plan.plain_measured is not None:
        return decision.plan.plain_measured
    try:
        return measure(prepared, None)
    except CompilationOutOfMemory:
        return None


def _with_cached_plain(measure: Measure, plain: Figures) -> Measure:
    """The compiler, not asked again for the original step."""
    return lambda prepared, solution: plain if solution is None else measure(prepared, solution)


def _before_its_loops(prepared: Prepared) -> Prepared:
    """The step as it was before its loops were rewritten; its batch may be split."""
    while prepared.original is not None and prepared.original.chunks == prepared.chunks:
        prepared = prepared.original
    return prepared


def _with_their_like(paths: Iterable[Path], program: Program) -> frozenset[Path]:
    """Values with those that the same line makes in other layers: a search that may not compute the one again would
    take the other. Values that a rewritten loop has of its own are left out, they are none of the step's."""
    makers = {value: equation for equation in program.equations for value in equation.outputs}
    known = {path for path in paths if path[0] in makers}
    asked = {_likeness(makers[path[0]], program) for path in known if len(path) == 1}
    alike = {(v,) for e in program.equations if _likeness(e, program) in asked for v in e.outputs}
    for first in {path[0] for path in known if len(path) > 1}:
        inside = {path[1:] for path in known if path[0] == first and len(path) > 1}
        bodies = compat.jaxprs_in(makers[first].params)
        inside |= _with_their_like(inside, inline(bodies[0])) if len(bodies) == 1 else inside
        alike |= {(first, *path) for path in inside}
    return frozenset(alike)


def _likeness(equation: Equation, program: Program) -> Any:
    """What equations of one line have in common, in a loop of Python's over layers, too."""
    shapes = tuple(program.avals[value].shape for value in (*equation.outputs, *_values(equation)))
    return equation.primitive, shapes, re.sub(r"\d+", "", compat.place_of(equation.source_info))


def _values(equation: Equation) -> list[int]:
    return [x for x in equation.inputs if not isinstance(x, Constant)]


def _pinned(prepared: Prepared, pinned: frozenset[Path]) -> Prepared:
    """The same step, in which some values are not recomputed."""
    program = dataclasses.replace(prepared.captured.program, pinned=pinned)
    return prepared.of_program(program)


def note_explicit_collectives(decision: Decision) -> Decision:
    """Where nothing is gained, and explicit collectives are why, the note says what allows it."""
    program, nothing = decision.prepared.captured.program, decision.plan.note.startswith("nothing to gain")
    if not nothing or not any(communicates(e.primitive, e.params) for e in program.equations):
        return decision
    said = "explicit collectives are not repeated, repeat_collectives=True allows it"
    note = "; ".join(filter(None, (decision.plan.note, said)))
    return decision.with_plan(note=note)
