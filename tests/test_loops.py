"""What a pair of loops can be, how it is rewritten, and which option is chosen."""

import functools
import math

import jax
import jax.numpy as jnp
import loop_models as models
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import primitives
from test_loops_values import RATES, captured, run

from remat_opt.graph.build import build
from remat_opt.loops import rewrite
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.choose import choose, needed, within_budget
from remat_opt.loops.options import best_chunk
from remat_opt.loops.pairs import find_pairs
from remat_opt.loops.rewrite import rewrite_loops
from remat_opt.loops.update import find_update


def bytes_between(program):
    """Bytes that each pair's backward loop reads of what its forward loop has stacked."""
    size = functools.partial(np.prod, dtype=int)
    return [
        sum(int(size(program.avals[pair.forward.ys[y]].shape)) * 4 for y in set(pair.consumed.values()))
        for pair in find_pairs(program).pairs
    ]


@pytest.mark.parametrize("name", ["lstm", "layers", "integer carry", "flash attention", "pallas kernel"])
def test_one_level_keeps_the_carries_alone(name):
    found, _, aliases = captured(models.MODELS[name])
    pairs = find_pairs(found.program).pairs
    program = rewrite_loops(found.program, pairs, [(0, LoopChoice())], aliases)
    carries = [found.program.avals[value] for value in pairs[0].forward.last_carry]
    assert bytes_between(program) == [models.LENGTH * 4 * sum(math.prod(aval.shape) for aval in carries)]
    assert bytes_between(program)[0] < bytes_between(found.program)[0]


