"""What `remat_opt.checkpoint` keeps and saves: by the residuals that JAX lists, and by the compilers' figures."""

import contextlib
import io
import itertools
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, by_jax, checkpoints_in, printed
from checks import temp_bytes as temp_bytes_of
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import remat_opt.linen
import remat_opt.nnx
from remat_opt.examples import Task
from remat_opt.examples.densenet import DenseNet
from remat_opt.examples.resnet_nnx import ResNet, classifier_step
from remat_opt.examples.training import training_example
from remat_opt.targets import measure_flat
from remat_opt.trace import compat

KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
DEPTH, WIDTH, BATCH = 12, 32, 1024


def network(params: Any, x: jax.Array) -> jax.Array:
    for index, w in enumerate(params):
        with jax.named_scope(f"layer{index}"):
            x = jax.nn.relu(checkpoint_name(x @ w, "product")) + jnp.tanh(x)
            x = checkpoint_name(x * jax.nn.sigmoid(x), "out")
    return x


def loss(params: Any, x: jax.Array) -> jax.Array:
    return (network(params, x) ** 2).mean()


def arguments() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), DEPTH)
    return [0.2 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys], jax.random.normal(keys[0], (BATCH, WIDTH))


@pytest.fixture(scope="module")
def args() -> tuple[Any, jax.Array]:
    return arguments()


def temp_bytes(fun: Any, *args: Any) -> int:
    return temp_bytes_of(jax.jit(fun, compiler_options=KEEP_BARRIERS), *args)


