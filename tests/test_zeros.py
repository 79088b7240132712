"""Zeros that something is written into come when that is there: same results, and no memory before."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import by_jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from remat_opt import measure, optimize
from remat_opt.emit.zeros import LEAST_BYTES, loop_with_late_stacks, may_wait
from remat_opt.trace import compat
from remat_opt.trace.inline import inline

ROWS, WIDTH = 64, 64  # a step's array is a small part of `LEAST_BYTES`


def loop(reverse: bool) -> Callable:
    """Two carries, an array to go through, something fixed, and stacks of three types."""

    def run(fixed: jax.Array, first: jax.Array, arrays: jax.Array) -> tuple:
        def step(carried: tuple, one: jax.Array) -> tuple:
            state, count = carried
            state = jnp.tanh(state * fixed + one)
            return (state, count + 1), (state, count, state > 0)

        return lax.scan(step, (first, 0), arrays, reverse=reverse)

    return run


def inputs(length: int) -> tuple:
    rng = np.random.default_rng(0)
    shapes = ((ROWS, WIDTH), (ROWS, WIDTH), (length, ROWS, WIDTH))
    return tuple(jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes)


@pytest.mark.parametrize("awaited", [(0,), (1, 3)])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_with_late_stacks_gives_the_same(reverse: bool, awaited: tuple[int, ...]) -> None:
    run, given = loop(reverse), inputs(80)
    closed = jax.make_jaxpr(run)(*given)
    (equation,) = closed.eqns
    values = dict(zip(closed.jaxpr.invars, given, strict=True))
    operands = [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in equation.invars]
    found = jax.jit(lambda *operands: loop_with_late_stacks(equation.params, operands, awaited))(*operands)
    for one, other in zip(found, jax.tree.leaves(jax.jit(run)(*given)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("length", "waits"), [(8, False), (80, True)])
def test_small_stacks_are_left(length: int, waits: bool) -> None:
    (equation,) = inline(jax.make_jaxpr(loop(False))(*inputs(length))).equations
    assert may_wait(equation) == waits
    assert 8 * 4 * ROWS * WIDTH < LEAST_BYTES < 80 * 4 * ROWS * WIDTH


def test_a_loop_whose_stack_is_on_the_host_is_left() -> None:
    """A user's offloading checkpoint round the layers of a scan, as MaxText has it."""
    save = jax.checkpoint_policies.save_and_offload_only_these_names
    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["layer"]}
    policy = save(**names, offload_src="device", offload_dst="pinned_host")

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x: jax.Array, w: jax.Array) -> tuple:
        x = checkpoint_name(x, "layer")
        return x + jnp.tanh(x @ w), None

    def step(ws: jax.Array, x: jax.Array) -> jax.Array:
        return ws - 0.1 * jax.grad(lambda ws: jnp.mean(lax.scan(layer, x, ws)[0] ** 2))(ws)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 256, 256), (512, 256))]
    optimized = optimize(step, target="h200", verify=False)
    optimized.lower(*shapes)
    assert "moves residuals to the host's memory" in optimized.plan(*shapes).note


def test_a_loop_that_prints_is_left() -> None:
    def run(arrays: jax.Array) -> tuple:
        def step(total: jax.Array, one: jax.Array) -> tuple:
            jax.debug.print("{}", total.sum())
            return total + one, total

        return lax.scan(step, jnp.zeros((ROWS, WIDTH)), arrays)

    equations = inline(jax.make_jaxpr(run)(jnp.zeros((80, ROWS, WIDTH)))).equations
    assert not any(may_wait(equation) for equation in equations if equation.primitive is core.primitives.scan_p)


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def messages(weights: list[jax.Array], nodes: jax.Array) -> list[jax.Array]:
    """Layers that sum messages along edges (Kipf & Welling 2017)."""
    count = nodes.shape[0]
    senders = jnp.concatenate([jnp.arange(count)] * 2)
    receivers = jnp.concatenate([(jnp.arange(count) * factor + 1) % count for factor in (3, 5)])

    def loss(weights: list[jax.Array]) -> jax.Array:
        hidden = nodes
        for weight in weights:
            hidden = hidden + jax.ops.segment_sum(jnp.tanh(hidden @ weight)[senders], receivers, count)
        return (hidden**2).mean()

    gradients = jax.grad(loss)(weights)
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]


def recurrent(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    """Recurrent layers one upon the other."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        hidden = x
        for weight in weights:

            def step(state: jax.Array, one: jax.Array, weight: jax.Array = weight) -> tuple[jax.Array, jax.Array]:
                state = jnp.tanh(state @ weight) * jax.nn.sigmoid(one) + one
                return state, state

            _, hidden = lax.scan(step, jnp.zeros_like(hidden[0]), hidden)
        return (hidden**2).mean()

    gradients = jax.grad(loss)(weights)
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]


@pytest.mark.parametrize(
    ("step", "args", "share"),
    [
        (messages, ([array(64, 64)] * 8, array(16384, 64)), by_jax(0.4, 0.51)),  # 0.58 with zeros from the beginning
        (recurrent, ([array(128, 128)] * 4, array(64, 64, 128)), by_jax(0.32, 0.4)),  # 0.34
    ],
)
def test_a_gpu_has_no_zeros_from_the_beginning_on(step: Callable, args: tuple, share: float) -> None:
    found = measure(jax.jit(step, donate_argnums=0), *args, target="h200")
    assert found.optimized.temp_bytes <= share * found.plain.temp_bytes


def test_devices_that_share_a_step_and_tpus_make_zeros_as_they_are_written() -> None:
    def scans(target: str) -> list[int]:
        jaxpr = optimize(recurrent, donate_argnums=0, target=target).jaxpr([array(128, 128)] * 4, array(64, 64, 128))
        return [
            len(equation.outvars) - compat.scan_counts(equation.params)[1]
            for equation in jaxpr.eqns
            if equation.primitive is core.primitives.scan_p
        ]

    assert scans("v5e").count(0) < scans("h200").count(0)
