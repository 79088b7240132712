"""The gradient of picking one element of each row, by comparison: the values of the scatter, and less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives

import remat_opt
from remat_opt.loops.body import is_loop, read_loop
from remat_opt.rewrites.one_hot import by_comparison
from remat_opt.trace.evaluation import evaluate_all
from remat_opt.trace.inline import Program, inline


def gradient(axis: int, mode: str | None = None):
    def picked(x, index, scale):
        return (jnp.take_along_axis(x, index, axis, mode=mode) * scale).sum()

    return jax.grad(picked)


def both(fun, *args) -> tuple[Program, Program]:
    """What a function is, as traced and without its scatters."""
    program = inline(jax.make_jaxpr(fun)(*args))
    return program, by_comparison(program)


def scatters(program: Program) -> int:
    return sum(equation.primitive is primitives.scatter_add_p for equation in program.equations)


@pytest.mark.parametrize("kind", ["int32", "int8", "uint8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", [None, "fill", "promise_in_bounds"])
@pytest.mark.parametrize(("shape", "axis"), [((4, 7), 1), ((7, 4), 0), ((2, 5, 3), 1), ((3, 300), 1), ((6,), 0)])
def test_the_values_are_the_scatters(shape, axis: int, mode: str | None, dtype: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    rows = tuple(1 if at == axis else size for at, size in enumerate(shape))
    limits = (0, min(shape[axis], 127)) if mode == "promise_in_bounds" else (-9 if kind != "uint8" else 0, 120)
    index = jnp.asarray(rng.integers(*limits, rows), kind)
    args = jnp.zeros(shape, dtype), index, jnp.asarray(rng.normal(size=rows), dtype)
    given, compared = both(gradient(axis, mode), *args)
    assert (scatters(given), scatters(compared)) == (1, 0)
    (expected,), (found,) = (
        jax.jit(evaluate_all, static_argnums=0)(program, list(args)) for program in (given, compared)
    )
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def two_of_each_row(x, index):
    return jax.grad(lambda x: jnp.take_along_axis(x, index, 1).sum())(x)


def clipped(x, index):
    return jax.grad(lambda x: jnp.take_along_axis(x, index[:, :1], 1, mode="clip").sum())(x)


def whole_rows(x, index):
    return jax.grad(lambda x: x[index[:, 0]].sum())(x)


def onto_an_array(x, index):
    return jax.lax.scatter_add(
        x,
        index[:, :1, None],
        x[:, :1],
        jax.lax.ScatterDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,)),
    )


@pytest.mark.parametrize("fun", [two_of_each_row, clipped, whole_rows, onto_an_array])
def test_other_scatters_stay(fun) -> None:
    given, compared = both(fun, jnp.ones((4, 7)), jnp.zeros((4, 2), jnp.int32))
    assert scatters(given) == scatters(compared) == 1


def cross_entropy_step(weights, inputs, labels):
    def loss(weights):
        logits = (jnp.tanh(inputs @ weights[0]) @ weights[1]).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - (0.1 * g).astype(w.dtype) for w, g in zip(weights, gradients, strict=True)], value


def arguments(rows: int, width: int, classes: int, dtype: str = "float32"):
    key = jax.random.key(0)
    weights = [jax.random.normal(key, (width, width), dtype), jax.random.normal(key, (width, classes), dtype)]
    return weights, jax.random.normal(key, (rows, width), dtype), jax.random.randint(key, (rows,), 0, classes)


def test_a_cross_entropy_stores_no_array_of_zeros_on_a_gpu() -> None:
    args = jax.eval_shape(lambda: arguments(2048, 64, 4096, "bfloat16"))
    measured = remat_opt.measure(jax.jit(cross_entropy_step, donate_argnums=0), *args, target="h200")
    logits = 2 * 2048 * 4096
    assert measured.optimized is not None
    assert measured.optimized.temp_bytes < 2.1 * logits
    assert measured.optimized.temp_bytes < 0.75 * measured.plain.temp_bytes


@pytest.mark.parametrize(("target", "compared"), [("h200", True), ("v5e", True), ("cpu", False)])
def test_scatters_stay_where_results_must_have_the_same_bits(target: str, compared: bool) -> None:
    args = jax.eval_shape(lambda: arguments(64, 16, 300))
    prepared = remat_opt.optimize(cross_entropy_step, target=target).prepare(*args)
    assert scatters(prepared.captured.original) == 1
    assert scatters(prepared.captured.program) == (not compared)


def test_bodies_of_loops_are_read_so_too() -> None:
    def steps(weights, inputs, labels):
        return jax.lax.scan(lambda w, _: (cross_entropy_step(w, inputs, labels)[0], None), weights, length=3)[0]

    args = jax.eval_shape(lambda: arguments(64, 16, 300))
    program = remat_opt.optimize(steps, target="h200").prepare(*args).captured.program
    (scan,) = [equation for equation in program.equations if is_loop(equation)]
    assert scatters(read_loop(program, scan, keep_checkpoints=False).body) == 0
