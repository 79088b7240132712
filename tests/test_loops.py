"""Which loops are pairs, what each can be, what is chosen, and what `optimize` makes of it."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import loop_models as models
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import primitives
from test_loops_values import RATES, captured, run

import remat_opt
from benchmarks.loop_networks import gpt
from remat_opt.examples import make_example
from remat_opt.graph.build import build
from remat_opt.looping import SearchedSteps
from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.loops.choose import LoopChoices, choose, needed
from remat_opt.loops.costs import PairCosts
from remat_opt.loops.options import PairOptions, best_chunk
from remat_opt.loops.pairs import EFFECTS, OFFLOADED, REFERENCES, find_pairs
from remat_opt.loops.recomputation import joint_step, recomputation
from remat_opt.loops.reverse import room_for
from remat_opt.loops.rewrite import rewrite_loops
from remat_opt.loops.update import find_update
from remat_opt.prepared import prepare
from remat_opt.program import compat
from remat_opt.program.capture import capture
from remat_opt.program.fingerprint import fingerprint
from remat_opt.targets import measure_flat, resolve_target
from remat_opt.targets.options import compiler_options_for

# XLA's own, not `conftest`'s: with these the loops are rounded alike, to the bit.
AS_USERS_COMPILE = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def bytes_between(program):
    """Bytes that each pair's backward loop reads of what its forward loop has stacked."""
    size = functools.partial(np.prod, dtype=int)
    return [
        sum(int(size(program.avals[pair.forward.ys[y]].shape)) * 4 for y in set(pair.consumed.values()))
        for pair in find_pairs(program).pairs
    ]


# Pairs


def test_each_layer_of_a_stack_is_paired_with_its_own_backward_loop():
    found, _, _ = captured(models.stacked)
    pairs = find_pairs(found.program).pairs
    assert [pair.forward_index for pair in pairs] == sorted((pair.forward_index for pair in pairs), reverse=True)
    assert len({pair.forward_index for pair in pairs} | {pair.backward_index for pair in pairs}) == 6


def test_both_directions_of_a_bidirectional_network_are_paired():
    found, _, _ = captured(models.bidirectional)
    assert sorted(pair.forward.reverse for pair in find_pairs(found.program).pairs) == [False, True]


def test_what_somebody_else_reads_is_written_in_any_case():
    found, _, _ = captured(models.all_hidden)
    (pair,) = find_pairs(found.program).pairs
    assert len(pair.kept_ys) == 1
    assert pair.residual_ys


def with_effects():
    def body(w, h):
        jax.debug.print("{}", h[0, 0])
        return models.block(w, h)

    return models.over_layers(body)


def with_references():
    def step(state, x):
        seen = jax.new_ref(jnp.zeros(x.shape))

        def loss(p):
            def body(h, w):
                seen[...] = seen[...] + lax.stop_gradient(h)
                return models.block(w, h), None

            return (lax.scan(body, x, p)[0] ** 2).mean()

        gradients = jax.grad(loss)(state[0])
        return (jax.tree.map(lambda p, g: p - 0.1 * g, state[0], gradients),), seen[...]

    return step, ((models.layers(),), models.normal(8, models.BATCH, models.WIDTH))


def with_offloading():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return models.over_layers(jax.checkpoint(models.block, policy=policy))


@pytest.mark.parametrize(
    ("model", "reason"), [(with_effects, EFFECTS), (with_references, REFERENCES), (with_offloading, OFFLOADED)]
)
def test_loops_that_must_stay_are_left_with_a_reason(model, reason):
    found, _, _ = captured(model)
    assert find_pairs(found.program).pairs == ()
    assert find_pairs(found.program).left == (reason,)


@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")  # one has something to gain from our order, one has not
@pytest.mark.parametrize("model", [with_effects, with_references])
def test_loops_that_must_stay_give_right_results(model, capfd):
    step, arguments = model()
    expected = jax.jit(step)(*arguments)
    found = remat_opt.optimize(step)(*arguments)
    jax.effects_barrier()
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == (2 * models.LENGTH if model is with_effects else 0)


# Written again


