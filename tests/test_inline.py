"""Inlining: calls are entered, copies merged, dead equations dropped, effects kept; the results stay the same."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from step_networks import conv
from written_programs import evaluate

from remat_opt.trace.inline import Equation, Program, inline

pytestmark = pytest.mark.short

CALLS = {
    primitives.jit_p,
    primitives.remat_p,
    primitives.custom_jvp_call_p,
    primitives.custom_vjp_call_p,
    primitives.call_p,
    primitives.closed_call_p,
}
X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def inlined(fun: Callable, *arguments: Any, **options: Any) -> Program:
    return inline(jax.make_jaxpr(fun)(*arguments), **options)


def names(program: Program) -> list[str]:
    return [equation.primitive.name for equation in program.equations]


def assert_flat_and_equal(fun: Callable, *arguments: Any) -> Program:
    program = inlined(fun, *arguments)
    assert not CALLS.intersection(equation.primitive for equation in program.equations)
    expected, got = jax.tree.leaves(fun(*arguments)), evaluate(program, *arguments)
    assert [np.shape(x) for x in got] == [np.shape(x) for x in expected]
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    return program


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


@soft.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return soft(x), t * jax.nn.sigmoid(x)


@jax.custom_vjp
def halved(x):
    return jnp.sin(x)


halved.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (0.5 * g * jnp.cos(x),))


def nested(x):
    """Every call that is entered, one inside the other."""
    inner = jax.jit(lambda y: halved(soft(y)) * 2.0)
    middle = jax.checkpoint(lambda y: jax.jit(lambda z: inner(z) + 1.0)(jnp.tanh(y)))
    return jnp.sum(jax.jit(middle)(x) ** 2)


@pytest.mark.parametrize(
    "fun", [nested, jax.grad(nested), jax.value_and_grad(nested), jax.hessian(nested)], ids=["f", "g", "vg", "hessian"]
)
def test_nested_calls_are_flattened_and_compute_the_same(fun: Callable) -> None:
    assert_flat_and_equal(fun, X)


def mlp_step(wrap: Callable) -> Callable:
    """An SGD step on four tanh layers, each wrapped."""

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return checkpoint_name(jnp.tanh(jax.nn.gelu(x @ w) + 1.0), "layer")

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = wrap(layer)(w, x)
        return jnp.mean(x**2)

    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    return step


WEIGHTS = [jnp.eye(3) + 0.1 * i for i in range(4)]


@pytest.mark.parametrize(
    "wrap",
    [
        jax.checkpoint,
        lambda f: jax.checkpoint(jax.checkpoint(f)),
        lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
        lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
        lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("layer")),
    ],
    ids=["each layer", "nested", "with jit", "dots", "names"],
)
def test_the_copy_that_a_users_checkpoint_left_is_merged(wrap: Callable) -> None:
    program = assert_flat_and_equal(mlp_step(wrap), WEIGHTS, X)
    without = inlined(mlp_step(lambda f: f), WEIGHTS, X)
    assert names(program).count("dot_general") == names(without).count("dot_general") == 3 * 4 - 1
    expected = Counter(names(without))
    expected["reduce_precision"] = names(program).count("reduce_precision")  # JAX marks what a policy saves with it
    assert Counter(names(program)) == +expected
    assert program.entered_checkpoints
    assert not without.entered_checkpoints


def test_a_users_checkpoint_can_be_kept() -> None:
    program = inlined(mlp_step(jax.checkpoint), WEIGHTS, X, keep_checkpoints=True)
    assert names(program).count(primitives.remat_p.name) == 4
    assert not program.entered_checkpoints
    expected = jax.tree.leaves(mlp_step(jax.checkpoint)(WEIGHTS, X))
    for got, leaf in zip(evaluate(program, WEIGHTS, X), expected, strict=True):
        np.testing.assert_allclose(got, leaf, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_that_offloads_is_kept_in_any_case() -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    program = inlined(mlp_step(lambda f: jax.checkpoint(f, policy=policy)), WEIGHTS, X)
    assert names(program).count(primitives.remat_p.name) == 4


def test_equal_equations_are_one_and_different_ones_are_not() -> None:
    def fun(x, i):
        same = jnp.sin(x) + jnp.sin(x)
        axes = x.sum(0).sum() + x.sum(1).sum()  # other parameters
        literals = (x * 2.0).sum() + (x * 3.0).sum() + (i * 2).sum()  # other operands, other types
        return same.sum() + axes + literals

    program = assert_flat_and_equal(fun, X, jnp.arange(3))
    assert names(program).count("sin") == 1
    sums = [equation.params["axes"] for equation in program.equations if equation.primitive.name == "reduce_sum"]
    assert sums.count((0,)) == 4  # x over its rows, the two rows of sums, the integers
    assert sums.count((1,)) == 1
    assert names(program).count("mul") == 3


SWAP = jax.jit(lambda a, b, c: (c, a, 2.0, b - a))


def with_unwanted_results(x: jax.Array) -> jax.Array:
    jnp.exp(x).sum()
    kept, _ = jax.jit(lambda y: (jnp.sin(y), jnp.cos(jnp.tan(y))))(x)
    return kept


def padded(x: jax.Array) -> jax.Array:
    """By nothing, and by something."""
    return lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 0))) + lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0)))


FUNCTIONS = {
    "places of operands and results": (
        lambda a, b, c: [SWAP(a, b, c), SWAP(c, a, b)[::-1]], (1.0, 20.0, 300.0), ["sub", "sub"]
    ),
    "arguments and a number are returned": (lambda x, y: (y, 3.0, x, y), (1.0, 2.0), []),
    "operands in another order": (lambda x, y: (x - y, y - x, x - y), (1.0, 5.0), ["sub", "sub"]),
    "zeros of other signs": (lambda x: (x / 0.0, x / -0.0), (jnp.float32(1),), ["div", "div"]),
    "nobody wants it": (with_unwanted_results, (X,), ["sin"]),
    "a pad by nothing": (padded, (X,), ["pad", "add"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_is_merged_and_what_is_not(case: tuple) -> None:
    fun, arguments, expected = case
    assert names(assert_flat_and_equal(fun, *arguments)) == expected


def test_random_numbers_are_merged_by_their_key_and_those_of_the_device_are_not() -> None:
    def by_key(key: jax.Array, other: jax.Array) -> list[jax.Array]:
        return [jax.random.normal(k, (2,)) for k in (key, other, key)]

    program = assert_flat_and_equal(by_key, jax.random.key(0), jax.random.key(1))
    assert names(program).count("random_bits") == 2
    draw = partial(primitives.rng_uniform_p.bind, shape=(2,))
    assert len(inlined(lambda low, high: (draw(low, high), draw(low, high)), 0.0, 1.0).equations) == 2


def test_prints_stay_once_each_and_in_order(capfd) -> None:
    def fun(x):
        jax.debug.print("first {}", x)
        jax.jit(lambda y: jax.debug.print("second {}", y))(x)
        jax.checkpoint(lambda y: jax.debug.print("second {}", y))(x)  # the same again is printed again
        jax.debug.print("third", ordered=True)
        return x

    program = inlined(fun, 1.0)
    assert len(program.equations) == 4
    assert len(program.effects) == 2
    evaluate(program, 1.0)
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:4] == ["first 1.0", "second 1.0", "second 1.0", "third"]


def test_arrays_of_the_closure_are_bound_once() -> None:
    table = jnp.arange(3.0)
    host = np.arange(3.0, dtype=np.float32) * 10

    def fun(x):
        first = jax.jit(lambda y: y * table + host)(x)
        return jax.checkpoint(lambda y: y + table)(first) - host

    program = assert_flat_and_equal(fun, X)
    assert len(program.inputs) == 1
    assert len(program.constants) == 2
    assert names(program).count("mul") == 1


@pytest.mark.parametrize("side", ["in_shardings", "out_shardings"])
def test_a_jit_with_shardings_stays_one_equation(side: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    for sharding in (NamedSharding(mesh, PartitionSpec("data")), SingleDeviceSharding(jax.devices()[0])):
        fun = jax.jit(lambda x: jnp.sin(x) * 2.0, **{side: sharding})
        program = inlined(lambda x, fun=fun: fun(x) + 1.0, X)
        assert names(program) == [primitives.jit_p.name, "add"]


def test_loops_and_branches_stay_one_equation() -> None:
    def fun(x):
        total, _ = lax.scan(lambda c, row: (jax.jit(jnp.sin)(c) + row, None), jnp.zeros(3), x)
        total = lax.cond(total[0] > 0, jnp.sin, jnp.cos, total)
        return lax.while_loop(lambda c: c[0] < 3.0, lambda c: c + 1.0, total)

    program = assert_flat_and_equal(fun, X)
    assert {"scan", "cond", "while"} <= {*names(program)}


def stack_of(equation: Equation) -> str:
    return str(equation.source_info.name_stack)


def test_name_stacks_keep_the_outer_names() -> None:
    @jax.jit
    def attention(x):
        with jax.named_scope("scores"):
            return jax.jit(inner)(x)

    def inner(x):
        with jax.named_scope("inside"):
            return jnp.sin(x)

    def fun(x):
        with jax.named_scope("block"):
            return attention(x) + 1.0

    program = inlined(fun, X)
    sin, add = program.equations
    places = [stack_of(sin).index(name) for name in ("block", "attention", "scores", "inner", "inside")]
    assert places == sorted(places)
    assert "block" in stack_of(add)
    assert "attention" not in stack_of(add)


def test_transformations_stay_in_the_name_stack() -> None:
    program = inlined(jax.grad(lambda x: jnp.sum(jax.jit(jnp.sin)(x))), X)
    assert any("transpose" in stack_of(equation) for equation in program.equations)


def test_the_reversal_of_a_1x1_kernel_is_nothing() -> None:
    x, kernel = jnp.ones((1, 4, 4, 3)), jnp.arange(6.0).reshape(1, 1, 3, 2)

    def gradients(kernel):
        def loss(x, kernel):
            return (conv(x, kernel) ** 2).sum()

        return jax.grad(loss)(x, kernel)

    assert "rev" in str(jax.make_jaxpr(gradients)(kernel))
    assert "rev" not in names(assert_flat_and_equal(gradients, kernel))
    assert "rev" in names(assert_flat_and_equal(gradients, jnp.ones((3, 3, 3, 2))))


def test_pieces_of_an_array_are_taken_apart_one_by_one() -> None:
    def fun(x: jax.Array) -> list[jax.Array]:
        return [jnp.sin(row) for row in x]

    program = inlined(fun, X)
    taken = [equation for equation in program.equations if equation.inputs == program.inputs]
    assert [len(equation.outputs) for equation in taken] == [1, 1], "expected each piece in an equation of its own"
    np.testing.assert_array_equal(evaluate(program, X), fun(X))
