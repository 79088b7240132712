"""Written steps and what is written over: updates in place, carries of loops, reversed kernels, dropout and prints."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives
from test_write import BATCH, OPTIONS, WIDTHS, mlp_state, momentum_step
from written_programs import RATES, bridge_of, jaxpr_of, names_of, outline, written

from remat_opt.emit.train_step import write
from remat_opt.graph.build import build
from remat_opt.graph.derive import Choice, derive, early_order
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import Run, Schedule, save_everything
from remat_opt.trace import compat
from remat_opt.trace.inline import inline


def test_prints_happen_once_and_in_order(capfd: pytest.CaptureFixture) -> None:
    def step(x):
        jax.debug.print("first {}", x[0, 0], ordered=True)
        a = x @ x
        jax.debug.print("second {}", a[0, 0], ordered=True)
        return a @ (a @ x)

    bridge = bridge_of(step, jnp.eye(2))
    graph = bridge.graph
    turn = len(graph.ops) - 1
    schedule = derive(graph, Choice(boundaries=(turn,)), range(len(graph.ops)))
    assert schedule.recomputed
    jax.jit(written(bridge, schedule))(jnp.eye(2))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:-1] == ["first 1.0", "second 1.0"]


def test_a_dropout_mask_that_is_recomputed_is_the_same() -> None:
    def objective(w, x, key):
        kept = jax.random.bernoulli(key, 0.5, (7, 5))
        hidden = jnp.where(kept, jnp.tanh(x @ w), 0.0)
        return jnp.sum((hidden @ w.T) ** 2)

    arguments = (jnp.linspace(0, 1, 15).reshape(3, 5), BATCH[0], jax.random.key(3))
    bridge = bridge_of(jax.grad(objective), *arguments)
    order = range(len(bridge.graph.ops))
    turn = len(bridge.graph.ops) - 2
    schedule = derive(bridge.graph, Choice(boundaries=(turn,)), order)
    assert "random_bits" in {bridge.graph.ops[op].name for op in schedule.recomputed}
    got = jax.jit(written(bridge, schedule), compiler_options=OPTIONS)(*arguments)
    np.testing.assert_allclose(got[0], jax.grad(objective)(*arguments), rtol=1e-5)


def test_loops_are_recomputed_whole() -> None:
    def step(x):
        a, _ = lax.scan(lambda c, row: (jnp.sin(c @ x), row), x, jnp.arange(3.0))
        return (a @ x) @ a

    bridge = bridge_of(step, BATCH[0][:3])
    last = len(bridge.graph.ops) - 1
    scan = next(index for index, op in enumerate(bridge.graph.ops) if op.name == "scan")
    runs = (Run(tuple(range(last))), Run((scan,), recomputed=True), Run((last,)))
    jaxpr = jaxpr_of(bridge, Schedule(runs))
    assert names_of(jaxpr, inside=True).count("scan") == 2
    np.testing.assert_allclose(written(bridge, Schedule(runs))(BATCH[0][:3])[0], step(BATCH[0][:3]), rtol=1e-6)


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
