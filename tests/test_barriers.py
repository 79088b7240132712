"""Barriers: kernels that have to wait for others because the peak depends on their order."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_networks as networks
from jax import lax

from remat_opt import optimize
from remat_opt.graph.barriers import Barrier, barriers
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import Run, Schedule
from remat_opt.planner.candidates import Variants
from remat_opt.planner.prepared import prepare
from remat_opt.rewrites.captured import capture
from remat_opt.targets import measure_flat, resolve_target
from remat_opt.trace import compat
from tests.training_steps import STEPS
from tests.written_programs import bridge_of

# Values: 0 the weight, 1 the input of a layer, 2 the cotangent, 3 the gradient of the weight, 4 that of the input, 5
# what follows. Ops: 0 makes the input, 1 the cotangent, 2 the weight's gradient, 3 the input's, 4 what follows.
BIG, SMALL = 1000, 10


def backward_of_a_layer(**changes) -> tuple[Graph, Schedule]:
    ops = [
        Op((0,), (1,), Kind.OPAQUE),
        Op((0,), (2,), Kind.OPAQUE),
        Op((1, 2), (3,), Kind.CONTRACTION),
        Op((0, 2), (4,), Kind.CONTRACTION),
        Op((4, 3), (5,), Kind.ELEMENTWISE),
    ]
    for index, op in changes.items():
        ops[int(index[2:])] = op
    sizes = (SMALL, BIG, BIG, SMALL, BIG, BIG)
    graph = Graph(sizes, tuple(ops), inputs=(0,), outputs=(5,), fused=True)
    return graph, Schedule((Run((0, 1)), Run((0,), recomputed=True), Run((2, 3, 4))))


def barriers_of(graph: Graph, schedule: Schedule) -> dict[tuple[int, int], Barrier]:
    return barriers(graph, schedule, simulate(graph, schedule))


LAYERS = 4
IMAGES = jax.ShapeDtypeStruct((32, 64, 64, 32), jnp.float32)
KERNELS = [jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)] * LAYERS
BIASES = [jax.ShapeDtypeStruct((32,), jnp.float32)] * LAYERS


def conv_step(params, images):
    def loss(params):
        x = images
        for kernel, bias in zip(*params, strict=True):
            x = networks.conv(x, kernel)
            x = (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
            x = jax.nn.relu(x + bias)
        return (x**2).mean()

    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, jax.grad(loss)(params))


def temporary_bytes(step: Callable, args: tuple, donated: int = 0, solver: str = "auto") -> int:
    """Of an optimised step on an H200, by its compiler."""
    jitted = jax.jit(step, donate_argnums=0) if donated else step
    flat = compat.function_of_jaxpr(optimize(jitted, target="h200", solver=solver).trace(*args))
    avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args)]
    return measure_flat(flat, avals, donated=range(donated), target="h200").temp_bytes


@pytest.mark.filterwarnings("ignore:remat_opt. conv_step. planned for h200")
def test_the_gpu_compiler_keeps_the_order_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without barriers the compiler has an activation and its gradient at once."""
    # Nested: little else than the two is held, so that it shows when they are there at once.
    measured = ((KERNELS, BIASES), IMAGES), 2 * LAYERS, "rotor"
    with_barriers = temporary_bytes(conv_step, *measured)
    monkeypatch.setattr("remat_opt.emit.train_step.barriers", lambda *_: {})
    without_barriers = temporary_bytes(conv_step, *measured)
    # The convolution at the peak reads a reversed kernel, which is made there.
    assert with_barriers <= without_barriers - 4 * IMAGES.size + 4 * KERNELS[-1].size


def reductions() -> tuple[Graph, Schedule]:
    """Two reductions of one large buffer, 2, and what is made of it and them; as a batch norm's backward pass."""
    ops = [
        Op((0,), (1,), Kind.OPAQUE),
        Op((1,), (2,), Kind.OPAQUE),
        Op((2,), (3,), Kind.REDUCTION),
        Op((2, 3), (4,), Kind.REDUCTION),
        Op((2, 3, 4), (5,), Kind.ELEMENTWISE),
    ]
    graph = Graph((SMALL, SMALL, BIG, SMALL, SMALL, BIG), tuple(ops), inputs=(0,), outputs=(5,), fused=True)
    return graph, Schedule((Run((0,)), Run((0,), recomputed=True), Run((1, 2, 3, 4))))