@pytest.mark.parametrize("name", ["lstm", "layers", "integer carry", "flash attention", "pallas kernel"])
def test_one_level_keeps_the_carries_alone(name):
    found, _, aliases = captured(models.MODELS[name])
    pairs = find_pairs(found.program).pairs
    program = rewrite_loops(found.program, pairs, [(0, LoopChoice())], aliases)
    carries = [found.program.avals[value] for value in pairs[0].forward.last_carry]
    assert bytes_between(program) == [models.LENGTH * 4 * sum(math.prod(aval.shape) for aval in carries)]
    assert bytes_between(program)[0] < bytes_between(found.program)[0]


def test_a_saved_value_is_stacked_and_not_computed_again():
    found, leaves, aliases = captured(models.flash_attention)
    (pair,) = find_pairs(found.program).pairs
    exponentials = [e for e in pair.forward.body.equations if e.primitive is primitives.exp_p]
    assert exponentials
    statistics = [  # the residuals of the custom_vjp: its result and the logarithms of the sums
        value for value in pair.residuals if pair.forward.producer.get(value) is not None
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


def test_the_same_program_is_written_the_same_way():
    found, _, aliases = captured(models.lstm)

    def written():
        pairs = find_pairs(found.program).pairs
        return rewrite_loops(found.program, pairs, [(0, LoopChoice(chunk=3))], aliases)

    assert fingerprint(written()) == fingerprint(written())


# Options and choice


@pytest.mark.parametrize("length", [2, 7, 16, 97, 1000, 1024])
def test_the_best_chunk_keeps_about_twice_the_root_of_the_length(length):
    chunk = best_chunk(length)
    assert (length - 1) // chunk + chunk <= 2 * math.sqrt(length) + 1


def test_options_say_what_the_program_has_then():
    found, _, aliases = captured(lambda: long_lstm(20))
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
    found, _, aliases = captured(lambda: long_lstm(length))
    for pair in choose(found.program, RATES, aliases).options:
        assert all(o.choice.chunk is None or o.choice.chunk < length for o in pair.options if o.choice)


def test_chunks_that_keep_their_residuals_take_one_forward_pass():
    """Chen et al. 2016 on a loop: far fewer bytes than the carry of every step, for as many FLOPs."""
    found, _, aliases = captured(lambda: long_lstm(400))
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
    free = choose(found.program, RATES, aliases, 10**9)
    least = choose(found.program, RATES, aliases)
    assert free.chosen == ()
    assert least.extra_flops > 0
    given, smallest = (needed([pick]) for pick in (least.options[0].options[0], _picked(least)))
    seconds = []
    for budget in np.linspace(smallest, given, 5).astype(int):
        choices = choose(found.program, RATES, aliases, int(budget))
        assert needed([_picked(choices)]) <= budget
        seconds.append(_picked(choices).extra_seconds)
    assert seconds == sorted(seconds, reverse=True)


def _picked(choices):
    choice = dict(choices.chosen).get(0)
    return next(option for option in choices.options[0].options if option.choice == choice)


# All of it


def long_lstm(length, width=32, batch=8):
    params = {"w": models.normal(0, 2 * width, 4 * width), "b": jnp.zeros(4 * width)}
    tx = optax.adam(1e-2)

    def loss(p, xs):
        def body(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ p["w"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zero = jnp.zeros((batch, width))
        return (lax.scan(body, (zero, zero), xs)[0][0] ** 2).mean()

    return models.step_of(loss, params, models.normal(3, length, batch, width), tx=tx)


def temporary_bytes(jitted, arguments, target="h200"):
    traced = jitted.trace(*arguments)
    avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments)]
    donated = range(len(jax.tree.leaves(arguments[0])))
    return measure_flat(compat.function_of_jaxpr(traced), avals, donated=donated, target=target).temp_bytes


@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
def test_the_memory_of_a_recurrent_network_grows_like_the_root_of_its_length():
    needs = {}
    for length in (256, 1024, 4096):
        step, arguments = long_lstm(length)
        needs[length] = temporary_bytes(remat_opt.optimize(jax.jit(step, donate_argnums=0), target="h200"), arguments)
    assert needs[1024] < 2.2 * needs[256]
    assert needs[4096] < 2.2 * needs[1024]
    step, arguments = long_lstm(1024)
    assert needs[1024] < 0.05 * temporary_bytes(jax.jit(step, donate_argnums=0), arguments)


def test_optimize_trains_a_recurrent_network_in_less_memory():
    step, arguments = long_lstm(400)
    optimized = remat_opt.optimize(jax.jit(step, donate_argnums=0, compiler_options=AS_USERS_COMPILE))
    plan = optimized.plan(*arguments)
    assert plan.loops
    assert 0 < plan.predicted.extra_flops < 0.7 * plan.predicted.flops
    plain = jax.jit(step, compiler_options=AS_USERS_COMPILE)
    temporary = [f.lower(*arguments).compile().memory_analysis().temp_size_in_bytes for f in (plain, optimized)]
    assert temporary[1] < 0.2 * temporary[0]
    one, other = arguments[0], jax.tree.map(jnp.array, arguments[0])
    expected = found = None
    for _ in range(3):
        one, expected = plain(one, *arguments[1:])
        other, found = optimized(other, *arguments[1:])
        np.testing.assert_array_equal(expected, found)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_weights_updated_in_the_reverse_loop_are_not_copied_at_each_step():
    """On the CPU, whose compiler copies the whole stack where it does not see what is read before the update."""
    example = make_example("gpt_scan", small=True, batch=4)
    step = remat_opt.optimize(jax.jit(example.train_step, donate_argnums=example.donate_argnums))
    ((_, choice),) = step.plan(*example.abstract_args).loops
    assert choice.update
    compiled = step.lower(*example.abstract_args).compile().as_text()
    layers = 2
    assert not re.findall(rf"= f32\[{layers},\d+,\d+\]\S* copy\(", compiled)


def test_a_plan_whose_chunks_keep_residuals_can_be_saved(tmp_path):
    step, arguments = long_lstm(400)
    optimized = remat_opt.optimize(jax.jit(step, donate_argnums=0), budget=0.15, verify=False)
    plan = optimized.plan(*arguments)
    assert plan.loops[0][1].in_chunk
    plan.save(tmp_path / "plan.json")
    again = remat_opt.optimize(jax.jit(step, donate_argnums=0), plan=remat_opt.Plan.load(tmp_path / "plan.json"))
    assert again.plan(*arguments).loops == plan.loops
    assert "tensors that are made again" in str(optimized.explain(*arguments))
    expected = jax.jit(step)(*arguments)[1]
    np.testing.assert_allclose(again(*arguments)[1], expected, rtol=1e-6)


def test_a_plan_with_loops_can_be_saved_and_used_again(tmp_path):
    step, arguments = models.MODELS["layers, adamw"]()
    step = jax.jit(step, donate_argnums=0)  # else all the temporary memory of so small a step lies in its results
    optimized = remat_opt.optimize(step)
    plan = optimized.plan(*arguments)
    assert plan.loops
    plan.save(tmp_path / "plan.json")
    again = remat_opt.optimize(step, plan=remat_opt.Plan.load(tmp_path / "plan.json"))
    assert again.plan(*arguments).loops == plan.loops
    assert str(again.jaxpr(*arguments)) == str(optimized.jaxpr(*arguments))


def test_a_gradient_inside_a_scan_is_divided_into_segments_there():
    step, arguments = models.updates_in_a_scan()
    optimized = remat_opt.optimize(step, compiler_options=AS_USERS_COMPILE)
    assert optimized.plan(*arguments).loop_bodies == 1
    plain = jax.jit(step, compiler_options=AS_USERS_COMPILE)
    temporary = [f.lower(*arguments).compile().memory_analysis().temp_size_in_bytes for f in (plain, optimized)]
    assert temporary[1] < 0.6 * temporary[0]
    jax.tree.map(np.testing.assert_array_equal, plain(*arguments), optimized(*arguments))


def test_a_search_may_save_what_flash_attention_keeps_and_not_run_it_again():
    """Under a budget between all and nothing the dear results are saved first, without anybody naming them."""
    time, width, layers = 256, 16, 6
    params = {"w1": models.normal(0, layers, width, 2 * width), "w2": models.normal(1, layers, 2 * width, width)}

    def loss(p, x):
        h, _ = lax.scan(lambda h, w: (models.block(w, models.attention(h, jnp.sin(h), jnp.cos(h))), None), x, p)
        return (h**2).mean()

    found, _, aliases = captured(lambda: models.step_of(loss, params, models.normal(8, time, width)))
    (pair,) = find_pairs(found.program).pairs
    options = choose(found.program, RATES, aliases).options[0].options
    least = needed([min(options, key=lambda option: option.bytes)])
    choices = choose(found.program, RATES, aliases, int(1.3 * least))
    ((_, choice),) = choices.chosen

    def products_of_scores(chosen):
        """Products in the backward loop that make or read time × time elements."""
        program = rewrite_loops(found.program, [pair], chosen, aliases)
        body = find_pairs(program).pairs[0].backward.body
        products = [e for e in body.equations if e.primitive is primitives.dot_general_p]
        return sum(any(body.avals[v].shape == (time, time) for v in (*e.inputs, *e.outputs)) for e in products)

    assert choice.saved
    assert products_of_scores(choices.chosen) == 5  # those of the backward pass; its scores are made again by design
    assert products_of_scores([(0, LoopChoice())]) == 6


@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
def test_a_step_with_loops_inside_other_transforms():
    step, (state, xs) = long_lstm(60, width=8, batch=2)
    optimized = remat_opt.optimize(step)
    assert optimized.plan(state, xs).loops
    batches = jnp.stack([xs, 2 * xs])

    def loss_of(step):
        return lambda state, xs: step(state, xs)[1]

    for transform in (jax.grad, lambda fun: jax.vmap(fun, in_axes=(None, 0))):
        arguments = (state[0], xs) if transform is jax.grad else (state[0], batches)
        one, other = (
            transform(lambda p, xs, fun=fun: loss_of(fun)((p, state[1]), xs))(*arguments) for fun in (step, optimized)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), one, other)


