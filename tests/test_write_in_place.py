"""Written steps and what is written over: updates in place, carries of loops, reversed kernels, dropout and prints."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from test_write import BATCH, WIDTHS, mlp_state, momentum_step
from written_programs import RATES, bridge_of, jaxpr_of, names_of, outline

from remat_opt.emit.train_step import write
from remat_opt.graph.build import build
from remat_opt.graph.derive import Choice, derive, early_order
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import save_everything
from remat_opt.trace import compat
from remat_opt.trace.inline import inline


def test_an_update_in_place_waits_for_the_last_reader_of_the_old_weight() -> None:
    barrier = compat.barrier_p.name
    plain = [bridge_of(momentum_step, *mlp_state(), *BATCH, donated=count) for count in (0, 2)]
    counts = [names_of(jaxpr_of(b, derive(b.graph, Choice(), early_order(b.graph)))).count(barrier) for b in plain]
    # All layers but the first have a cotangent that reads the old weight, and that no update leads to.
    assert counts == [0, len(WIDTHS) - 2]


def test_an_update_reads_nothing_that_was_made_of_the_old_weight_in_front_of_its_barrier() -> None:
    def step(w, x):
        half = w - 0.5  # made on demand
        other = jnp.tanh(half)
        new = half * (x @ x)
        return new, other @ x

    bridge = bridge_of(step, jnp.ones((2, 2)), jnp.ones((2, 2)), donated=1)
    assert outline(jaxpr_of(bridge, save_everything(bridge.graph))) == [
        "in a b",
        "c = sub a 0.5",
        "d = tanh c",
        "e = dot_general b b",
        "f g = optimization_barrier a d",
        "h = sub f 0.5",
        "i = mul h e",
        "j = dot_general g b",
        "out i j",
    ]


def test_reversed_kernels_are_made_where_a_convolution_reads_them() -> None:
    """XLA's GPU compiler knows the gradient of a convolution by the reversal of its kernel."""

    def loss(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(lax.conv(image, kernel, (2, 2), "SAME")) ** 2)

    arguments = jax.random.normal(jax.random.key(0), (2, 3, 8, 8)), jax.random.normal(jax.random.key(1), (4, 3, 3, 3))
    program = inline(jax.make_jaxpr(jax.grad(loss))(*arguments))
    turned = [equation.outputs[0] for equation in program.equations if equation.primitive is primitives.rev_p]
    assert turned
    of_gpu, of_cpu = (build(program, RATES, platform=platform) for platform in ("cuda", "cpu"))
    assert all(value in of_gpu.on_demand for value in turned)
    assert not any(value in of_cpu.on_demand for value in turned)
    for bridge in (of_gpu, of_cpu):
        found = write(bridge, save_everything(bridge.graph), {}, arguments)
        np.testing.assert_array_equal(found[0], jax.grad(loss)(*arguments))


def test_what_else_reads_a_reversed_array_keeps_it() -> None:
    def fun(image: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = lax.rev(kernel, (2, 3))
        return lax.conv(image, turned, (1, 1), "SAME"), jnp.cumsum(turned)

    program = inline(jax.make_jaxpr(fun)(jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3))))
    (turned,) = (equation.outputs[0] for equation in program.equations if equation.primitive is primitives.rev_p)
    assert turned not in build(program, RATES, platform="cuda").on_demand


def test_a_loop_carries_in_the_buffers_that_it_begins_with() -> None:
    """But for those that are read again."""

    def fun(again: bool, x: jax.Array) -> jax.Array:
        begun = x @ x
        last, _ = lax.scan(lambda carry, _: (jnp.sin(carry), None), begun, None, length=3)
        return jnp.sum(last) + (jnp.sum(begun) if again else 0.0)

    peaks = []
    for again in (False, True):
        graph = build(inline(jax.make_jaxpr(partial(fun, again))(jnp.ones((64, 64)))), RATES).graph
        peaks.append(simulate(graph, save_everything(graph)).peak)
    assert 64 * 64 * 4 <= peaks[0] < 1.1 * 64 * 64 * 4
    assert peaks[1] >= 2 * 64 * 64 * 4