def feed_forward(**changes) -> tuple[Graph, Schedule]:
    """An activation, 3, that is recomputed of the buffer 2, and its derivative, 6, that reads that buffer, too."""
    ops = [
        Op((0,), (1,), Kind.OPAQUE),
        Op((1,), (2,), Kind.CONTRACTION),
        Op((2,), (3,), Kind.ELEMENTWISE, expensive_operands=(2,)),
        Op((1, 3), (4,), Kind.CONTRACTION),
        Op((4,), (5,), Kind.CONTRACTION),
        Op((2, 5), (6,), Kind.ELEMENTWISE, expensive_operands=(2,)),
        Op((1, 6, 4), (7,), Kind.CONTRACTION),
    ]
    for index, op in changes.items():
        ops[int(index[2:])] = op
    graph = Graph((SMALL, SMALL, BIG, BIG, SMALL, BIG, BIG, SMALL), tuple(ops), inputs=(0,), outputs=(7,), fused=True)
    return graph, Schedule((Run((0, 1, 2)), Run((1, 2), recomputed=True), Run((3, 4, 5, 6))))


def of_small_values() -> tuple[Graph, Schedule]:
    graph, schedule = backward_of_a_layer()
    return Graph((SMALL, SMALL, *graph.sizes[2:]), graph.ops, graph.inputs, graph.outputs, fused=True), schedule


def far_below_the_peak() -> tuple[Graph, Schedule]:
    graph, schedule = backward_of_a_layer()
    ops = (*graph.ops, Op((5,), (6,), Kind.OPAQUE, workspace=100 * BIG))
    higher = Graph((*graph.sizes, SMALL), ops, graph.inputs, (6,), fused=True)
    return higher, Schedule((*schedule.runs[:2], Run((2, 3, 4, 5))))


LAYER, ALL = backward_of_a_layer()[0], Run((0, 1, 2, 3, 4))
BY_HAND = {
    "the input's gradient waits for the weight's": (backward_of_a_layer(), {(2, 3): Barrier((2,), (3,))}),
    "what depends on the earlier kernel": (backward_of_a_layer(op3=Op((3, 2), (4,), Kind.CONTRACTION)), {}),
    "what frees little": (of_small_values(), {}),
    "far below the peak": (far_below_the_peak(), {}),
    "nothing is recomputed": ((LAYER, Schedule((ALL,))), {(0, 3): Barrier((2,), (3,))}),
    "before the first repeat": ((LAYER, Schedule((ALL, Run((1,), recomputed=True)))), {}),
    "after a reduction": (reductions(), {(2, 3): Barrier((2,), (3,)), (2, 4): Barrier((2,), (4,))}),
    # Else XLA stores what a recomputed activation and its derivative have in common, since that is expensive.
    "a recomputed activation reads alone": (feed_forward(), {(1, 2): Barrier((2,), ())}),
    "a cheap activation": (feed_forward(op2=Op((2,), (3,), Kind.ELEMENTWISE)), {}),
    "a cheap derivative": (feed_forward(op5=Op((2, 5), (6,), Kind.ELEMENTWISE)), {}),
    "a derivative far below the peak": (
        feed_forward(op6=Op((1, 6, 4), (7,), Kind.CONTRACTION, workspace=10 * BIG)), {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND.values(), ids=BY_HAND)
def test_what_waits(case: tuple) -> None:
    of, expected = case
    assert barriers_of(*of) == expected


def test_an_exponential_that_frees_its_operand_is_no_reason_to_read_alone() -> None:
    """Of a softmax the derivative needs the exponential, and of a GELU the operand of the tangent as well."""

    def kernel_of(activation: Callable) -> Op:
        graph = bridge_of(lambda x, w: activation(x @ w) @ w, jnp.ones((2, 2)), jnp.ones((2, 2))).graph
        return next(op for op in graph.ops if op.kind is Kind.ELEMENTWISE)

    gelu, silu = kernel_of(jax.nn.gelu), kernel_of(jax.nn.silu)
    assert gelu.expensive_operands == gelu.inputs
    assert silu.expensive_operands == silu.inputs
    assert kernel_of(jnp.tanh).expensive_operands == kernel_of(jax.nn.relu).expensive_operands == ()
    assert kernel_of(lambda x: 1 / (1 + jnp.exp(x))).expensive_operands == ()


TOKENS, WIDTH, HIDDEN = 4096, 512, 2048


def feed_forward_step(weights, tokens):
    def loss(weights):
        x = tokens
        for up, down in weights:
            x = x + jax.nn.gelu(x @ up) @ down
        return (x**2).mean()

    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, jax.grad(loss)(weights))


@pytest.mark.filterwarnings("ignore:remat_opt. feed_forward_step. planned for h200")
def test_the_gpu_compiler_does_not_store_the_derivative_beside_an_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = (jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32), jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32))
    measured = ([layer] * 8, jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)), 16, "chen"

    def barriers_in_one(graph: Graph, *rest) -> dict[tuple[int, int], Barrier]:
        ops = tuple(dataclasses.replace(op, expensive_operands=()) for op in graph.ops)
        return barriers(dataclasses.replace(graph, ops=ops), *rest)

    with_barriers = temporary_bytes(feed_forward_step, *measured)
    monkeypatch.setattr("remat_opt.emit.train_step.barriers", barriers_in_one)
    assert with_barriers <= temporary_bytes(feed_forward_step, *measured) - 0.8 * 4 * TOKENS * HIDDEN