def test_a_saved_value_is_stacked_and_not_recomputed():
    found, leaves, aliases = captured(models.flash_attention)
    (pair,) = find_pairs(found.program).pairs
    exponentials = [e for e in pair.forward.body.equations if e.primitive is primitives.exp_p]
    assert exponentials
    statistics = [  # the residuals of the custom_vjp: its result and the logarithms of the sums
        value for value in pair.residuals if pair.forward.body.producer.get(value) is not None
    ]
    program = rewrite_loops(found.program, [pair], [(0, LoopChoice(frozenset(statistics)))], aliases)
    (again,) = find_pairs(program).pairs
    count = [sum(e.primitive is primitives.exp_p for e in p.backward.body.equations) for p in (pair, again)]
    assert count[0] == count[1]
    for one, other in zip(run(found.program, leaves), run(program, leaves), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_update_moves_into_the_loop_with_what_only_feeds_it():
    found, _, aliases = captured(models.MODELS["layers, adamw"])
    (pair,) = find_pairs(found.program).pairs
    update = find_update(found.program, pair, aliases)
    assert update is not None
    stacks = [v for v in update.results if found.program.avals[v].shape[0] == models.LENGTH]
    assert len(stacks) == len(update.results) == len(update.in_place) == 6  # two weights, two moments of each
    assert sorted(update.in_place.values()) == sorted(update.stacks)
    program = rewrite_loops(found.program, [pair], [(0, LoopChoice(update=True))], aliases)
    made = [(e, program.avals[v].shape) for e in program.equations for v in e.outputs]
    assert [e.primitive for e, shape in made if shape[:1] == (models.LENGTH,) and len(shape) == 3] == (
        [primitives.scan_p] * 7  # the carries of the forward loop, and the six results
    )


@pytest.mark.parametrize("name", ["layers, clipped by the global norm", "layers, norm reported", "layers, lamb"])
def test_gradients_that_are_read_otherwise_are_not_taken_into_the_loop(name):
    found, _, aliases = captured(models.MODELS[name])
    (pair,) = find_pairs(found.program).pairs
    update = find_update(found.program, pair, aliases)
    kept = [v for at, v in enumerate(pair.backward.ys) if update is None or at not in update.gradients]
    if name == "layers, lamb":  # the moments are elementwise, the trust ratio is not: nothing would be gained
        assert update is None
    assert kept


# Options and choice


@pytest.mark.parametrize("length", [2, 7, 16, 97, 1000, 1024])
def test_the_best_chunk_keeps_about_twice_the_root_of_the_length(length):
    chunk = best_chunk(length)
    assert (length - 1) // chunk + chunk <= 2 * math.sqrt(length) + 1


def test_options_say_what_the_program_has_then():
    found, _, aliases = captured(lambda: models.long_lstm(20))
    choices = choose(found.program, RATES, aliases)
    (pair,) = choices.options
    plain = build(found.program, RATES).graph.flops
    for option in pair.options[1:]:
        program = rewrite_loops(found.program, choices.pairs, [(0, option.choice)], aliases)
        more = build(program, RATES).graph.flops - plain
        assert more == pytest.approx(option.extra_flops, rel=0.02, abs=0.001 * plain)
        if option.choice.chunk is None:
            assert bytes_between(program) == [option.kept_bytes]
    assert pair.options[0].kept_bytes == bytes_between(found.program)[0]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_loops_have_options(length):
    found, _, aliases = captured(lambda: models.long_lstm(length))
    for pair in choose(found.program, RATES, aliases).options:
        assert all(o.choice.chunk is None or o.choice.chunk < length for o in pair.options if o.choice)


def test_chunks_that_keep_their_residuals_take_one_forward_pass():
    """Chen et al. 2016 on a loop: far fewer bytes than the carry of every step, for as many FLOPs."""
    found, _, aliases = captured(lambda: models.long_lstm(400))
    (pair,) = choose(found.program, RATES, aliases).options
    (one_level,) = (o for o in pair.options if o.choice == LoopChoice())
    once = [o for o in pair.options if o.extra_flops <= 1.02 * one_level.extra_flops]
    best = min(once, key=lambda option: option.bytes)
    assert best.choice.in_chunk or best.choice.earlier
    assert best.bytes < 0.25 * one_level.bytes
    twice = min(pair.options, key=lambda option: option.bytes)
    assert twice.bytes < best.bytes
    assert twice.extra_flops > 1.5 * best.extra_flops


def test_a_budget_pays_no_more_than_it_must():
    found, _, aliases = captured(lambda: models.over_layers(models.block, tx=optax.adamw(1e-2)))
    least = choose(found.program, RATES, aliases)
    original = least.options[0].options[0]
    assert within_budget(least.options, 10**9) == [original]
    (smallest,) = (one for one in least.options[0].options if one.choice == dict(least.chosen)[0])
    assert smallest.extra_flops > 0
    seconds = []
    for budget in np.linspace(needed([smallest]), needed([original]), 5).astype(int):
        (picked,) = within_budget(least.options, int(budget))
        assert needed([picked]) <= budget
        seconds.append(max(picked.extra_seconds, 0.0))  # less is no reason to write what fits
    assert seconds == sorted(seconds, reverse=True)


def test_equal_pairs_are_traced_once(monkeypatch):
    """Of loops in a row only the first and the last are read by others than their neighbours."""

    def loss(weight, start):
        h = start
        for _ in range(5):
            h, _ = lax.scan(lambda h, _: (jnp.sin(weight * h), None), h, None, 6)
        return h.sum()

    found, leaves, aliases = captured(lambda: (jax.grad(loss), (jnp.float32(0.8), models.normal(3, 4, 4))))
    pairs = find_pairs(found.program).pairs
    traced = []
    given = rewrite.run_forward
    monkeypatch.setattr(rewrite, "run_forward", lambda *one: traced.append(one) or given(*one))
    program = rewrite_loops(found.program, pairs, [(at, LoopChoice(chunk=2)) for at in range(len(pairs))], aliases)
    assert len(pairs) == 5
    assert len(traced) <= 3
    np.testing.assert_allclose(run(program, leaves), run(found.program, leaves), rtol=1e-6)
