"""How chunks of loops are written, beside their values (`test_loops_values.py`)."""

import dataclasses
import functools

import loop_models as models
import optax
import pytest
from jax.extend.core import Var
from jax.extend.core import primitives as P
from test_loops_values import RATES, all_residuals, as_jaxpr, captured

from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.loops.costs import ChunkSizes, PairCosts
from remat_opt.loops.division import divide
from remat_opt.loops.pairs import find_pairs
from remat_opt.loops.rewrite import rewrite_loops
from remat_opt.loops.update import find_update
from remat_opt.trace import compat
from remat_opt.trace.scopes import recomputed_in

layers = functools.partial(models.over_layers, models.block, tx=optax.adamw(1e-2))


def barriers_over_stacks(jaxpr):
    """How many barriers have an array with one slice for each layer among their operands, and how many layers."""
    found = 0
    for equation in compat.bare_jaxpr(jaxpr).eqns:
        shapes = [atom.aval.shape for atom in equation.invars]
        found += equation.primitive is compat.barrier_p and any(len(shape) == 3 for shape in shapes)
        found += sum(barriers_over_stacks(inner) for inner in compat.jaxprs_in(equation.params))
    return found


@pytest.mark.parametrize("update", [False, True])
def test_the_update_of_a_chunks_last_step_comes_before_the_next_step(update):
    """A loop of a single step is none to a compiler: it would keep the new weights of both steps until the end."""
    found, _, aliases = captured(layers)
    (pair,) = find_pairs(found.program).pairs
    choice = LoopChoice(chunk=2, update=update, in_chunk=all_residuals(pair))
    written = as_jaxpr(rewrite_loops(found.program, (pair,), [(0, choice)], aliases))
    assert (barriers_over_stacks(written) > 0) == update


def readers_of_single_slices(jaxpr, length=0):
    """What reads, in loops of one step, the slices of stacks that have one slice; `length` is the loop's."""
    jaxpr = compat.bare_jaxpr(jaxpr)
    slices = set()
    for equation in jaxpr.eqns:
        reads = slices & {atom for atom in equation.invars if isinstance(atom, Var)}
        is_slice = equation.primitive is P.squeeze_p and equation.invars[0].aval.shape[0] == 1
        if is_slice or (reads and equation.primitive.name == "layout_constraint"):
            slices |= set(equation.outvars)
        elif reads and length == 1:
            yield equation.primitive
        for inner in compat.jaxprs_in(equation.params):
            yield from readers_of_single_slices(inner, equation.params.get("length", length))


def test_what_a_chunk_of_two_steps_kept_of_its_first_waits_for_its_cotangents():
    """A loop of a single step is none to a compiler: it would recompute the first step before the second is done."""
    found, _, aliases = captured(layers)
    (pair,) = find_pairs(found.program).pairs
    held = all_residuals(pair)
    choice = LoopChoice(chunk=2, in_chunk=held, earlier=(Chunks((pair.length - 2) // 2, 2, held),))
    written = as_jaxpr(rewrite_loops(found.program, (pair,), [(0, choice)], aliases))
    assert set(readers_of_single_slices(written)) == {compat.barrier_p}


def bodies_with_recomputation(equations):
    """How many bodies of loops have equations of their own in the name scope of what is recomputed."""
    found = 0
    for equation in equations:
        for body in map(compat.bare_jaxpr, compat.jaxprs_in(equation.params)):
            found += any(recomputed_in(str(one.source_info.name_stack)) for one in body.eqns)
            found += bodies_with_recomputation(body.eqns)
    return found


@pytest.mark.parametrize(("chunk", "bodies"), [(None, 1), (3, 3)])
def test_what_is_recomputed_is_named_in_reverse_steps_and_in_the_forward_ones_of_chunks(chunk, bodies):
    """By the names collectives of the compiled program are known to be repeated."""
    found, _, aliases = captured(layers)
    program = dataclasses.replace(found.program, marks="")  # as of a step that is divided among devices
    (pair,) = find_pairs(program).pairs
    written = rewrite_loops(program, (pair,), [(0, LoopChoice(chunk=chunk))], aliases)
    assert bodies_with_recomputation(written.equations) == bodies


@pytest.mark.parametrize("marks", [None, ""])
def test_residuals_of_a_chunk_are_read_as_they_were_written_on_one_device_alone(marks):
    """XLA's SPMD partitioner gathers what a layout constraint reads."""
    found, _, aliases = captured(layers)
    program = dataclasses.replace(found.program, marks=marks)
    (pair,) = find_pairs(program).pairs
    written = rewrite_loops(program, (pair,), [(0, LoopChoice(chunk=3, in_chunk=all_residuals(pair)))], aliases)
    assert ("layout_constraint" in str(as_jaxpr(written))) == (marks is None)


def test_a_division_needs_and_takes_what_its_choice_does():
    """The kinds that a loop is divided into are priced like the choice that is written."""
    found, _, aliases = captured(layers)
    pairs = find_pairs(found.program).pairs
    costs = PairCosts(pairs[0], found.program, RATES, find_update(found.program, pairs[0], aliases, pairs))
    held = frozenset(), all_residuals(pairs[0])
    kinds = [costs.chunk_kind(steps, values, None) for values in held for steps in (2, 3)]
    last = [costs.last_chunk(values, None) for values in held]
    first = costs.first_bytes(frozenset())
    one_level = costs.option(LoopChoice(update=True))
    choices = []
    for limit in range(one_level.bytes, one_level.bytes // 4, -max(first // 2, 1)):
        (division,) = divide(pairs[0].length, kinds, last, first, [limit], 3)
        if division is None or not division.earlier:
            continue
        choice = LoopChoice(chunk=division.last_steps, update=True, in_chunk=division.in_last, earlier=division.earlier)
        option = costs.option(choice)
        assert option.bytes <= limit
        # Beside the chunks an option has what the forward loop saves or selects.
        rest = option.extra_flops - division.flops
        assert abs(rest) <= 0.05 * costs.original_flops
        choices.append(choice)
    assert len({choice.earlier for choice in choices}) > 1
    assert all(isinstance(chunks, Chunks) for choice in choices for chunks in choice.earlier)


def test_what_a_chunk_needs_by_hand():
    """Four steps: three that keep carries and residuals, one its carries alone, and one step at a time beside them."""
    sizes = ChunkSizes(first=2, each=10, last=3, step=7)
    assert sizes.peak(4) == 3 * 10 + 3 + 7
    assert sizes.saved(4) == 3 * 10 + 3
    assert sizes.peak(1) == 3 + 7
