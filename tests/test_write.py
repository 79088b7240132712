"""The written step: the same values, one `remat_p` for each recomputed run, names on what is saved."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_networks as networks
from jax import lax
from jax.extend.core import primitives
from random_graphs import random_choice
from written_programs import RATES, bridge_of, equations, jaxpr_of, names_of, outline, written

from remat_opt import optimize
from remat_opt.graph.build import Bridge, build
from remat_opt.graph.derive import Choice, derive, early_order
from remat_opt.graph.schedule import Run, Schedule, save_everything
from remat_opt.search import SOLVERS
from remat_opt.trace import compat
from remat_opt.trace.inline import inline

pytestmark = pytest.mark.short


WIDTHS = [3, 5, 4, 6, 2]


def mlp_state() -> tuple[list, list]:
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=pair), jnp.float32) for pair in pairwise(WIDTHS)]
    return weights, [0.1 * w for w in weights]


BATCH = jnp.linspace(-1, 1, 21).reshape(7, 3), jnp.linspace(0, 1, 14).reshape(7, 2)


def loss(weights: list, x: jax.Array, y: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def momentum_step(weights: list, moments: list, x: jax.Array, y: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(weights, x, y)
    moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
    return [w - 0.1 * m for w, m in zip(weights, moments, strict=True)], moments, value


def mlp_bridge() -> Bridge:
    return bridge_of(momentum_step, *mlp_state(), *BATCH, donated=2)


def forward_products(bridge: Bridge) -> list[int]:
    """The results of x @ w, first layer first."""
    products = [op for op in bridge.graph.ops if op.name == "dot_general"]
    return [op.outputs[0] for op in products[: len(WIDTHS) - 1]]


def mlp_schedule(bridge: Bridge) -> tuple[Schedule, frozenset[int]]:
    """Layers 3 and 1 are recomputed, one after the other, from the saved products of layers 2 and 4."""
    products = forward_products(bridge)
    order = early_order(bridge.graph)
    made = [order.index(bridge.graph.producer[value]) for value in products]
    saved = frozenset({products[1], products[3]})
    turn = made[3] + 1
    schedule = derive(bridge.graph, Choice(saved, (turn,), (made[2], turn)), order)
    assert [bridge.graph.ops[op].name for op in schedule.recomputed].count("dot_general") == 2
    assert sum(run.recomputed for run in schedule.runs) == 2
    return schedule, saved


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_computes_the_same(seed: int) -> None:
    bridge = mlp_bridge()
    source = random.Random(seed)
    order = early_order(bridge.graph)
    schedule = derive(bridge.graph, random_choice(source, bridge.graph), order)
    leaves = jax.tree.leaves((mlp_state(), BATCH))
    expected = jax.tree.leaves(momentum_step(*mlp_state(), *BATCH))
    with jax.disable_jit():
        got = written(bridge, schedule)(*leaves)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    jaxpr_of(bridge, schedule)


def test_what_is_saved_carries_its_name_once() -> None:
    bridge = mlp_bridge()
    schedule, saved = mlp_schedule(bridge)
    products = forward_products(bridge)
    names = {products[3]: "layer 4", products[1]: "layer 2", products[0]: "layer 1, made twice"}
    jaxpr = jaxpr_of(bridge, schedule, names)
    marks = [equation for equation in equations(jaxpr, inside=True) if equation.primitive is compat.name_p]
    assert [mark.params["name"] for mark in marks] == ["layer 1, made twice", "layer 2", "layer 4"]
    maker = {variable: equation for equation in equations(jaxpr) for variable in equation.outvars}
    assert [maker[mark.invars[0]].primitive.name for mark in marks] == ["dot_general"] * 3
    assert [mark.invars[0].aval.shape for mark in marks] == [(7, 5), (7, 4), (7, 2)]
    # Everything behind reads what carries the name.
    for mark in marks:
        readers = [e for e in equations(jaxpr) if any(atom is mark.invars[0] for atom in e.invars)]
        assert readers == [mark]
    assert saved < names.keys()


def test_each_recomputed_run_is_what_a_differentiated_checkpoint_leaves() -> None:
    bridge = mlp_bridge()
    schedule, saved = mlp_schedule(bridge)
    jaxpr = jaxpr_of(bridge, schedule, dict.fromkeys(saved, "kept"))
    remats = [equation for equation in equations(jaxpr) if equation.primitive is compat.remat_p]
    runs = [run for run in schedule.runs if run.recomputed]
    assert len(remats) == len(runs)
    for equation, run in zip(remats, runs, strict=True):
        assert equation.params["differentiated"] is True
        assert np.all(equation.params["prevent_cse"])
        policy = equation.params["policy"]
        assert policy(compat.name_p, name="kept")
        assert not policy(compat.name_p, name="other")
        inner = names_of(equation.params["jaxpr"])
        assert inner.count("dot_general") == [bridge.graph.ops[op].name for op in run.ops].count("dot_general")


def test_a_tiny_step_is_written_as_typed() -> None:
    def step(x, w):  # shapes differ, so that no two values can be mixed up
        a = x @ w  # (2, 3)
        b = a @ jnp.transpose(a)  # (2, 2)
        return b @ a  # (2, 3)

    bridge = bridge_of(step, jnp.ones((2, 4)), jnp.ones((4, 3)))
    x, w = bridge.program.inputs
    assert (bridge.graph.ops[0].name, bridge.graph.ops[0].inputs) == ("dot_general", (x, w))
    products = [index for index, op in enumerate(bridge.graph.ops) if op.name == "dot_general"]
    first, last = products[0], len(bridge.graph.ops) - 1
    runs = (Run(tuple(range(last))), Run((first,), recomputed=True), Run((last,)))
    names = {bridge.graph.ops[products[1]].outputs[0]: "b"}
    assert outline(jaxpr_of(bridge, Schedule(runs), names)) == [
        "in a b",
        "c = dot_general a b",
        "d = transpose c",
        "e = dot_general c d",
        "f = name e",
        "g h = remat a b f",
        "  in a b c",
        "  d = dot_general a b",
        "  out d c",
        "i = dot_general h g",
        "out i",
    ]


def test_constants_and_virtual_values_are_made_in_each_run_that_reads_them() -> None:
    def step(x):
        scale = lax.full((2, 2), 3.0, jnp.float32)  # depends on no input
        a = x @ x
        b = (a * scale + 1.0) @ x
        return (b * scale) @ a

    bridge = bridge_of(step, jnp.ones((2, 2)))
    assert [op.name for op in bridge.graph.ops] == ["dot_general", "add", "dot_general", "mul", "dot_general"]
    runs = (Run((0, 1)), Run((0, 1), recomputed=True), Run((2, 3, 4)))
    jaxpr = jaxpr_of(bridge, Schedule(runs))
    (remat,) = [equation for equation in equations(jaxpr) if equation.primitive is compat.remat_p]
    broadcasts = [e for e in equations(jaxpr) if e.primitive is primitives.broadcast_in_dim_p]
    assert len(broadcasts) == 2  # in the run before and in the run behind
    assert names_of(remat.params["jaxpr"]) == ["dot_general", "broadcast_in_dim", "mul", "add"]
    assert not {v for e in broadcasts for v in e.outvars} & set(remat.invars)
    x = jnp.linspace(0, 1, 4).reshape(2, 2)
    np.testing.assert_allclose(written(bridge, Schedule(runs))(x)[0], step(x), rtol=1e-6)


def test_a_virtual_value_is_handed_on_to_the_run_behind() -> None:
    """What is recomputed for a product and read again by an elementwise derivative is computed once for both."""

    def step(x):
        a = x @ x
        half = a - 0.5
        return (jnp.tanh(half) @ x) * half

    bridge = bridge_of(step, jnp.ones((2, 2)))
    assert [op.name for op in bridge.graph.ops] == ["dot_general", "tanh", "dot_general", "mul"]
    schedule = Schedule((Run((0, 1)), Run((1,), recomputed=True), Run((2, 3))))
    assert outline(jaxpr_of(bridge, schedule)) == [
        "in a",
        "b = dot_general a a",
        "c = sub b 0.5",
        "d = tanh c",
        "e f g h = remat b a",
        "  in a b",
        "  c = sub a 0.5",
        "  d = tanh c",
        "  out d a b c",
        "i = dot_general e g",
        "j = mul i h",
        "out j",
    ]


def test_saving_everything_writes_every_equation_once() -> None:
    def step(x):
        a = jnp.sin(x)
        b = jnp.exp(a)
        square = (a + b) * (b + a)  # each needed by two
        cube = square * square * a
        return jnp.sum(cube) + jnp.sum(square)

    for fun, arguments in ((step, (jnp.ones((3,)),)), (momentum_step, (*mlp_state(), *BATCH))):
        bridge = bridge_of(fun, *arguments)
        jaxpr = jaxpr_of(bridge, save_everything(bridge.graph))
        program = Counter(equation.primitive.name for equation in bridge.program.equations)
        assert Counter(names_of(jaxpr)) == program


def test_the_names_of_scopes_stay() -> None:
    def step(x):
        with jax.named_scope("block"):
            a = x @ x
        return (a @ x) @ a

    bridge = bridge_of(step, jnp.ones((2, 2)))
    schedule = Schedule((Run((0, 1)), Run((0,), recomputed=True), Run((2,))))
    products = [e for e in equations(jaxpr_of(bridge, schedule), inside=True) if e.primitive.name == "dot_general"]
    assert ["block" in str(e.source_info.name_stack) for e in products] == [True, False, True, False]


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_every_solver_can_be_asked_for_and_computes_the_same(solver: str) -> None:
    step, arguments = networks.sine_step, networks.sine_arguments(width=32, layers=6, batch=64)
    optimized = optimize(step, solver=solver)
    plan = optimized.plan(*arguments)
    assert plan.solver == solver
    assert plan.predicted.peak_bytes <= plan.predicted.plain_peak_bytes
    ours, plain = optimized(*arguments), jax.jit(step)(*arguments)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), ours, plain)


def test_a_kernel_reads_what_it_writes_over_as_it_was_before_the_barrier() -> None:
    """The cotangent waits at the barrier of the recomputed run; the compiler overwrites only what is read directly."""

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = x @ w
        cotangent = jnp.sin(hidden) @ w @ w
        return (cotangent * jnp.cos(hidden)) @ w

    square = jnp.ones((8, 8))
    for platform in ("cuda", ""):
        program = inline(jax.make_jaxpr(function)(square, square))
        bridge = build(program, RATES, platform=platform)
        assert [op.name for op in bridge.graph.ops] == [
            "dot_general",
            "sin",
            *["dot_general"] * 2,
            "mul",
            "dot_general",
        ]
        schedule = Schedule((Run((0, 1, 2, 3)), Run((0,), recomputed=True), Run((4, 5))))
        found = list(equations(jaxpr_of(bridge, schedule)))
        products = {one.outvars[0] for one in found if one.primitive is primitives.dot_general_p}
        (scaled,) = [one for one in found if one.primitive is primitives.mul_p]
        assert products.isdisjoint(scaled.invars) == (platform == "")


@pytest.mark.parametrize(
    ("product", "shapes", "is_written_over"),
    [
        (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), ((2, 4, 8, 8), (4, 4, 1, 1)), False),
        (lambda x, w: x @ w, ((8, 8), (8, 8)), True),
    ],
)
def test_results_of_products_are_written_over_and_those_of_convolutions_are_not(
    product: Any, shapes: tuple, is_written_over: bool
) -> None:
    program = inline(jax.make_jaxpr(lambda x, w: product(jnp.tanh(product(x, w)), w))(*map(jnp.ones, shapes)))
    (activation,) = [op for op in build(program, RATES, platform="cuda").graph.ops if op.name == "tanh"]
    assert bool(activation.same_place) == is_written_over