def residual_lines(fun: Any, *args: Any) -> list[str]:
    """What JAX says is kept between forward and backward, arguments left out."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        print_saved_residuals(fun, *args)
    return [line for line in text.getvalue().splitlines() if "argument" not in line and "literal" not in line]


def residual_bytes(fun: Any, *args: Any) -> int:
    def bytes_of(line: str) -> int:
        dtype, _, shape = line.split(" ")[0].partition("[")
        sizes = [int(size) for size in shape.rstrip("]").split(",") if size]
        return int(np.prod(sizes, dtype=np.int64)) * {"f32": 4, "bool": 1, "i32": 4}[dtype]

    return sum(map(bytes_of, residual_lines(fun, *args)))


@pytest.mark.short
def test_a_loss_needs_less_memory_on_the_cpu_with_the_documented_option(args: Any) -> None:
    plain, ours = temp_bytes(jax.grad(loss), *args), temp_bytes(jax.grad(remat_opt.checkpoint(loss)), *args)
    assert ours < 0.6 * plain
    assert ours < temp_bytes(jax.grad(jax.checkpoint(loss)), *args)


def test_through_optimize_the_saving_shows_too(args: Any) -> None:
    def step(params, x):
        grads = jax.grad(remat_opt.checkpoint(loss))(params, x)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)]

    plain = temp_bytes(jax.grad(loss), *args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat_opt.RematWarning)
        for keep in (True, False):
            optimized = remat_opt.optimize(step, keep_user_checkpoints=keep)
            assert temp_bytes_of(optimized, *args) < 0.6 * plain


@pytest.mark.short
def test_kept_tensors_are_shown_by_names_that_tell_where_they_come_from(args: Any) -> None:
    lines = residual_lines(remat_opt.checkpoint(loss), *args)
    named = [line for line in lines if "named 'layer" in line]
    assert len(named) >= 2
    assert all(__file__ in line for line in named)
    assert lines == residual_lines(remat_opt.checkpoint(lambda *args: loss(*args)), *args)
    names = set(remat_opt.checkpoint(loss).plan(*args).saved)
    assert {line.split("'")[1] for line in named} <= names


def test_names_are_the_same_in_every_run(args: Any) -> None:
    expected = str(remat_opt.checkpoint(loss).plan(*args).saved)
    assert "layer" in expected
    program = (
        "import test_checkpoint_memory as these, remat_opt; "
        "print(remat_opt.checkpoint(these.loss).plan(*these.arguments()).saved)"
    )
    assert {printed(program, PYTHONHASHSEED=seed).splitlines()[-1] for seed in "12"} == {expected}


def test_a_layer_keeps_no_more_than_its_results(args: Any) -> None:
    ours = residual_bytes(remat_opt.checkpoint(network), *args)
    assert ours <= 4 * BATCH * WIDTH
    assert residual_bytes(network, *args) > 20 * ours


def test_a_large_layer_is_divided_inside(args: Any) -> None:
    assert checkpoints_in(remat_opt.checkpoint(network), *args) >= 3
    plain = temp_bytes(jax.grad(lambda p, x: (jax.checkpoint(network)(p, x) ** 2).mean()), *args)
    assert temp_bytes(jax.grad(lambda p, x: (remat_opt.checkpoint(network)(p, x) ** 2).mean()), *args) < 0.7 * plain


# Budgets: bytes, or a fraction, of residuals


@pytest.mark.parametrize("fraction", [0.05, 0.6])
def test_a_fraction_bounds_the_residuals_and_gives_the_same_gradients(fraction: float, args: Any) -> None:
    recomputing = remat_opt.checkpoint(loss, budget=fraction)
    assert residual_bytes(recomputing, *args) <= fraction * residual_bytes(loss, *args)
    assert_close(jax.jit(jax.grad(recomputing))(*args), jax.jit(jax.grad(loss))(*args))


def test_more_budget_is_never_slower_and_bytes_are_as_fractions(args: Any) -> None:
    plans = [remat_opt.checkpoint(loss, budget=b).plan(*args) for b in (0.1, 0.3, 0.6, 0.9, 1.0)]
    extra = [plan.predicted.extra_seconds for plan in plans]
    assert all(more <= less for less, more in itertools.pairwise(extra))
    assert extra[-1] == 0
    assert len({*extra}) == len(extra)  # all of a budget is used
    assert remat_opt.checkpoint(loss, budget="1GB").plan(*args).predicted.extra_seconds == 0
    assert checkpoints_in(remat_opt.checkpoint(loss, budget="1GB"), *args) == 0
    assert remat_opt.checkpoint(loss, budget="300kB").plan(*args).predicted.extra_seconds > 0


def test_a_budget_is_of_one_call_before_vmap(args: Any) -> None:
    params, x = args
    recomputing = remat_opt.checkpoint(lambda row: loss(params, row), budget=0.4)
    one = residual_bytes(recomputing, x)
    assert residual_bytes(jax.vmap(recomputing), jnp.stack([x, x, x])) <= 3 * one + 64


# Plans


@pytest.mark.short
def test_a_plan_is_saved_loaded_and_used_and_another_functions_is_refused(args: Any, tmp_path: Any) -> None:
    for fun, budget in ((loss, None), (loss, 0.02), (network, None)):
        plan = remat_opt.checkpoint(fun, budget=budget).plan(*args)
        plan.save(tmp_path / "plan.json")
        again = remat_opt.checkpoint(fun, plan=remat_opt.Plan.load(tmp_path / "plan.json"))
        assert str(jax.make_jaxpr(again)(*args)) == str(jax.make_jaxpr(remat_opt.checkpoint(fun, budget=budget))(*args))
    with pytest.raises(remat_opt.PlanError, match="another"):
        remat_opt.checkpoint(network, plan=remat_opt.checkpoint(loss).plan(*args))(*args)


def test_plan_and_explain_take_shapes(args: Any) -> None:
    shapes = jax.eval_shape(lambda *args: args, *args)
    assert "computed again" in str(remat_opt.checkpoint(loss).explain(*shapes))
    assert remat_opt.checkpoint(loss).plan(*shapes).saved == remat_opt.checkpoint(loss).plan(*args).saved


# The user's names


def test_policy_chooses_among_the_users_names(args: Any) -> None:
    every = remat_opt.policy(loss, *args, budget=1.0)
    assert every.names == ("out", "product")
    few = remat_opt.policy(loss, *args, budget=0.6)
    assert len(few.names) == 1
    chosen = jax.checkpoint(loss, policy=few.policy)
    assert residual_bytes(chosen, *args) <= 0.6 * residual_bytes(loss, *args)
    names, policy = remat_opt.policy(loss, *args)
    assert set(names) <= {"out", "product"}
    assert callable(policy)
    assert remat_opt.policy(loss, *args, budget=1).names == ()


def test_policy_without_names_says_what_to_do(args: Any) -> None:
    with pytest.raises(ValueError, match=r"checkpoint_name.*remat_opt\.checkpoint"):
        remat_opt.policy(lambda x: jnp.sin(jnp.sin(x)).sum(), args[1])
    with pytest.raises(ValueError, match="derivative"):
        remat_opt.policy(lambda n: checkpoint_name(n, "n"), 3)


# The shape of what is written


def test_cotangents_of_values_that_pass_a_segment_wait_at_its_barrier() -> None:
    """A dense network: every layer reads all before it. Sums of cotangents may not be put off to their last term."""

    def dense(params, x):
        parts = [x]
        for w in params:
            parts.append(jnp.tanh(jnp.concatenate(parts, -1) @ w))
        return (jnp.concatenate(parts, -1) ** 2).mean()

    depth, width = 10, 16
    params = [jnp.ones((width * (index + 1), width)) for index in range(depth)]
    x = jnp.ones((4096, width))
    recomputing = remat_opt.checkpoint(dense)
    segments = [
        equation
        for equation in jax.make_jaxpr(jax.grad(recomputing))(params, x).jaxpr.eqns
        if equation.primitive is compat.remat_p and equation.params["differentiated"]
    ]
    assert len(segments) >= 2
    # The first segment to be recomputed covers the cotangents of older parts: they come out as its results again.
    covered = sum(variable.aval.shape == (4096, width) for variable in segments[0].outvars)
    assert covered >= len(segments) - 1
    assert temp_bytes(jax.grad(recomputing), params, x) < 0.7 * temp_bytes(jax.grad(dense), params, x)


# The compiler of an H200


def h200_temp(step: Any, abstract_args: Any, donated: int) -> int:
    leaves, tree = jax.tree.flatten(abstract_args)

    def flat(*leaves):
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves)))

    return measure_flat(flat, leaves, donated=tuple(range(donated)), target="h200").temp_bytes


def densenet_step(wrap: Any) -> tuple[Any, tuple]:
    network = (wrap or (lambda kind: kind))(DenseNet)(32, 64, (4, 4))
    batches = Task.IMAGES.batches(32, 224, 1000, jnp.float32)
    example = training_example("densenet", network, batches, Task.IMAGES.batches(1, 224, 1000, jnp.float32), None)
    return example.train_step, example.abstract_args


def nnx_resnet_step(wrap: Any) -> tuple[Any, tuple]:
    step, state = classifier_step(partial(ResNet, (1, 1, 1)), wrap or (lambda loss: loss))
    return step, (state, jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32))


LINEN = partial(remat_opt.linen.remat, static_argnums=2, target="h200")
NNX = partial(remat_opt.nnx.remat, target="h200")


@pytest.mark.parametrize(
    ("step_of", "remat", "share"),
    [(densenet_step, LINEN, 0.47), (nnx_resnet_step, NNX, by_jax(0.452, 0.475))],
)
def test_an_h200_trains_a_module_in_less(step_of: Any, remat: Any, share: float) -> None:
    plain, ours = (h200_temp(step, args, len(jax.tree.leaves(args[0]))) for step, args in map(step_of, (None, remat)))
    assert ours <= share * plain


def nesting(jaxpr: Any) -> int:
    """How deep `jax.checkpoint` regions stand in one another."""
    depths = [0]
    for equation in compat.bare_jaxpr(jaxpr).eqns:
        inside = max(map(nesting, compat.jaxprs_in(equation.params)), default=0)
        depths.append(inside + (equation.primitive is compat.remat_p))
    return max(depths)


def test_at_any_cost_segments_stand_in_segments() -> None:
    params, x = [jnp.ones((8, 8)) * 0.1] * 40, jnp.ones((512, 8))

    def deep(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    least = remat_opt.checkpoint(deep, budget="min")
    assert nesting(jax.make_jaxpr(least)(params, x)) >= 2
    assert least.plan(params, x).predicted.peak_bytes < 0.3 * least.plan(params, x).predicted.plain_peak_bytes
    assert temp_bytes(jax.grad(least), params, x) < 0.4 * temp_bytes(jax.grad(deep), params, x)
    assert_close(jax.jit(jax.grad(least))(params, x), jax.jit(jax.grad(deep))(params, x))


@pytest.mark.filterwarnings("ignore:remat_opt. with jax_remat3")
def test_remat3_saves_where_it_pins_the_cotangents(args: Any) -> None:
    jax.config.update("jax_remat3", True)
    try:
        ours = temp_bytes(jax.grad(remat_opt.checkpoint(loss)), *args)
        pins = compat.remat3_pins_cotangents()
    finally:
        jax.config.update("jax_remat3", False)
    plain = temp_bytes(jax.grad(loss), *args)
    assert ours < (0.6 if pins else 1.01) * plain