def test_a_step_that_is_scheduled_needs_less():
    """Attention and the products after it are not there at once: by the compiler's word."""
    step, arguments = gpt(layers=2, time=512, batch=2, vocabulary=64)
    found = capture(jax.jit(step, donate_argnums=0), arguments, {})
    h200 = resolve_target("h200")
    prepared = prepare(found, h200)
    (pair,) = find_pairs(found.program).pairs
    costs = PairCosts(pair, found.program, prepared.rates, None, prepared.step_search())
    schedules = costs.steps(frozenset(), None).costs
    most = schedules.within(int(0.9 * schedules.in_order.peak)).peak
    measured = []
    for choice in (LoopChoice(), LoopChoice(step_bytes=most)):
        options = PairOptions(pair, (costs.option(choice),), 1.0, 1.0)
        form = prepared.written(LoopChoices((pair,), ((0, choice),), (options,), ()), None)
        plain = functools.partial(lambda form, *leaves: form.emit(form.problem.plain, leaves), form)
        measured.append(
            measure_flat(
                plain, found.input_avals, target="h200", compiler_options=compiler_options_for(h200.platform)
            ).temp_bytes
        )
    expected = costs.option(LoopChoice()).bytes - costs.option(LoopChoice(step_bytes=most)).bytes
    assert measured[0] - measured[1] > 0.5 * expected > 0


