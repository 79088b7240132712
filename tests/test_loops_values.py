"""Loops in all forms, rewritten in one and in two levels: the same values as the original program."""

import jax
import numpy as np
import pytest
from loop_models import MODELS
from op_by_op import assert_same_arithmetic

from remat_opt.graph.build import build
from remat_opt.graph.cost import Rates
from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.loops.inside import rewrite_inside
from remat_opt.loops.pairs import find_pairs
from remat_opt.loops.rewrite import rewrite_loops
from remat_opt.planner.loop_search import SearchedSteps
from remat_opt.rewrites.captured import capture
from remat_opt.trace.evaluation import evaluate, read

RATES = Rates(4e12, {"float32": 6e13})
# XLA:CPU fuses these bodies' reductions otherwise when they stand in another loop.
WITHIN_ROUNDING = {"nested", "linear algebra"}
# jax 0.12 fuses adamw's update of a slice otherwise than that of a stack.
UPDATE_WITHIN_ROUNDING = {"layers, adamw", "mixed precision"}
# From jax 0.11 on the backward pass reads the stack that is returned: there is nothing to gain.
NOTHING_GAINED = {"checkpoint, weights handed back"} if jax.__version_info__ >= (0, 11) else set()
WITHOUT_PAIRS = {"micro-batches"} | NOTHING_GAINED


def all_residuals(pair):
    return frozenset(pair.residuals) - {*pair.forward.body.inputs}


ONE_LEVEL = {
    "one level": lambda pair: LoopChoice(),
    "one level, steps scheduled": lambda pair: LoopChoice(step_bytes=1),
    "one level, everything on the host": lambda pair: LoopChoice(
        all_residuals(pair), update=True, host=all_residuals(pair) | {*pair.forward.body_carry}
    ),
    "one level, carries on the host, steps scheduled": lambda pair: LoopChoice(
        step_bytes=1, host=frozenset(pair.forward.body_carry)
    ),
}
TWO_LEVELS = {
    "two levels": lambda pair: LoopChoice(chunk=3, update=True),
    "two levels, residuals of a chunk kept": lambda pair: LoopChoice(
        chunk=3, update=True, in_chunk=all_residuals(pair)
    ),
    "several kinds of chunks": lambda pair: LoopChoice(
        chunk=2, update=True, in_chunk=all_residuals(pair), earlier=kinds_before(pair)
    ),
}
ALL_AT_ONCE = {
    "several kinds of chunks, steps scheduled": lambda pair: LoopChoice(
        chunk=2, update=True, earlier=kinds_before(pair), step_bytes=1
    ),
}
CHOICES = ONE_LEVEL | TWO_LEVELS | ALL_AT_ONCE


def cases():
    """Each model with what contains most, and in turn with one of the others of each number of levels."""
    for place, name in enumerate(MODELS):
        for choices in (ONE_LEVEL, TWO_LEVELS, ALL_AT_ONCE):
            yield name, [*choices][place % len(choices)]


def kinds_before(pair):
    """Two kinds of chunks in the loop's first steps, where it is long enough."""
    if pair.length < 5:
        return ()
    return (Chunks(1, 2, all_residuals(pair)), Chunks(2, 1))


def captured(model):
    step, arguments = model()
    found = capture(jax.jit(step, donate_argnums=0), arguments, {})
    return found, jax.tree.leaves(arguments), build(found.program, RATES, found.donated).graph.aliases


def function_of(program):
    def fun(*values):
        environment = dict(zip(program.inputs, values, strict=True))
        evaluate(program, range(len(program.equations)), environment)
        return [read(atom, environment) for atom in program.outputs]

    return fun


def as_jaxpr(program):
    return jax.make_jaxpr(function_of(program))(*(program.avals[value] for value in program.inputs))


def run(program, leaves):
    return compiled_and_run(program, leaves)[1]


def compiled_and_run(program, leaves):
    """The jaxpr that was compiled, and its results."""
    jitted = jax.jit(function_of(program))
    return jitted.trace(*leaves).jaxpr, [np.asarray(value) for value in jitted(*leaves)]


@pytest.fixture(scope="module")
def as_given():
    """Each model's results as it was given, computed once."""
    results = {}

    def of(name):
        if name not in results:
            found, leaves, aliases = captured(MODELS[name])
            results[name] = found, leaves, aliases, *compiled_and_run(found.program, leaves)
        return results[name]

    return of


@pytest.mark.parametrize(("name", "how"), [*cases()])
def test_values(name, how, as_given):
    found, leaves, aliases, given, expected = as_given(name)
    pairs = find_pairs(found.program)
    assert pairs.left == ()
    assert bool(pairs.pairs) != (name in WITHOUT_PAIRS)
    chosen = [(at, CHOICES[how](pair)) for at, pair in enumerate(pairs.pairs)]
    program = rewrite_loops(found.program, pairs.pairs, chosen, aliases, steps=SearchedSteps(RATES, "cpu"))
    inside = name in {"micro-batches", "nested"}
    if inside:
        program, bodies = rewrite_inside(program, RATES)
        assert bodies or "everything" in how  # then nothing is recomputed, so no body has both passes
    elif name not in {"checkpoint on the body"} | NOTHING_GAINED:
        assert program.equations != found.program.equations
    assert [program.avals[v].str_short() for v in program.outputs if isinstance(v, int)] == [
        found.program.avals[v].str_short() for v in found.program.outputs if isinstance(v, int)
    ]
    written, results = compiled_and_run(program, leaves)
    if name in WITHIN_ROUNDING or (name in UPDATE_WITHIN_ROUNDING and how != "one level"):
        for one, other in zip(expected, results, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    else:
        assert_same_arithmetic(given, written, leaves, expected, results)