def test_activations_that_read_alone_give_the_same_values() -> None:
    tokens, *keys = jax.random.split(jax.random.key(0), 5)
    tokens = jax.random.normal(tokens, (64, 8))
    weights = [(jax.random.normal(key, (8, 32)), jax.random.normal(key, (32, 8)) / 8) for key in keys]
    prepared = prepare(capture(jax.jit(feed_forward_step), (weights, tokens), {}), resolve_target("h200"))
    found = Variants(prepared, "chen").minimum_memory()
    solution = found.solution
    alone = barriers(found.prepared.problem.graph, solution.schedule, solution.liveness)
    assert any(barrier.is_alone for barrier in alone.values())
    leaves = jax.tree.leaves((weights, tokens))
    written = found.prepared.emit(solution, leaves)
    expected = jax.tree.leaves(feed_forward_step(weights, tokens))
    for one, other in zip(written, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def attention_by_hand(**changes) -> tuple[Graph, Schedule]:
    """An exponential, 3, that is recomputed of the scores, 2; its derivative, 5, reads it, and a product later, too."""
    ops = [
        Op((0,), (1,), Kind.OPAQUE),
        Op((1,), (2,), Kind.CONTRACTION),
        Op((2,), (3,), Kind.ELEMENTWISE, expensive=True),
        Op((1, 3), (4,), Kind.CONTRACTION),
        Op((3, 4), (5,), Kind.ELEMENTWISE),
        Op((5,), (6,), Kind.CONTRACTION),
        Op((6, 3), (7,), Kind.CONTRACTION),
    ]
    for index, op in changes.items():
        ops[int(index[2:])] = op
    graph = Graph((SMALL, SMALL, BIG, BIG, BIG, BIG, SMALL, SMALL), tuple(ops), inputs=(0,), outputs=(7,), fused=True)
    return graph, Schedule((Run((0, 1, 2)), Run((1, 2), recomputed=True), Run((3, 4, 5, 6))))


def test_a_derivative_reads_a_recomputed_exponential_that_is_stored_in_any_case_behind_a_barrier() -> None:
    """Else XLA makes both in one kernel, and the scores are there until then."""
    assert barriers_of(*attention_by_hand())[2, 4] == Barrier(operands=(3,), results=())


@pytest.mark.parametrize(
    "changed",
    [
        {"op2": Op((2,), (3,), Kind.ELEMENTWISE)},  # cheap: recomputed where it is needed
        {"op6": Op((6,), (7,), Kind.CONTRACTION)},  # nobody reads it later
        {"op0": Op((0,), (1,), Kind.OPAQUE, workspace=10 * BIG)},  # far below the peak
        {"op4": Op((3, 4), (5,), Kind.CONTRACTION)},  # no kernel that computes it itself
    ],
)
def test_else_it_reads_the_exponential_as_it_is(changed: dict[str, Op]) -> None:
    assert (2, 4) not in barriers_of(*attention_by_hand(**changed))


@pytest.mark.filterwarnings("ignore:remat_opt. .*step. planned for h200")
def test_the_gpu_compiler_does_not_keep_the_scores_of_attention_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    case = STEPS["hand_written_attention"]()
    args = case.make_args(layers=2)
    with_barriers = temporary_bytes(case.step, args)
    monkeypatch.setattr("remat_opt.graph.barriers._read_whole", lambda *given: {})
    assert with_barriers <= 0.95 * temporary_bytes(case.step, args)