def test_steps_that_are_divided_among_devices_stay_in_their_order():
    """Their communication is counted on the step as it was read."""
    step, arguments = gpt(layers=2, time=512, batch=2, vocabulary=64)
    found = capture(jax.jit(step, donate_argnums=0), arguments, {}).program
    counts = []
    for program in (found, dataclasses.replace(found, marks="")):
        (pair,) = find_pairs(program).pairs
        joint = joint_step(pair, recomputation(pair, LoopChoice()), program)
        counts.append(len(SearchedSteps(RATES, "cuda").costs(joint).schedules))
    assert counts[0] > 1
    assert counts[1] == 1


def test_a_plan_says_which_chunks_there_are_and_how_steps_are_scheduled():
    step, arguments = long_lstm(20)
    plan = remat_opt.optimize(jax.jit(step, donate_argnums=0), verify=False).plan(*arguments)
    choice = LoopChoice(chunk=3, in_chunk=frozenset({7}), earlier=(Chunks(2, 4, frozenset({5, 6})),), step_bytes=9000)
    edited = dataclasses.replace(plan, loops=((0, choice),))
    assert remat_opt.Plan.from_json(edited.to_json()).loops == ((0, choice),)
    with pytest.raises(ValueError, match="at least 1 step"):
        Chunks(2, 0)


@pytest.mark.parametrize("value", [jnp.ones(3, jnp.int8), jax.random.split(jax.random.key(0), 3)])
def test_there_is_room_for_what_is_known_by_its_type_alone(value: jax.Array) -> None:
    for like in (value, jax.typeof(value)):
        room = room_for(like, 4)
        assert (room.shape, room.dtype) == ((4, 3), value.dtype)
        assert (room.at[1].set(value)[1] == value).all()
