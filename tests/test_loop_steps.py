"""Loops end to end: what `optimize` makes of steps with loops, with the compilers' figures, and what plans keep."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import loop_models as models
import numpy as np
import pytest
from checks import temp_bytes
from jax import lax
from jax.extend.core import primitives
from loop_kernels import attention
from test_loops_values import RATES, captured, run

import remat_opt
from benchmarks.loop_networks import gpt
from remat_opt.emit import train_step
from remat_opt.examples import make_example
from remat_opt.graph.barriers import Barrier
from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.loops.choose import LoopChoices, choose, needed, within_budget
from remat_opt.loops.costs import PairCosts
from remat_opt.loops.options import PairOptions
from remat_opt.loops.pairs import find_pairs
from remat_opt.loops.recomputation import joint_step, recomputation
from remat_opt.loops.rewrite import rewrite_loops
from remat_opt.loops.stacks import room_for
from remat_opt.planner.loop_search import SearchedSteps
from remat_opt.planner.prepared import prepare
from remat_opt.rewrites.captured import capture
from remat_opt.targets import measure_flat, resolve_target
from remat_opt.targets.options import compiler_options_for
from remat_opt.trace import compat

# XLA's own, not `conftest`'s: with these the loops are rounded alike, to the bit.
AS_USERS_COMPILE = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_backend_extra_options": "",
}


def temporary_bytes(jitted, arguments, target="h200"):
    traced = jitted.trace(*arguments)
    avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments)]
    donated = range(len(jax.tree.leaves(arguments[0])))
    return measure_flat(compat.function_of_jaxpr(traced), avals, donated=donated, target=target).temp_bytes


@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
def test_the_memory_of_a_recurrent_network_grows_like_the_root_of_its_length():
    needs = {}
    for length in (256, 1024, 4096):
        step, arguments = models.long_lstm(length)
        optimized = remat_opt.optimize(jax.jit(step, donate_argnums=0), target="h200", verify=False)
        needs[length] = temporary_bytes(optimized, arguments)
    assert needs[1024] < 2.2 * needs[256]
    assert needs[4096] < 2.2 * needs[1024]
    step, arguments = models.long_lstm(1024)
    assert needs[1024] < 0.05 * temporary_bytes(jax.jit(step, donate_argnums=0), arguments)


def test_optimize_trains_a_recurrent_network_in_less_memory():
    step, arguments = models.long_lstm(400)
    optimized = remat_opt.optimize(jax.jit(step, donate_argnums=0, compiler_options=AS_USERS_COMPILE))
    plan = optimized.plan(*arguments)
    assert plan.loops
    assert 0 < plan.predicted.extra_flops < 0.7 * plan.predicted.flops
    plain = jax.jit(step, compiler_options=AS_USERS_COMPILE)
    assert temp_bytes(optimized, *arguments) < 0.2 * temp_bytes(plain, *arguments)
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
    step, arguments = models.long_lstm(400)
    optimized = remat_opt.optimize(jax.jit(step, donate_argnums=0), budget=0.15, verify=False)
    plan = optimized.plan(*arguments)
    assert plan.loops[0][1].in_chunk
    plan.save(tmp_path / "plan.json")
    again = remat_opt.optimize(jax.jit(step, donate_argnums=0), plan=remat_opt.Plan.load(tmp_path / "plan.json"))
    assert again.plan(*arguments).loops == plan.loops
    assert "tensors that are made again" in str(optimized.explain(*arguments))
    expected = jax.jit(step)(*arguments)[1]
    np.testing.assert_allclose(again(*arguments)[1], expected, rtol=1e-6)


def solver(layers: int = 8, *, prints: bool = False):
    """Gradient descent in a `while`, until the loss is small: how many steps that are depends on the data."""

    def loss(params, x):
        for w in params:
            x = jnp.tanh(jnp.sin(x @ w))
        return (x**2).mean()

    def step(params, x):
        def going_on(carry):
            _, value, count = carry
            return (count < 5) & (value > 1e-6)

        def turn(carry):
            params, _, count = carry
            value, gradients = jax.value_and_grad(loss)(params, x)
            if prints:
                jax.debug.callback(lambda value: None, value)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, count + 1

        return lax.while_loop(going_on, turn, (params, jnp.float32(1), 0))

    return step, ([models.normal(i, 16, 16) for i in range(layers)], models.normal(20, 512, 16))


def solver_of_layers():
    """The same with layers in a `scan`: there is a pair of loops in the body."""

    def step(params, x):
        def turn(carry):
            params, count = carry
            loss = lambda p: (lax.scan(lambda h, w: (models.block(w, h), None), x, p)[0] ** 2).mean()  # noqa: E731
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params)), count + 1

        return lax.while_loop(lambda carry: carry[1] < 3, turn, (params, 0))

    return step, (models.layers(), models.normal(8, 256, models.WIDTH))


def solver_in(kind):
    """The first of these in something else."""
    step, (params, x) = solver()

    def in_a_branch(params, x):
        return lax.cond(x[0, 0] > 9, lambda: (params, 0.0, 0), lambda: step(params, x))

    def in_a_scan(params, x):
        return lax.scan(lambda params, x: step(params, x)[:2], params, jnp.stack([x, 2 * x]))

    def mapped(params, x):
        return jax.vmap(step, (None, 0))(params, jnp.stack([x, 2 * x]))

    return {"branch": in_a_branch, "scan": in_a_scan, "map": mapped}[kind], (params, x)


SOLVERS = {
    "updates in a scan": models.updates_in_a_scan,
    "layers unrolled": solver,
    "layers in a scan": solver_of_layers,
    **{f"in a {kind}": functools.partial(solver_in, kind) for kind in ("branch", "scan", "map")},
}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_gradient_inside_a_loop_is_divided_into_segments_there(name: str) -> None:
    step, arguments = SOLVERS[name]()
    optimized = remat_opt.optimize(step, compiler_options=AS_USERS_COMPILE, verify=False)
    assert optimized.plan(*arguments).loop_bodies >= 1
    plain = jax.jit(step, compiler_options=AS_USERS_COMPILE)
    share = 0.6 if name == "updates in a scan" else 0.7
    assert temp_bytes(optimized, *arguments) < share * temp_bytes(plain, *arguments)
    jax.tree.map(np.testing.assert_array_equal, plain(*arguments), optimized(*arguments))


def test_a_while_loop_on_a_gpu_needs_less() -> None:
    step, arguments = solver(16)
    planned, plain = remat_opt.optimize(step, target="h200", verify=False), jax.jit(step)
    assert temporary_bytes(planned, arguments) < 0.6 * temporary_bytes(plain, arguments)


def test_the_user_is_told_of_a_peak_in_a_loop_that_has_to_stay() -> None:
    step, arguments = solver(prints=True)
    with pytest.warns(remat_opt.RematWarning, match=r"peak is in a while \(.*has effects.*remat_opt\.checkpoint"):
        plan = remat_opt.optimize(step).plan(*arguments)
    assert plan.is_plain
    assert "no gradient" not in plan.note


def test_a_search_may_save_what_flash_attention_keeps_and_not_run_it_again():
    """Under a budget between all and nothing the expensive results are saved first, without anybody naming them."""
    time, width, layers = 256, 16, 6
    params = {"w1": models.normal(0, layers, width, 2 * width), "w2": models.normal(1, layers, 2 * width, width)}

    def loss(p, x):
        h, _ = lax.scan(lambda h, w: (models.block(w, attention(h, jnp.sin(h), jnp.cos(h))), None), x, p)
        return (h**2).mean()

    found, _, aliases = captured(lambda: models.step_of(loss, params, models.normal(8, time, width)))
    (pair,) = find_pairs(found.program).pairs
    options = choose(found.program, RATES, aliases).options
    least = needed([min(options[0].options, key=lambda option: option.bytes)])
    ((_, choice),) = chosen = [(0, option.choice) for option in within_budget(options, int(1.3 * least))]

    def products_of_scores(chosen):
        """Products in the backward loop that make or read time × time elements."""
        program = rewrite_loops(found.program, [pair], chosen, aliases)
        body = find_pairs(program).pairs[0].backward.body
        products = [e for e in body.equations if e.primitive is primitives.dot_general_p]
        return sum(any(body.avals[v].shape == (time, time) for v in (*e.inputs, *e.outputs)) for e in products)

    assert choice.saved
    assert products_of_scores(chosen) == 5  # those of the backward pass; its scores are recomputed by design
    assert products_of_scores([(0, LoopChoice())]) == 6


@pytest.mark.filterwarnings("ignore::remat_opt.RematWarning")
def test_a_step_with_loops_inside_other_transforms():
    step, (state, xs) = models.long_lstm(60, width=8, batch=2)
    optimized = remat_opt.optimize(step)
    assert optimized.plan(state, xs).loops
    batches = jnp.stack([xs, 2 * xs])

    def loss_of(step):
        return lambda state, xs: step(state, xs)[1]

    for transform in (jax.grad, lambda fun: jax.vmap(fun, in_axes=(None, 0))):
        arguments = (state[0], xs) if transform is jax.grad else (state[0], batches)
        one, other = (
            transform(lambda p, xs, fun=fun: loss_of(fun)((p, state[1]), xs))(*arguments)
            for fun in (jax.jit(step), optimized)
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
    most = schedules.chosen(int(0.9 * schedules.in_order.peak)).peak
    measured = []
    for choice in (LoopChoice(), LoopChoice(step_bytes=most)):
        options = PairOptions((costs.option(choice),), 1.0, 1.0)
        form = prepared.written(LoopChoices((pair,), ((0, choice),), (options,), ()), None)
        plain = functools.partial(lambda form, *leaves: form.emit(form.problem.plain, leaves), form)
        measured.append(
            measure_flat(
                plain, found.input_avals, target="h200", compiler_options=compiler_options_for(h200.platform)
            ).temp_bytes
        )
    expected = costs.option(LoopChoice()).bytes - costs.option(LoopChoice(step_bytes=most)).bytes
    assert measured[0] - measured[1] > 0.5 * expected > 0


@pytest.mark.parametrize("name", ["layers, adamw", "flash attention"])
def test_a_recomputed_run_may_read_a_slice_behind_a_barrier(name, monkeypatch):
    """Its region then reads the stack, and the step's number, as operands. Here all slices are read so."""
    given, read_again = train_step.barriers, []

    def barriers(graph, schedule, liveness, slices):
        found = given(graph, schedule, liveness, slices)
        for at, one in enumerate(schedule.runs):
            made = []
            for op in one.ops if one.recomputed else ():
                read = tuple(value for value in graph.ops[op].inputs if value in (slices or ()))
                if read and made and (at, op) not in found:
                    found[at, op] = Barrier(read, (made[-1],))
                    read_again.append(op)
                made += graph.ops[op].outputs
        return found

    monkeypatch.setattr(train_step, "barriers", barriers)
    found, leaves, aliases = captured(models.MODELS[name])
    pairs = find_pairs(found.program).pairs
    chosen = [(at, LoopChoice(step_bytes=1)) for at in range(len(pairs))]
    program = rewrite_loops(found.program, pairs, chosen, aliases, steps=SearchedSteps(RATES, "cuda"))
    assert read_again
    for one, other in zip(run(program, leaves), run(found.program, leaves), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_steps_that_are_divided_among_devices_stay_in_their_order():
    """Their communication is counted on the step as it was read."""
    step, arguments = gpt(layers=2, time=512, batch=2, vocabulary=64)
    found = capture(jax.jit(step, donate_argnums=0), arguments, {}).program
    counts = []
    for program in (found, dataclasses.replace(found, marks="")):
        (pair,) = find_pairs(program).pairs
        joint = joint_step(pair, recomputation(pair), program)
        counts.append(len(SearchedSteps(RATES, "cuda").costs(joint).schedules))
    assert counts[0] > 1
    assert counts[1] == 1


def test_a_plan_says_which_chunks_there_are_and_how_steps_are_scheduled():
    step, arguments = models.long_lstm(20)
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
