"""What must hold of a random program that was rewritten: the values, the types, the peak, JAX's own checker."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from remat_opt import InfeasibleBudget, optimize
from remat_opt.planner.candidates import Candidate, Variants
from remat_opt.planner.plan import Plan
from remat_opt.planner.planning import decide, decision_of
from remat_opt.planner.prepared import Prepared, prepare
from remat_opt.planner.settings import check_settings
from remat_opt.rewrites.captured import capture
from remat_opt.targets import resolve_target
from remat_opt.trace import compat
from remat_opt.trace.avals import is_inexact, is_key
from tests.numpy_ops import apply_in_numpy
from tests.op_by_op import bits, run_op_by_op
from tests.random_programs import RandomProgram

TARGETS = ("cpu", "h200", "v5e")
# Of the memory between the least and the plain peak; None: what `optimize` would take, −1: the least at any cost.
SHARES = (None, None, None, -1.0, -1.0, -1.0, 0.3, 0.6)
SOLVERS = ("auto", "auto", "auto", "chen", "chen", "feng_huang", "lower_sets", "lower_sets", "rotor")


@dataclasses.dataclass(frozen=True)
class How:
    """How a program is rewritten."""

    target: str
    solver: str
    share: float | None


def any_way(source: random.Random) -> How:
    """A random target, solver and budget."""
    return How(source.choice(TARGETS), source.choice(SOLVERS), source.choice(SHARES))


def prepared_of(program: RandomProgram, target: str) -> Prepared:
    """The program as the searches see it."""
    captured = capture(jax.jit(program.step, donate_argnums=program.donated), program.arguments(), {})
    return prepare(captured, resolve_target(target))


def found_for(prepared: Prepared, how: How) -> Candidate:
    """The schedule that is searched for; its peak is within what it was asked for."""
    variants, plain = Variants(prepared, how.solver), prepared.problem.plain.peak
    if how.share is None:
        found = variants.minimum_memory()
    else:
        found = least = variants.within(0)
        if how.share >= 0:
            limit = int(least.peak + how.share * (plain - least.peak))
            found = variants.within(limit)
            assert found.peak <= max(limit, least.peak), f"a peak of {found.peak} bytes, {limit} are allowed"
    plain = prepared.plain_peak if found.is_unchanged else plain  # which counts what compilers store beyond our model
    assert found.peak <= plain, f"a peak of {found.peak} bytes, above the plain step's {plain}"
    return found


def check_rewritten(program: RandomProgram, how: How) -> bool:
    """Rewrite a program, run both op by op, and compare; whether anything was rewritten.

    Raises:
        AssertionError: values, types or peaks are not what they have to be.
    """
    prepared = prepared_of(program, how.target)
    found = found_for(prepared, how)
    if found.is_unchanged:
        return False
    given = prepared.captured.traced.jaxpr
    written = jax.make_jaxpr(lambda *leaves: found.prepared.emit(found.solution, leaves))(
        *prepared.captured.input_avals
    )
    core.check_jaxpr(compat.bare_jaxpr(written))
    assert types_of(written) == types_of(given), f"types of results: {types_of(written)}, expected {types_of(given)}"
    leaves = [as_array(leaf) for leaf in jax.tree.leaves(program.arguments())]
    assert_equal(run_op_by_op(written, leaves, apply_in_numpy), run_op_by_op(given, leaves, apply_in_numpy))
    check_plan(prepared, found, how)
    return True


def check_plan(prepared: Prepared, found: Candidate, how: How) -> None:
    """The plan's text gives the plan back, and from the plan comes the same schedule."""
    plan = decision_of(found, check_settings(target=how.target, solver=how.solver)).plan
    again = Plan.from_json(plan.to_json())
    assert again == plan
    settings = check_settings(target=how.target, solver=how.solver, plan=again)
    taken_over = decide(prepared, settings, None)
    assert taken_over.solution.schedule == found.solution.schedule


def as_array(leaf: Any) -> Any:
    """A leaf of the arguments as an array, Python's numbers weakly typed."""
    return leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf)


def types_of(closed: Any) -> list[tuple]:
    """Shape, dtype and weakness of each result of a closed jaxpr."""
    return [(aval.shape, str(aval.dtype), aval.weak_type) for aval in closed.out_avals]


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """The same bits; two that are no number are equal."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        one, other = as_array(one), as_array(other)
        assert (one.shape, one.dtype) == (other.shape, other.dtype), (
            f"result {index}: {one.aval}, expected {other.aval}"
        )
        if bits(one) != bits(other):
            assert not is_key(one), f"result {index} ({one.aval}): other random keys"
            numbers = [np.asarray(value, np.float64) for value in (one, other)]
            if np.array_equal(*numbers, equal_nan=True):
                continue
            worst = float(np.nanmax(np.abs(numbers[0] - numbers[1])))
            raise AssertionError(
                f"result {index} ({one.aval}) differs by up to {worst} of {np.nanmax(np.abs(numbers[1]))}"
            )


# Without fused multiply-adds, and with bfloat16 rounded wherever it is written so, most of what XLA:CPU does to a group
# of operations leaves their rounding as it is.
EXACT = {"xla_cpu_max_isa": "AVX", "xla_allow_excess_precision": False}


ROUNDING = 2e-5  # of the largest number of a result; what is left: sums in another order


def check_compiled(program: RandomProgram, budget: float, say: Callable[[str], object] = str) -> bool:
    """Call the optimised step as users do and compare with `jax.jit`; whether anything was rewritten.

    `say` is called before each of both, with which it is.

    Where rounding decides what a program does (which number is the largest, which branch is taken), so that its plain
    step gives other numbers op by op than compiled, values are not compared.
    """
    options = {"verify": False, "donate_argnums": program.donated, "compiler_options": EXACT}
    optimized = optimize(program.step, budget=budget, **options)
    try:
        plan = optimized.plan(*program.arguments())
    except InfeasibleBudget:
        optimized = optimize(program.step, **options)
        plan = optimized.plan(*program.arguments())
    if plan.is_plain:
        return False
    say("rewritten")
    found = optimized(*program.arguments())
    say("plain")
    jitted = jax.jit(program.step, donate_argnums=program.donated, compiler_options=EXACT)
    expected = jitted(*program.arguments())
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves, plain = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert [jax.typeof(leaf) for leaf in leaves] == [jax.typeof(leaf) for leaf in plain]
    if any(not is_close(one, other) for one, other in zip(leaves, plain, strict=True)):
        arguments = [as_array(leaf) for leaf in jax.tree.leaves(program.arguments())]
        op_by_op = run_op_by_op(jitted.trace(*program.arguments()).jaxpr, arguments)
        if all(is_close(one, other) for one, other in zip(op_by_op, plain, strict=True)):
            assert_equal(leaves, plain)
    return True


def is_close(one: Any, other: Any) -> bool:
    """Whether two arrays are equal but for rounding; integers, booleans and keys have to be the same."""
    one, other = as_array(one), as_array(other)
    if bits(one) == bits(other) or not is_inexact(one.aval):
        return bits(one) == bits(other)
    numbers = [np.asarray(value, np.float64) for value in (one, other)]
    largest = np.nanmax(np.abs(numbers[1]), initial=0.0)
    epsilon = max(ROUNDING, 4 * float(jax.numpy.finfo(one.dtype).eps) if one.dtype.itemsize < 4 else 0.0)
    return np.allclose(*numbers, rtol=0, atol=epsilon * largest, equal_nan=True)
